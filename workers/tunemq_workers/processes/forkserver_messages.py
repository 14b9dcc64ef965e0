"""Messages between a node and its forkserver: one msgpack struct per SEQPACKET packet.

`StartProcess` comes with two file descriptors, so that packets stay small even if a configuration
is large: the trial's end of its socket to the node, and a memory file with its `TrialProcessSpec`.
A third one, if the trial process gets a cgroup, is a socket: reading from it returns when the
process is in its cgroup.
"""

from __future__ import annotations

import errno
import signal
from typing import Annotated, Final, TypeAlias

import msgspec

from tunemq_shared.base import message_encoding
from tunemq_shared.protocol.messages import TrialOrder

#: The part of a forkserver's command line between the interpreter's path and its two arguments.
COMMAND: Final = ("-P", "-m", "tunemq_workers.forkservers.forkserver")
#: The exit code of a forkserver for which the machine has no process or memory (EX_TEMPFAIL).
EXIT_SHORTAGE: Final = 75
#: The errors of such a machine.
SHORTAGES: Final = frozenset({errno.EAGAIN, errno.ENOMEM, errno.EMFILE, errno.ENFILE})


class ForkserverOptions(msgspec.Struct, frozen=True):
    """The start options of a forkserver, as JSON on its command line.

    ``without``: modules that are not preloaded, because children could not run with them when this
    process preloaded them; it then executed itself again.
    ``confined``: it runs as another user than the node, and other processes of that user must not
    access its socket to the node.
    """

    node: int
    preload: tuple[str, ...]
    sys_path: tuple[str, ...]
    without: tuple[str, ...] = ()
    confined: bool = False


class TrialProcessSpec(msgspec.Struct, frozen=True, array_like=True):
    """All that a trial process needs to run its first trial; ``order.start`` is set.

    ``gpus``: the value of CUDA_VISIBLE_DEVICES (UUIDs or indices). ``cpus``: those that it may use;
    empty: as its forkserver.
    """

    order: TrialOrder
    hostname: str
    node_ip: str
    gpus: tuple[str, ...] = ()
    cpus: tuple[int, ...] = ()


# --- node to forkserver
# ------------------------------------------------------------------------------


class StartProcess(msgspec.Struct, frozen=True, array_like=True, tag="start"):
    """Fork a trial process; ``process`` is a name of the node's choice, used once."""

    process: str


class TerminateProcess(msgspec.Struct, frozen=True, array_like=True, tag="term"):
    """Send SIGTERM to the process group of a trial process."""

    process: str


class KillProcessTree(msgspec.Struct, frozen=True, array_like=True, tag="kill"):
    """Kill the whole process tree of a trial."""

    process: str


class ForkserverPing(msgspec.Struct, frozen=True, array_like=True, tag="ping"):
    """Answer with a `ForkserverPong`: the node kills a forkserver that does not answer."""


ForkserverCommand = StartProcess | TerminateProcess | KillProcessTree | ForkserverPing

# --- forkserver to node
# ------------------------------------------------------------------------------
# Modules that a forkserver preloads are user code and can write to this socket, too: see
# `tunemq_workers.forkservers.report_validation`.

#: The most characters of a text in a report.
MAX_TEXT: Final = 4000
BoundedText: TypeAlias = Annotated[str, msgspec.Meta(max_length=MAX_TEXT)]


class PreloadBegan(msgspec.Struct, frozen=True, array_like=True, tag="preloading"):
    """The import of ``module`` begins."""

    module: BoundedText


class ForkserverReady(msgspec.Struct, frozen=True, array_like=True, tag="ready"):
    """Preloading has ended; ``preloaded`` are the modules that trial processes find imported."""

    preloaded: tuple[BoundedText, ...]


class ForkserverWarned(msgspec.Struct, frozen=True, array_like=True, tag="warning"):
    """A warning for the user."""

    text: BoundedText


class ProcessForked(msgspec.Struct, frozen=True, array_like=True, tag="forked"):
    """The trial process exists."""

    process: BoundedText
    pid: int


class ProcessExited(msgspec.Struct, frozen=True, array_like=True, tag="exited"):
    """The trial process ended, by a signal or with an exit code; its process tree may still run.

    Without a pid it could not be forked.
    """

    process: BoundedText
    pid: int | None
    signal: int | None
    exit_code: int | None


class ProcessTreeGone(msgspec.Struct, frozen=True, array_like=True, tag="gone"):
    """Nothing of the trial's process tree is left; the last report about it."""

    process: BoundedText


class ProcessTreeStuck(msgspec.Struct, frozen=True, array_like=True, tag="stuck"):
    """Killed processes of the process tree do not end; the last report about it.

    ``has_exited``: the trial process has ended. ``pids``: some of those that have not.
    """

    process: BoundedText
    has_exited: bool
    pids: tuple[int, ...]


class ForkserverPong(msgspec.Struct, frozen=True, array_like=True, tag="pong"):
    """The answer to a `ForkserverPing`."""


ForkserverReport = (
    PreloadBegan
    | ForkserverReady
    | ForkserverWarned
    | ProcessForked
    | ProcessExited
    | ProcessTreeGone
    | ProcessTreeStuck
    | ForkserverPong
)

encode = message_encoding.encode
decode_command = msgspec.msgpack.Decoder(ForkserverCommand).decode
decode_report = msgspec.msgpack.Decoder(ForkserverReport).decode
decode_process_spec = msgspec.msgpack.Decoder(TrialProcessSpec).decode
encode_boot = msgspec.json.Encoder().encode
decode_boot = msgspec.json.Decoder(ForkserverOptions).decode

#: Makes a trial process write the Python stacks of its threads to its log. No program that we know
#: uses this real-time signal; SIGUSR1 and SIGUSR2 are left to the user.
DUMP_SIGNAL: Final = signal.SIGRTMAX - 9

#: The most bytes of a packet.
MAX_PACKET_BYTES: Final = 64 * 1024
