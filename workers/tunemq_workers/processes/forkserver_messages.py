"""What a node and its forkserver tell each other: one msgpack struct per SEQPACKET packet.

`StartProcess` carries two descriptors: the host's end of its socket to the node, and a memory file
that holds its `TrialProcessSpec`. So packets stay small, however large a configuration is. A third
one is there for a host that gets a control group: reading from it ends when the host is in there.
"""

from __future__ import annotations

import signal
from typing import Annotated, Final, TypeAlias

import msgspec

from tunemq_shared.base import message_encoding
from tunemq_shared.protocol.messages import TrialOrder

#: What follows the interpreter's path on a forkserver's command line, before its two arguments.
COMMAND: Final = ("-P", "-m", "tunemq_workers.forkservers.forkserver")


class ForkserverOptions(msgspec.Struct, frozen=True):
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


class TrialProcessSpec(msgspec.Struct, frozen=True, array_like=True):
    """All that a host needs to run its first trial; ``order.start`` is given.

    ``gpus``: what goes into CUDA_VISIBLE_DEVICES (UUIDs or indices).
    """

    order: TrialOrder
    hostname: str
    node_ip: str
    gpus: tuple[str, ...] = ()


# --- node to forkserver
# ------------------------------------------------------------------------------


class StartProcess(msgspec.Struct, frozen=True, array_like=True, tag="start"):
    """Fork a host; ``process`` is a name of the node's choice, used once."""

    process: str


class TerminateProcess(msgspec.Struct, frozen=True, array_like=True, tag="term"):
    """Send SIGTERM to the host's process group."""

    process: str


class KillProcessTree(msgspec.Struct, frozen=True, array_like=True, tag="kill"):
    """Kill the host's whole family."""

    process: str


class ForkserverPing(msgspec.Struct, frozen=True, array_like=True, tag="ping"):
    """Answer with a `ForkserverPong`: the node kills a forkserver that no longer answers."""


ForkserverCommand = StartProcess | TerminateProcess | KillProcessTree | ForkserverPing

# --- forkserver to node
# ------------------------------------------------------------------------------
# Modules that a forkserver preloads are user code and can write to this socket, too: see
# `tunemq_workers.forkservers.forkserver_reports`.

#: No text of a report is longer.
MAX_TEXT: Final = 4000
BoundedText: TypeAlias = Annotated[str, msgspec.Meta(max_length=MAX_TEXT)]


class PreloadBegan(msgspec.Struct, frozen=True, array_like=True, tag="preloading"):
    """The import of ``module`` begins."""

    module: BoundedText


class ForkserverReady(msgspec.Struct, frozen=True, array_like=True, tag="ready"):
    """Preloading is over; ``preloaded`` is what hosts find imported."""

    preloaded: tuple[BoundedText, ...]


class ForkserverWarned(msgspec.Struct, frozen=True, array_like=True, tag="warning"):
    """Something that the user should read."""

    text: BoundedText


class ProcessForked(msgspec.Struct, frozen=True, array_like=True, tag="forked"):
    """The host exists."""

    process: BoundedText
    pid: int


class ProcessExited(msgspec.Struct, frozen=True, array_like=True, tag="exited"):
    """The host ended, by a signal or with an exit code; its family may still be there.

    Without a pid it never existed: it could not be forked.
    """

    process: BoundedText
    pid: int | None
    signal: int | None
    exit_code: int | None


class ProcessTreeGone(msgspec.Struct, frozen=True, array_like=True, tag="gone"):
    """Nothing of the host is left; the last that is said about it."""

    process: BoundedText


class ForkserverPong(msgspec.Struct, frozen=True, array_like=True, tag="pong"):
    """The answer to a `ForkserverPing`."""


ForkserverReport = (
    PreloadBegan
    | ForkserverReady
    | ForkserverWarned
    | ProcessForked
    | ProcessExited
    | ProcessTreeGone
    | ForkserverPong
)

encode = message_encoding.encode
decode_command = msgspec.msgpack.Decoder(ForkserverCommand).decode
decode_report = msgspec.msgpack.Decoder(ForkserverReport).decode
decode_process_spec = msgspec.msgpack.Decoder(TrialProcessSpec).decode
encode_boot = msgspec.json.Encoder().encode
decode_boot = msgspec.json.Decoder(ForkserverOptions).decode

#: Has a host write the Python stacks of its threads to its log, whatever they do. No program that
#: we know of uses this one of the real-time signals; SIGUSR1 and SIGUSR2 are the user's.
DUMP_SIGNAL: Final = signal.SIGRTMAX - 9

#: No packet is longer.
MAX_PACKET_BYTES: Final = 64 * 1024
