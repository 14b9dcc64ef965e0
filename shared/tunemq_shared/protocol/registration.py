"""A node's registration, and the header of everything else that it sends."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Annotated

import msgspec
from msgspec import Meta

from tunemq_shared.protocol.message_limits import (
    MOST_OF_NODE,
    NAME_CHARACTERS,
    Line,
    Name,
    is_possible,
)
from tunemq_shared.protocol.messages import Gpu, Message


class NodeRegistration(Message, frozen=True):
    """Registers a node instance on the nodes' stream.

    ``gpus``: those that it offers, if it knows them individually. ``withheld``: the UUIDs of those
    on which no trial may begin now, and why, for people. ``is_ending``: the node was told to end,
    and begins no trial. A node registers again whenever one of these changes; ``number`` increases
    with each change. ``began`` is the Unix time of its start: an instance never replaces one of its
    node that began later, so that an old registration cannot be replayed.
    """

    protocol: int
    node: Name
    instance_id: Name
    hostname: Name
    node_ip: Name
    pid: int
    resources: Annotated[dict[Name, float], Meta(max_length=MOST_OF_NODE)]
    python: Name
    cloudpickle: Name
    gpus: Annotated[tuple[Gpu, ...], Meta(max_length=MOST_OF_NODE)] = ()
    withheld: Annotated[dict[Name, Line], Meta(max_length=MOST_OF_NODE)] = msgspec.field(
        default_factory=dict
    )
    began: float = 0.0
    number: int = 0
    is_ending: bool = False


class BatchHeader(Message, frozen=True):
    """Precedes a batch: its sender, the number of its first event, the confirmed assignment.

    A node instance numbers its events in each stream from 1.
    """

    protocol: int
    instance_id: Name
    first: int
    confirmed: tuple[int, int]


def decode_registration(data: bytes) -> NodeRegistration:
    """Decode a node's registration.

    Raises:
        UNDECODABLE: It is malformed, an amount in it is negative, infinite, NaN or too large, or a
            name is too long.
    """
    registration = msgspec.msgpack.decode(data, type=NodeRegistration)
    for gpu in registration.gpus:  # `Gpu` itself has no limits: old journals hold it too
        if max(len(gpu.uuid), len(gpu.model)) > NAME_CHARACTERS:
            raise msgspec.ValidationError("a name of a GPU in it is too long")
    amounts = *registration.resources.values(), *(gpu.memory for gpu in registration.gpus)
    _check((*amounts, registration.pid, registration.began, registration.number))
    return registration


def decode_header(data: bytes) -> BatchHeader:
    """Decode the header of a batch.

    Raises:
        UNDECODABLE: It is malformed, or a number in it is negative or too large.
    """
    header = msgspec.msgpack.decode(data, type=BatchHeader)
    _check((header.first, *header.confirmed))
    return header


def _check(numbers: Iterable[float]) -> None:
    for number in numbers:
        if not is_possible(number):
            raise msgspec.ValidationError(f"a number in it cannot be: {number}")
