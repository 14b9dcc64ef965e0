"""`FarmSnapshot`: the data of a farm's metrics at one moment; and `TurnTimes`, a histogram.

The supervisor creates a snapshot once a second. It is immutable, so another thread may read it at
any time.
"""

from __future__ import annotations

import time
from bisect import bisect_left
from itertools import accumulate
from typing import Final

import msgspec

from tunemq_scheduler.api.farm_answer_types import NodeRow, RejectionRow
from tunemq_scheduler.farm.allocation.allocation_reasons import OwnerAccount
from tunemq_scheduler.farm.ipc.ipc_messages import StoreUse
from tunemq_shared.health.node_metrics import NodeMetrics
from tunemq_shared.objects.store_traffic import StoreTraffic

#: The upper bounds of the buckets for turn times, in seconds.
BUCKETS_S: Final = (0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5)


class NodeSnapshot(msgspec.Struct, frozen=True):
    """A node; ``silence_s`` is how many seconds ago it renewed its lease."""

    row: NodeRow
    node_metrics: NodeMetrics
    silence_s: float


class DiskState(msgspec.Struct, frozen=True, kw_only=True):
    """The disk of a folder; None for values that the file system does not report.

    Attributes:
        free: free bytes.
        size: total bytes.
        free_inodes: how many more files can be created.
        is_writable: whether a test file could be written.
    """

    free: float | None = None
    size: float | None = None
    free_inodes: float | None = None
    is_writable: bool


class HeadSnapshot(msgspec.Struct, frozen=True, kw_only=True):
    """The scheduler's machine.

    Attributes:
        disks: the disks, by their use.
        certificates: expiry times by certificate; Unix time.
        backup_at: when the last backup was recorded; Unix time, None if there is none.
    """

    disks: dict[str, DiskState] = {}
    certificates: dict[str, float] = {}
    backup_at: float | None = None


class FarmSnapshot(msgspec.Struct, frozen=True, kw_only=True):
    """A farm at one moment.

    Attributes:
        at: the time of the snapshot; Unix time.
        experiments: how many are in each state.
        trials: for each experiment with a process, the number of trials in each state.
        troubles: for each experiment that makes no progress, the reason: its processes fail soon
            after their start (``failing``), its process does not answer (``silent``), or it waits
            for another version of TuneMQ, its store, or to be submitted again (``waiting``).
        waiting: for each such experiment, how many more trials it would start at once, by
            `amounts.kinds_of`.
        results: how many results experiments have received since the scheduler started.
        turns: durations of the supervisor's turns: the cumulative count for each bucket of
            `BUCKETS_S` and beyond, and the sum in seconds.
        is_redis_away: whether Redis cannot be reached.
        redis_full_s: for how many seconds Redis has had no memory for orders and results; 0 if it
            has.
        nodes: all nodes.
        accounts: what owners hold, and what they are entitled to.
        rejected: messages that the scheduler and its nodes rejected.
        traffic: store requests of the scheduler's processes.
        store_uses: for each experiment with a process, its store requests and waiting trials.
        head: the scheduler's machine.
        is_known: whether the scheduler serves the farm; until then, only values of the scheduler
            itself, of Redis and of ``head`` are true.
    """

    at: float
    experiments: dict[str, int]
    trials: dict[str, dict[str, int]]
    results: int
    turns: tuple[tuple[int, ...], float]
    is_redis_away: bool
    nodes: tuple[NodeSnapshot, ...]
    accounts: tuple[OwnerAccount, ...]
    rejected: tuple[RejectionRow, ...] = ()
    waiting: dict[str, dict[str, int]] = {}
    traffic: StoreTraffic = StoreTraffic()
    store_uses: dict[str, StoreUse] = {}
    head: HeadSnapshot = HeadSnapshot()
    redis_full_s: float = 0.0
    troubles: dict[str, str] = {}
    is_known: bool = True


class TurnTimes:
    """A histogram of the durations of turns."""

    def __init__(self) -> None:
        self._counts = [0] * (len(BUCKETS_S) + 1)
        self._sum = 0.0

    def add(self, seconds: float) -> None:
        """Add the duration of a turn."""
        self._counts[bisect_left(BUCKETS_S, seconds)] += 1
        self._sum += seconds

    def so_far(self) -> tuple[tuple[int, ...], float]:
        """Return the counts and the sum; see `FarmSnapshot.turns`."""
        return tuple(accumulate(self._counts)), self._sum


def waiting_snapshot(redis_full_s: float) -> FarmSnapshot:
    """Return the snapshot of a scheduler that waits to begin, because Redis is full."""
    return FarmSnapshot(
        at=time.time(),
        experiments={},
        trials={},
        results=0,
        turns=TurnTimes().so_far(),
        is_redis_away=False,
        redis_full_s=redis_full_s,
        nodes=(),
        accounts=(),
        is_known=False,
    )
