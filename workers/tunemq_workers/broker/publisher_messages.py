"""The orders of a node's loop to the event publisher, and the publisher's reports."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import TypeAlias


@dataclass(frozen=True, slots=True)
class AppendBatches:
    """Order: append batches (header, events) to a stream of this generation, all or none."""

    key: str
    generation: bytes
    batches: tuple[tuple[bytes, bytes], ...]


@dataclass(frozen=True, slots=True)
class Register:
    """Order: register this node."""

    registration: bytes


@dataclass(frozen=True, slots=True)
class ForgetStream:
    """Order: delete this stream's acknowledgement from the reply; it is no longer needed."""

    key: str


@dataclass(frozen=True, slots=True)
class SendOutput:
    """Order: send pieces of trial output, by their events stream; a failure loses them."""

    pieces: tuple[tuple[str, bytes], ...]


@dataclass(frozen=True, slots=True)
class RenewLeaseNow:
    """Order: renew the lease and read the reply at once."""


@dataclass(frozen=True, slots=True)
class Deregister:
    """Order: deregister the node, delete its keys, and end the thread."""


PublisherOrder: TypeAlias = (
    AppendBatches | ForgetStream | Register | SendOutput | RenewLeaseNow | Deregister
)


@dataclass(frozen=True, slots=True)
class BatchesAppended:
    """Report: the batches are in the stream."""

    key: str


@dataclass(frozen=True, slots=True)
class AppendFailed:
    """Report: the batches may or may not be in the stream."""

    key: str
    reason: str


@dataclass(frozen=True, slots=True)
class OutputSent:
    """Report: the pieces of output are sent or dropped."""


@dataclass(frozen=True, slots=True)
class Registered:
    """Report: the node is registered."""


@dataclass(frozen=True, slots=True)
class RegistrationFailed:
    """Report: Redis rejected the registration: its memory is full or a key has a wrong type."""


@dataclass(frozen=True, slots=True)
class LeaseReply:
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


@dataclass(frozen=True, slots=True)
class RedisLost:
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
