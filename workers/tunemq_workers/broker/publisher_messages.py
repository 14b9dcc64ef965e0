"""What the node's loop tells the pump to do, and what the pump tells the loop."""

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
    """Order: introduce this node."""

    registration: bytes


@dataclass(frozen=True, slots=True)
class ForgetStream:
    """Order: how far the events for this stream are journalled is of no interest any more."""

    key: str


@dataclass(frozen=True, slots=True)
class SendOutput:
    """Order: tell pieces of output of the experiments with these keys; what fails is lost."""

    pieces: tuple[tuple[str, bytes], ...]


@dataclass(frozen=True, slots=True)
class RenewLeaseNow:
    """Order: renew the lease and read the reply at once."""


@dataclass(frozen=True, slots=True)
class Deregister:
    """Order: give the lease back, remove the queue, and end."""


PublisherOrder: TypeAlias = (
    AppendBatches | ForgetStream | Register | SendOutput | RenewLeaseNow | Deregister
)


@dataclass(frozen=True, slots=True)
class BatchesAppended:
    """Fact: the batches are in the stream."""

    key: str


@dataclass(frozen=True, slots=True)
class AppendFailed:
    """Fact: the batches may or may not be in the stream."""

    key: str
    reason: str


@dataclass(frozen=True, slots=True)
class OutputSent:
    """Fact: the pieces are told, or given up."""


@dataclass(frozen=True, slots=True)
class Registered:
    """Fact: the node is introduced."""


@dataclass(frozen=True, slots=True)
class RegistrationFailed:
    """Fact: Redis has no memory for the introduction."""


@dataclass(frozen=True, slots=True)
class LeaseReply:
    """Fact: Redis answered.

    ``announced`` is the newest assignment's (term, version). ``acknowledged_up_to`` says for each
    stream that was asked for how far its events are; those ``missing`` do not exist. ``fenced``
    says why this attempt must end, ``retired`` why somebody wants it to, in peace; empty where
    it may live. ``has_scheduler``: a farm's scheduler holds its lease; the script that an embedded
    one belongs to needs none. ``signs``: the id of the key that it signs with, in hex, as anybody
    may have written it.
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
    """Fact: Redis does not answer; said once an outage."""

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
