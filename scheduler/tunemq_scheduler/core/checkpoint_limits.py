"""Limits on the checkpoints of all trials together: their number and their size in bytes."""

from __future__ import annotations

import heapq
from collections.abc import Iterator

import msgspec

from tunemq_scheduler.core.trials.kept_checkpoints import RetentionPolicy, TrialCheckpoint
from tunemq_shared.base.errors import BugError
from tunemq_shared.protocol.messages import CheckpointCommitted

#: Score and order; greater is better.
_Rank = tuple[float, int]


class LimitedCheckpoint(msgspec.Struct, array_like=True):
    """A checkpoint that counts towards the limits; ``may_go`` says whether it may be deleted."""

    rank: _Rank
    checkpoint: CheckpointCommitted
    may_go: bool = False


class ExperimentLimits:
    """Enforces `RetentionPolicy.in_experiment` and `RetentionPolicy.max_bytes`.

    A committed checkpoint is protected at first: as the newest of a live trial, from which a retry
    resumes, or as one that a trial is being restored from. Once it is released it competes with all
    other released ones, and the worst are deleted first; the best of the experiment stays whatever
    its size. So while trials are live, the protected checkpoints may exceed the limits.

    Each step costs logarithmic time in the number of retained checkpoints. Without limits this
    class stores nothing.
    """

    def __init__(self, rule: RetentionPolicy) -> None:
        self._rule = rule
        self._entries: dict[str, LimitedCheckpoint] = {}
        #: Released checkpoints, worst first; may contain stale entries, which are skipped.
        self._worst: list[tuple[_Rank, str]] = []
        self._best: tuple[_Rank, str] | None = None
        self._bytes = 0
        self._may_go = 0
        self._is_active = rule.in_experiment is not None or rule.max_bytes is not None

    def __contains__(self, key: str) -> bool:
        return key in self._entries

    def trial_of(self, key: str) -> str:
        """Return the trial that wrote a checkpoint."""
        return self._entries[key].checkpoint.trial

    def add(self, kept: TrialCheckpoint | None) -> None:
        """Add a committed checkpoint; it is protected until `let_go`."""
        checkpoint = kept.committed if kept is not None else None
        if not self._is_active or kept is None or checkpoint is None:
            return
        rank = (kept.score, kept.order)
        self._entries[kept.key] = LimitedCheckpoint(rank, checkpoint)
        self._bytes += checkpoint.size
        self._best = max(self._best or (rank, kept.key), (rank, kept.key))

    def hold_back(self, key: str) -> None:
        """Protect a checkpoint from deletion."""
        entry = self._entries[key]
        self._may_go -= entry.may_go
        entry.may_go = False

    def let_go(self, key: str) -> None:
        """Release a checkpoint for deletion."""
        entry = self._entries[key]
        if not entry.may_go:
            entry.may_go = True
            self._may_go += 1
            heapq.heappush(self._worst, (entry.rank, key))
            if len(self._worst) > 2 * self._may_go + 64:
                self._worst = [(self._entries[one].rank, one) for one in self._free()]
                heapq.heapify(self._worst)

    def remove(self, key: str) -> None:
        """Remove a checkpoint that is not retained any longer, for whatever reason."""
        entry = self._entries.pop(key, None)
        if entry is None:
            return
        self._may_go -= entry.may_go
        self._bytes -= entry.checkpoint.size
        if self._best is not None and self._best[1] == key:
            # Rare: only a damaged checkpoint removes the best one.
            ranks = ((one.rank, other) for other, one in self._entries.items())
            self._best = max(ranks, default=None)

    def drop_surplus(self) -> Iterator[CheckpointCommitted]:
        """Remove the worst released checkpoints that exceed the limits, and yield them."""
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

    def dumped(self) -> dict[str, LimitedCheckpoint]:
        """Return the entries, for `take_back`."""
        return self._entries

    def take_back(self, entries: dict[str, LimitedCheckpoint]) -> None:
        """Restore the state from entries that `dumped` returned."""
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
