"""`NodeMetrics`: a node's metrics, published beside its lease.

They are for people. One decision depends on them: no trial begins on a node with a full disk.
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

#: With less free space nothing works: a checkpoint and a journal need space at the same time.
FULL_BYTES: Final = 256 * 2**20
#: With fewer free inodes, a search with a few hundred trials fails.
FEW_INODES: Final = 1000


class GpuMetrics(Message, frozen=True):
    """The current metrics of a GPU.

    ``busy`` is the fraction of time in which it was busy, from 0 to 1, and ``memory_used`` its used
    memory in bytes, by any process; None if the driver does not report them. ``foreign`` describes
    what processes outside of the farm use of it, for people.
    """

    uuid: Name
    busy: float | None = None
    memory_used: float | None = None
    foreign: Line = ""


class NodeDescription(Message, frozen=True):
    """Identity of a node, for views of all nodes, including rejected ones.

    ``python`` is its version, ``libraries`` maps installed packages to their versions. ``gpus`` are
    the UUIDs of the GPUs that it offers.
    """

    node: Name
    hostname: Name
    python: Name
    libraries: Annotated[dict[Name, Name], Meta(max_length=MOST_LIBRARIES)]
    gpus: Annotated[tuple[Name, ...], Meta(max_length=MOST_OF_NODE)] = ()


class NodeMetrics(Message, frozen=True):
    """The metrics of a node's machine; None for those that it does not report.

    ``version`` is the node's version of TuneMQ. ``load`` is the one-minute average;
    ``memory_free``, ``disk_free`` and ``disk_size`` (of its working folder) are in bytes;
    ``disk_free_inodes`` is how many more files fit there. ``disk_problem``: why the node cannot
    make a file in its working folder or its cache now; empty if it can. ``trial_processes`` counts
    processes of trials, ``outbox`` the bytes of events that are not journalled yet, ``cache`` the
    bytes of cached checkpoints. ``clock`` is the node's Unix time when it sent this. ``rejected``:
    how many messages it rejected, by ``kind:reason``. ``number`` increases with each message of
    metrics. ``store``: its requests to object stores.
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
        """Why its disk forbids to start trials there; empty if it does not."""
        if self.disk_problem:
            return self.disk_problem
        free, inodes = self.disk_free, self.disk_free_inodes
        if free is not None and free < FULL_BYTES:
            return f"the disk is full: {show_bytes(int(free))} are free where its working folder is"
        if inodes is not None and inodes < FEW_INODES:
            return f"the disk of its working folder has inodes for {inodes:.0f} more files only"
        return ""


def decode_node_metrics(data: bytes) -> NodeMetrics:
    """Decode a node's metrics.

    Raises:
        UNDECODABLE: They are malformed, or impossible: an amount is negative, infinite or NaN.
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
        sum(node_metrics.rejected.values()),  # the sum is displayed, so it must be finite, too
        *(amount for gpu in node_metrics.gpus for amount in (gpu.busy, gpu.memory_used)),
    )
    known = (amount for amount in amounts if amount is not None)
    if not (all(map(is_possible, known)) and node_metrics.store.is_possible):
        raise msgspec.ValidationError("an amount in it is negative, infinite or too large")
    return node_metrics
