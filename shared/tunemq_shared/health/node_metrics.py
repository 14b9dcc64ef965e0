"""What a node says of its machine, beside its lease.

It is for people. One decision follows from it: no trial begins on a node whose disk takes none.
"""

from __future__ import annotations

from typing import Annotated, Final

import msgspec
from msgspec import Meta

from tunemq_shared.base.byte_sizes import show_bytes
from tunemq_shared.objects.store_traffic import StoreTraffic
from tunemq_shared.protocol.message_limits import (
    MOST_LIBRARIES,
    MOST_OF_NODE,
    Line,
    Name,
    is_possible,
)
from tunemq_shared.protocol.messages import Message

#: With less nobody can work: a checkpoint and a journal want room at the same time.
FULL_BYTES: Final = 256 * 2**20
#: With fewer files that can be made, a search with a few hundred trials fails.
FEW_INODES: Final = 1000


class GpuMetrics(Message, frozen=True):
    """What a GPU does now.

    ``busy`` is the part of the time in which it did something, from 0 to 1, ``memory_used`` in
    bytes, by whomever; None where its driver does not say. ``foreign``: what processes that are not
    of the farm hold of it, for people.
    """

    uuid: Name
    busy: float | None = None
    memory_used: float | None = None
    foreign: Line = ""


class NodeDescription(Message, frozen=True):
    """Who a node is, for those who look at all nodes there are: also at one that is refused.

    ``python`` is its version, ``libraries`` those that are installed there, by name. ``gpus`` are
    the UUIDs of those that it offers.
    """

    node: Name
    hostname: Name
    python: Name
    libraries: Annotated[dict[Name, Name], Meta(max_length=MOST_LIBRARIES)]
    gpus: Annotated[tuple[Name, ...], Meta(max_length=MOST_OF_NODE)] = ()


class NodeMetrics(Message, frozen=True):
    """How a node's machine is; None where it does not say.

    ``version`` is of TuneMQ there. ``load`` is the average of the last minute, ``memory_free``,
    ``disk_free`` and ``disk_size`` (where its working folder is) in bytes, ``disk_free_inodes`` how
    many more files can be made there. ``disk_problem``: why none can be made in its working folder
    or its cache now; empty while one can. ``trial_processes`` are
    processes of trials, ``outbox`` the bytes that it has said and nobody has journalled yet,
    ``cache`` those of its copies of checkpoints. ``clock`` is the Unix time there when it said
    this. ``rejected``: how many messages it refused, by kind and reason with a colon between;
    ``number`` grows with each time that it says how it is. ``store``: what it asks of object
    stores.
    """

    version: Name = ""
    load: float | None = None
    memory_free: float | None = None
    disk_free: float | None = None
    trial_processes: int = 0
    outbox: int = 0
    cache: int = 0
    gpus: Annotated[tuple[GpuMetrics, ...], Meta(max_length=MOST_OF_NODE)] = ()
    disk_size: float | None = None
    clock: float | None = None
    about: NodeDescription | None = None
    rejected: Annotated[dict[Name, int], Meta(max_length=MOST_OF_NODE)] = msgspec.field(
        default_factory=dict
    )
    number: int = 0
    store: StoreTraffic = StoreTraffic()
    disk_free_inodes: float | None = None
    disk_problem: Line = ""

    @property
    def why_no_trial(self) -> str:
        """Why no trial is to begin there, for its disk; empty where the disk takes one."""
        if self.disk_problem:
            return self.disk_problem
        free, inodes = self.disk_free, self.disk_free_inodes
        if free is not None and free < FULL_BYTES:
            return f"the disk is full: {show_bytes(int(free))} are free where its working folder is"
        if inodes is not None and inodes < FEW_INODES:
            return f"the disk of its working folder has inodes for {inodes:.0f} more files only"
        return ""


def decode_node_metrics(data: bytes) -> NodeMetrics:
    """What a node says of itself.

    Raises:
        UNDECODABLE: it is not that, or no machine is so: an amount is negative, infinite or NaN.
    """
    node_metrics = msgspec.msgpack.decode(data, type=NodeMetrics)
    amounts = (
        node_metrics.load,
        node_metrics.memory_free,
        node_metrics.disk_free,
        node_metrics.disk_size,
        node_metrics.disk_free_inodes,
        node_metrics.trial_processes,
        node_metrics.outbox,
        node_metrics.cache,
        node_metrics.clock,
        node_metrics.number,
        *node_metrics.rejected.values(),
        sum(node_metrics.rejected.values()),  # what people are shown
        *(amount for gpu in node_metrics.gpus for amount in (gpu.busy, gpu.memory_used)),
    )
    known = (amount for amount in amounts if amount is not None)
    if not (all(map(is_possible, known)) and node_metrics.store.is_possible):
        raise msgspec.ValidationError("an amount in it is negative, infinite or too large")
    return node_metrics
