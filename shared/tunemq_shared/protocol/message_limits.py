"""Size limits per kind of message, which readers check before anything else.

Each is a few times the longest honest message. A reader rejects longer ones unread, so that a
client with write access to Redis cannot exhaust a reader's memory.
"""

from __future__ import annotations

import sys
from typing import Annotated, Final

import msgspec

from tunemq_shared.base.errors import ConfigError

#: An assignment; and its base64, which fits in a frame from the consumer to its node.
COMMAND_BYTES: Final = 24 * 2**20 - 64
COMMAND_TEXT_BYTES: Final = COMMAND_BYTES * 4 // 3 + 4
#: An assignment as Celery's message: its base64 in JSON, which is base64-encoded again.
TASK_BYTES: Final = COMMAND_TEXT_BYTES * 4 // 3 + 64 * 2**10
#: A trial's configuration; all that a node needs to start one trial, so that one with an accepted
#: configuration can be started again with its checkpoints; and the starts of one assignment.
CONFIG_BYTES: Final = 2**20
START_BYTES: Final = 4 * 2**20
STARTS_BYTES: Final = 8 * 2**20
#: All orders of one experiment to one node, without the starts: room for thousands of trials, and
#: for sixteen experiments in one assignment.
ORDERS_BYTES: Final = 2**20 - 64 * 2**10

#: A name of a node, host, GPU, resource, library or version; and a line about one of them.
NAME_CHARACTERS: Final = 255
LINE_CHARACTERS: Final = 4096
#: The most GPUs, resources, or kinds of rejected messages of a node; and the most libraries.
MOST_OF_NODE: Final = 1024
MOST_LIBRARIES: Final = 4096
#: The most nodes of a farm, and the bytes of all their registrations, which a search gets at once.
MOST_NODES: Final = 4096
NODES_BYTES: Final = 32 * 2**20

#: A node's registration, its deregistration, its lease, its metrics.
REGISTRATION_BYTES: Final = 2**16
DEREGISTRATION_BYTES: Final = 2**10
LEASE_BYTES: Final = 2**10
NODE_METRICS_BYTES: Final = 2**20
#: The header of a batch; and its events, each of which may fill a frame from its trial process.
HEADER_BYTES: Final = 2**12
EVENTS_BYTES: Final = 40 * 2**20
#: An output chunk; a node sends 16 KiB at once.
OUTPUT_BYTES: Final = 64 * 2**10
#: A field of the scheduler's reply to a node.
REPLY_BYTES: Final = 64 * 2**10
#: The number that leases repeat; a lease has room for one of this length.
CHALLENGE_BYTES: Final = 2**8

#: The largest amount and sequence number that a node may send. No machine has more, and sums,
#: tables and the next number stay computable and encodable.
_MOST: Final = 2**53
#: The same limit for fields of messages: the decoder rejects impossible values.
Count = Annotated[int, msgspec.Meta(ge=0, le=_MOST)]
Amount = Annotated[float, msgspec.Meta(ge=0, le=_MOST)]
#: A duration in seconds, or another number that is neither negative nor infinite nor NaN.
Finite = Annotated[float, msgspec.Meta(ge=0, le=sys.float_info.max)]


#: Bounded text for fields of messages.
Name = Annotated[str, msgspec.Meta(max_length=NAME_CHARACTERS)]
Line = Annotated[str, msgspec.Meta(max_length=LINE_CHARACTERS)]


def check_size(trial: str, size: int, limit: int) -> None:
    """Raise ConfigError, which names the fix, if a trial's configuration or start is too long."""
    if size > limit:
        raise ConfigError(
            f"Trial {trial} cannot start: its configuration has {size:,} bytes, and {limit:,} are"
            " possible. Pass large values with tune.with_parameters(), or read them from a file in"
            " the trainable."
        )


def is_possible(number: float) -> bool:
    """Whether a node can have counted or measured this: not NaN, infinite, negative or huge."""
    return 0 <= number <= _MOST
