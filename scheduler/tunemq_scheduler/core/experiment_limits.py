"""The checkpoints of all trials together: the best so many stay, and so many bytes."""

from __future__ import annotations

import heapq
from collections.abc import Iterator
from typing import Any

import msgspec

from tunemq_scheduler.core.trials.kept_checkpoints import RetentionPolicy, TrialCheckpoint
from tunemq_shared.base.errors import BugError
from tunemq_shared.protocol.messages import CheckpointCommitted

#: Score and order: what is better is greater.
_Rank = tuple[float, int]


class LimitedCheckpoint(msgspec.Struct, array_like=True):
    """A checkpoint that counts towards the limits, and whether it may go for the sake of others."""

    rank: _Rank
    checkpoint: CheckpointCommitted
    may_go: bool = False


class ExperimentLimits:
    """What `RetentionPolicy.in_experiment` and `RetentionPolicy.max_bytes` leave no place for.

    Every committed checkpoint is held back at first: as the newest of a live trial, from which a
    retry goes on, or as one that somebody is restored from. Once it may go it competes with all
    others that may, and the worst go first; the best of the experiment stays whatever its size. So
    while trials live there may be more than the limits say by what is held back.

    The cost of each step grows with the logarithm of the number of checkpoints that are kept.
    Without limits nothing is held here.
    """

    def __init__(self, rule: RetentionPolicy) -> None:
        self._rule = rule
        self._entries: dict[str, LimitedCheckpoint] = {}
        #: Those that may go, worst first; holds stale ones, too, which are passed over.
        self._worst: list[tuple[_Rank, str]] = []
        self._best: tuple[_Rank, str] | None = None
        self._bytes = 0
        self._may_go = 0
        self._is_active = rule.in_experiment is not None or rule.max_bytes is not None

    def __contains__(self, key: str) -> bool:
        return key in self._entries

    def trial_of(self, key: str) -> str:
        """Whose checkpoint it is."""
        return self._entries[key].checkpoint.trial

    def add(self, kept: TrialCheckpoint | None) -> None:
        """A checkpoint is committed; it is held back until `let_go`."""
        checkpoint = kept.committed if kept is not None else None
        if not self._is_active or kept is None or checkpoint is None:
            return
        rank = (kept.score, kept.order)
        self._entries[kept.key] = LimitedCheckpoint(rank, checkpoint)
        self._bytes += checkpoint.size
        self._best = max(self._best or (rank, kept.key), (rank, kept.key))

    def hold_back(self, key: str) -> None:
        """It may not go."""
        entry = self._entries[key]
        self._may_go -= entry.may_go
        entry.may_go = False

    def let_go(self, key: str) -> None:
        """It may go."""
        entry = self._entries[key]
        if not entry.may_go:
            entry.may_go = True
            self._may_go += 1
            heapq.heappush(self._worst, (entry.rank, key))
            if len(self._worst) > 2 * self._may_go + 64:
                self._worst = [(self._entries[one].rank, one) for one in self._free()]
                heapq.heapify(self._worst)

    def remove(self, key: str) -> None:
        """It is not kept any longer, for whatever reason."""
        entry = self._entries.pop(key, None)
        if entry is None:
            return
        self._may_go -= entry.may_go
        self._bytes -= entry.checkpoint.size
        if self._best is not None and self._best[1] == key:
            # Rare: only damage takes the best away.
            ranks = ((one.rank, other) for other, one in self._entries.items())
            self._best = max(ranks, default=None)

    def drop_surplus(self) -> Iterator[CheckpointCommitted]:
        """Keep no longer what there is no place for; yields those."""
        most, max_bytes = self._rule.in_experiment, self._rule.max_bytes
        while self._may_go and (
            (most is not None and self._may_go > most)
            or (max_bytes is not None and self._bytes > max_bytes)
        ):
            key = self._pop_worst()
            if self._best is not None and self._best[1] == key:
                heapq.heappush(self._worst, (self._entries[key].rank, key))
                return
            checkpoint = self._entries[key].checkpoint
            self.remove(key)
            yield checkpoint

    def state(self) -> tuple[Any, ...]:
        """All of it; equal states give equal values."""
        return self._bytes, sorted((key, one.may_go) for key, one in self._entries.items())

    def dumped(self) -> dict[str, LimitedCheckpoint]:
        """All of it."""
        return self._entries

    def take_back(self, entries: dict[str, LimitedCheckpoint]) -> None:
        """Be as it was when it was `dumped`."""
        self._entries = entries
        self._bytes = sum(one.checkpoint.size for one in entries.values())
        self._best = max(((one.rank, key) for key, one in entries.items()), default=None)
        self._may_go = sum(one.may_go for one in entries.values())
        self._worst = [(entries[key].rank, key) for key in self._free()]
        heapq.heapify(self._worst)

    def _pop_worst(self) -> str:
        while self._worst:
            rank, key = heapq.heappop(self._worst)
            entry = self._entries.get(key)
            if entry is not None and entry.may_go and entry.rank == rank:
                return key
        raise BugError("checkpoints that may go are counted and not found")

    def _free(self) -> Iterator[str]:
        return (key for key, entry in self._entries.items() if entry.may_go)
