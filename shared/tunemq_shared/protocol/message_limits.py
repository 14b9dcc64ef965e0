"""How long each kind of message may be, which is looked at before anything else is done with it.

Each is a few times what the longest honest one has. What is longer is refused unread, so that
nobody who may write to Redis can have others verify or parse what they have no memory for.
"""

from __future__ import annotations

from typing import Annotated, Final

import msgspec

#: An assignment, and the base64 of one, which fits in a frame from the consumer to its node.
COMMAND_BYTES: Final = 24 * 2**20 - 64
COMMAND_TEXT_BYTES: Final = COMMAND_BYTES * 4 // 3 + 4
#: An assignment as Celery's message: its base64 is JSON, and that is base64 again.
TASK_BYTES: Final = COMMAND_TEXT_BYTES * 4 // 3 + 64 * 2**10

#: A name of a node, host, GPU, resource, library or version; and a line about one of them.
NAME_CHARACTERS: Final = 255
LINE_CHARACTERS: Final = 4096
#: So many GPUs, or resources, or kinds of refused messages, a node says at most; and libraries.
MOST_OF_NODE: Final = 1024
MOST_LIBRARIES: Final = 4096

#: A node's introduction, its deregistration, its lease, what it says of its machine.
REGISTRATION_BYTES: Final = 2**20
DEREGISTRATION_BYTES: Final = 2**10
LEASE_BYTES: Final = 2**10
NODE_METRICS_BYTES: Final = 2**20
#: The head of a batch; and its events, of which one may be as long as a frame from its host.
HEADER_BYTES: Final = 2**12
EVENTS_BYTES: Final = 40 * 2**20
#: A piece of output, of which a node sends 16 KiB at once.
OUTPUT_BYTES: Final = 64 * 2**10
#: A field of the scheduler's reply to a node.
REPLY_BYTES: Final = 64 * 2**10
#: The number that leases have to repeat; a lease has room for one that is not longer.
CHALLENGE_BYTES: Final = 2**8

#: The greatest amount and the greatest number in a row that a node may say. No machine has more,
#: and sums, tables and the next number stay within what can be computed and encoded.
_MOST: Final = 2**53
#: The same for fields of messages: a decoder refuses what is not possible.
Count = Annotated[int, msgspec.Meta(ge=0, le=_MOST)]
Amount = Annotated[float, msgspec.Meta(ge=0, le=_MOST)]


#: For fields of messages.
Name = Annotated[str, msgspec.Meta(max_length=NAME_CHARACTERS)]
Line = Annotated[str, msgspec.Meta(max_length=LINE_CHARACTERS)]


def is_possible(number: float) -> bool:
    """Whether a node can have counted or measured this: not NaN, infinite, negative or huge."""
    return 0 <= number <= _MOST
