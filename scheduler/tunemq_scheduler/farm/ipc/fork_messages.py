"""What the supervisor and a process that experiments are forked from say to each other.

They have a SEQPACKET socket pair. On it the supervisor sends `START`, with four descriptors: the
experiment's *channel*, its end of the connection with the supervisor, and the files that it prints
to. The channel is a SEQPACKET socket pair, too, of this experiment alone: first it says that the
process was forked or why not; when the supervisor has seen that process end, it is told to `REAP`
it and says how it ended. Nobody else reaps it, so its number means nobody else until then. To close
the channel before is to have it killed.
"""

from __future__ import annotations

from typing import Final

import msgspec

from tunemq_shared.base import message_encoding

START: Final = b"S"
REAP: Final = b"R"
#: No packet is longer.
MAX_PACKET_BYTES: Final = 4096


class ExperimentForked(msgspec.Struct, frozen=True, tag="forked"):
    """The experiment's process is there."""

    pid: int


class ExperimentForkFailed(msgspec.Struct, frozen=True, tag="not_forked"):
    """The system has no process to give; says why."""

    text: str


class ExperimentExited(msgspec.Struct, frozen=True, tag="ended"):
    """How the process ended: its exit code, negative for a signal."""

    returncode: int


ForkAnswer = ExperimentForked | ExperimentForkFailed | ExperimentExited
encode: Final = message_encoding.encode
decode: Final = msgspec.msgpack.Decoder[ForkAnswer](ForkAnswer).decode
