"""The orders of a node's loop to the event publisher, and the publisher's reports."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TypeAlias

import msgspec


class AppendBatches(msgspec.Struct, frozen=True):
    """Order: append batches (header, events) to a stream of this generation, all or none."""

    key: str
    generation: bytes
    batches: tuple[tuple[bytes, bytes], ...]


class Register(msgspec.Struct, frozen=True):
    """Order: register this node."""

    registration: bytes


class ForgetStream(msgspec.Struct, frozen=True):
    """Order: delete this stream's acknowledgement from the reply; it is no longer needed."""

    key: str


class SendOutput(msgspec.Struct, frozen=True):
    """Order: send pieces of trial output, by their events stream; a failure loses them."""

    pieces: tuple[tuple[str, bytes], ...]


class RenewLeaseNow(msgspec.Struct, frozen=True):
    """Order: renew the lease and read the reply at once."""


class Deregister(msgspec.Struct, frozen=True):
    """Order: deregister the node, delete its keys, and end the thread."""


PublisherOrder: TypeAlias = (
    AppendBatches | ForgetStream | Register | SendOutput | RenewLeaseNow | Deregister
)


class BatchesAppended(msgspec.Struct, frozen=True):
    """Report: the batches are in the stream."""

    key: str


class AppendFailed(msgspec.Struct, frozen=True):
    """Report: the batches may or may not be in the stream."""

    key: str
    reason: str


class OutputSent(msgspec.Struct, frozen=True):
    """Report: the pieces of output are sent or dropped."""


class Registered(msgspec.Struct, frozen=True):
    """Report: the node is registered."""


class RegistrationFailed(msgspec.Struct, frozen=True):
    """Report: Redis rejected the registration: its memory is full or a key has a wrong type."""


class LeaseReply(msgspec.Struct, frozen=True):
    """Report: Redis answered.

    Attributes:
        generation: the generation in Redis; None if there is none.
        announced: (term, version) of the newest assignment.
        acknowledged_up_to: by stream, the number up to which its events are journalled.
        missing: the streams that do not exist.
        fenced: why this node instance must end at once; "" if it may live.
        retired: why this node instance should end in an orderly way; "" if it may live.
        has_scheduler: whether a farm's scheduler holds its lease; an embedded farm needs none.
        signs: id, in hex, of the key with which the scheduler signs; unverified.
    """

    generation: bytes | None
    announced: tuple[int, int]
    acknowledged_up_to: Mapping[str, int]
    missing: frozenset[str]
    fenced: str
    retired: str
    has_scheduler: bool = True
    signs: bytes = b""


class RedisLost(msgspec.Struct, frozen=True):
    """Report: Redis is unreachable; sent once an outage, and again if it then rejects the user."""

    reason: str


PublisherReport: TypeAlias = (
    BatchesAppended
    | AppendFailed
    | OutputSent
    | Registered
    | RegistrationFailed
    | LeaseReply
    | RedisLost
)
