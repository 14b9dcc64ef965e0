"""What a node says of its machine, beside its lease: for people, and for no decision."""

from __future__ import annotations

import msgspec

from tunemq_shared.messages import Message


class GpuVitals(Message, frozen=True):
    """What a GPU does now.

    ``busy`` is the part of the time in which it did something, from 0 to 1, ``memory_used`` in
    bytes, by whomever; None where its driver does not say. ``foreign``: what processes that are not
    of the farm hold of it, for people.
    """

    uuid: str
    busy: float | None = None
    memory_used: float | None = None
    foreign: str = ""


class NodeVitals(Message, frozen=True):
    """How a node's machine is; None where it does not say.

    ``version`` is of TuneMQ there. ``load`` is the average of the last minute, ``memory_free`` and
    ``disk_free`` (where its working folder is) in bytes. ``hosts`` are processes of trials,
    ``outbox`` the bytes that it has said and nobody has journalled yet, ``cache`` those of its
    copies of checkpoints.
    """

    version: str = ""
    load: float | None = None
    memory_free: float | None = None
    disk_free: float | None = None
    hosts: int = 0
    outbox: int = 0
    cache: int = 0
    gpus: tuple[GpuVitals, ...] = ()


decode_vitals = msgspec.msgpack.Decoder(NodeVitals).decode
