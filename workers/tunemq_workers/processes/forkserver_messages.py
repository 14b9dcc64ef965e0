"""What a node and its forkserver tell each other: one msgpack struct per SEQPACKET packet.

`StartHost` carries two descriptors: the host's end of its socket to the node, and a memory file
that holds its `HostSpec`. So packets stay small, however large a configuration is. A third one is
there for a host that gets a control group: reading from it ends when the host is in there.
"""

from __future__ import annotations

import signal
from typing import Annotated, Final, TypeAlias

import msgspec

from tunemq_shared.protocol.messages import HostOrder

#: What follows the interpreter's path on a forkserver's command line, before its two arguments.
COMMAND: Final = ("-P", "-m", "tunemq_workers.forkservers.forkserver")


class Boot(msgspec.Struct, frozen=True):
    """What a forkserver is started with, as JSON on its command line.

    ``without``: modules that are not preloaded after all, because a forkserver before this one
    (the same process, which executed itself again) found that its children cannot run with them.
    ``confined``: it runs as another user than the node, and other processes of that user must not
    reach its socket to the node.
    """

    node: int
    preload: tuple[str, ...]
    sys_path: tuple[str, ...]
    without: tuple[str, ...] = ()
    confined: bool = False


class HostSpec(msgspec.Struct, frozen=True, array_like=True):
    """All that a host needs to run its first trial; ``order.start`` is given.

    ``gpus``: what goes into CUDA_VISIBLE_DEVICES (UUIDs or indices).
    """

    order: HostOrder
    hostname: str
    node_ip: str
    gpus: tuple[str, ...] = ()


# --- node to forkserver
# ------------------------------------------------------------------------------


class StartHost(msgspec.Struct, frozen=True, array_like=True, tag="start"):
    """Fork a host; ``host`` is a name of the node's choice, used once."""

    host: str


class TermHost(msgspec.Struct, frozen=True, array_like=True, tag="term"):
    """Send SIGTERM to the host's process group."""

    host: str


class KillHost(msgspec.Struct, frozen=True, array_like=True, tag="kill"):
    """Kill the host's whole family."""

    host: str


class Ping(msgspec.Struct, frozen=True, array_like=True, tag="ping"):
    """Answer with a `Pong`: the node kills a forkserver that no longer answers."""


Command = StartHost | TermHost | KillHost | Ping

# --- forkserver to node
# ------------------------------------------------------------------------------
# Modules that a forkserver preloads are user code and can write to this socket, too: see
# `tunemq_workers.forkservers.forkserver_reports`.

#: No text of a report is longer.
MAX_TEXT: Final = 4000
Text: TypeAlias = Annotated[str, msgspec.Meta(max_length=MAX_TEXT)]


class Preloading(msgspec.Struct, frozen=True, array_like=True, tag="preloading"):
    """The import of ``module`` begins."""

    module: Text


class Ready(msgspec.Struct, frozen=True, array_like=True, tag="ready"):
    """Preloading is over; ``preloaded`` is what hosts find imported."""

    preloaded: tuple[Text, ...]


class Warned(msgspec.Struct, frozen=True, array_like=True, tag="warning"):
    """Something that the user should read."""

    text: Text


class HostForked(msgspec.Struct, frozen=True, array_like=True, tag="forked"):
    """The host exists."""

    host: Text
    pid: int


class HostExited(msgspec.Struct, frozen=True, array_like=True, tag="exited"):
    """The host ended, by a signal or with an exit code; its family may still be there.

    Without a pid it never existed: it could not be forked.
    """

    host: Text
    pid: int | None
    signal: int | None
    exit_code: int | None


class FamilyGone(msgspec.Struct, frozen=True, array_like=True, tag="gone"):
    """Nothing of the host is left; the last that is said about it."""

    host: Text


class Pong(msgspec.Struct, frozen=True, array_like=True, tag="pong"):
    """The answer to a `Ping`."""


Report = Preloading | Ready | Warned | HostForked | HostExited | FamilyGone | Pong

encode = msgspec.msgpack.Encoder().encode
decode_command = msgspec.msgpack.Decoder(Command).decode
decode_report = msgspec.msgpack.Decoder(Report).decode
decode_host_spec = msgspec.msgpack.Decoder(HostSpec).decode
encode_boot = msgspec.json.Encoder().encode
decode_boot = msgspec.json.Decoder(Boot).decode

#: Has a host write the Python stacks of its threads to its log, whatever they do. No program that
#: we know of uses this one of the real-time signals; SIGUSR1 and SIGUSR2 are the user's.
DUMP_SIGNAL: Final = signal.SIGRTMAX - 9

#: No packet is longer.
MAX_PACKET_BYTES: Final = 64 * 1024
