"""`FarmSnapshot`: all that a farm's metrics say, at one moment; and `TurnTimes`, which they count.

The supervisor makes one a second. Nothing of it changes afterwards, so that another thread may
read it for as long as it likes.
"""

from __future__ import annotations

from bisect import bisect_left
from itertools import accumulate
from typing import Final

import msgspec

from tunemq_scheduler.api.farm_answers import NodeRow, RejectionRow
from tunemq_scheduler.farm.allocation.allocation_reasons import OwnerAccount
from tunemq_scheduler.farm.ipc.ipc_messages import StoreUse
from tunemq_shared.health.node_metrics import NodeMetrics
from tunemq_shared.objects.store_traffic import StoreTraffic

#: Up to which times turns are counted together, in seconds.
BUCKETS_S: Final = (0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5)


class NodeSnapshot(msgspec.Struct, frozen=True):
    """A node; ``silence_s`` is how long ago it renewed its lease."""

    row: NodeRow
    node_metrics: NodeMetrics
    silence_s: float


class DiskState(msgspec.Struct, frozen=True, kw_only=True):
    """A folder's disk; None where the file system does not say.

    Attributes:
        free: bytes that are left.
        size: bytes.
        free_inodes: how many files can still be made.
        is_writable: whether a file could be written there.
    """

    free: float | None = None
    size: float | None = None
    free_inodes: float | None = None
    is_writable: bool


class HeadSnapshot(msgspec.Struct, frozen=True, kw_only=True):
    """The scheduler's machine.

    Attributes:
        disks: by what is on them.
        certificates: by what they are for, when they expire; Unix time.
        backup_at: when the last backup was noted; Unix time, None where none was.
    """

    disks: dict[str, DiskState] = {}
    certificates: dict[str, float] = {}
    backup_at: float | None = None


class FarmSnapshot(msgspec.Struct, frozen=True, kw_only=True):
    """A farm at one moment.

    Attributes:
        at: when that is; Unix time.
        experiments: how many are in each state.
        trials: of each experiment that has a process, how many are in each state.
        troubles: of each that stands still, why: its processes fail soon after they begin
            (``failing``), its process does not answer (``silent``), or another version of TuneMQ
            wrote what it continues from (``version``).
        waiting: of each such experiment, how many more trials it would have begin at once; by
            `requests.kinds_of`.
        results: how many experiments were given since the scheduler began.
        turns: of the supervisor's loop: of each bucket of `BUCKETS_S` and beyond, how many lasted
            no longer than that; and the seconds of all.
        is_redis_away: whether nobody can be told anything.
        redis_full_s: for how many seconds Redis has had no memory for orders and results; 0 while
            it has.
        refused: what the scheduler and its nodes did not believe.
        traffic: what the processes of the scheduler have asked of object stores.
        store_uses: of each experiment that has a process, who waits for a store.
        head: the machine of the scheduler.
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


class TurnTimes:
    """How long turns last, by buckets."""

    def __init__(self) -> None:
        self._counts = [0] * (len(BUCKETS_S) + 1)
        self._sum = 0.0

    def add(self, seconds: float) -> None:
        """One more."""
        self._counts[bisect_left(BUCKETS_S, seconds)] += 1
        self._sum += seconds

    def so_far(self) -> tuple[tuple[int, ...], float]:
        """See `FarmSnapshot.turns`."""
        return tuple(accumulate(self._counts)), self._sum
