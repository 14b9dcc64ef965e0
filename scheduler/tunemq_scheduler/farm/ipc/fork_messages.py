"""The messages between the supervisor and a forkserver of experiments.

They share a SEQPACKET socket pair. On it the supervisor sends `START` with four descriptors: the
experiment's *channel*, its end of the connection with the supervisor, and the files for its output.
The channel is another SEQPACKET socket pair, for this experiment alone. On it the forkserver
reports whether it forked the process. When the supervisor has seen that process end, it sends
`REAP`; the forkserver reaps the process and reports how it ended. No other process reaps it, so its
pid stays unique until then. Closing the channel earlier kills the process.
"""

from __future__ import annotations

from typing import Final

import msgspec

from tunemq_shared.base import message_encoding

START: Final = b"S"
REAP: Final = b"R"
#: The largest packet.
MAX_PACKET_BYTES: Final = 4096


class ExperimentForked(msgspec.Struct, frozen=True, tag="forked"):
    """The experiment's process was forked."""

    pid: int


class ExperimentForkFailed(msgspec.Struct, frozen=True, tag="not_forked"):
    """The fork failed; says why."""

    text: str


class ExperimentExited(msgspec.Struct, frozen=True, tag="ended"):
    """How the process ended: its exit code, negative for a signal."""

    returncode: int


ForkAnswer = ExperimentForked | ExperimentForkFailed | ExperimentExited
encode: Final = message_encoding.encode
decode: Final = msgspec.msgpack.Decoder[ForkAnswer](ForkAnswer).decode
