"""Which checkpoints of a trial are kept: the newest, and the best by score."""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator
from typing import Final

import msgspec

from tunemq_scheduler.core.metric_values import value_of
from tunemq_shared.protocol.messages import (
    CheckpointCommitted,
    CheckpointRef,
    CheckpointWritten,
    ResultReported,
)

#: A trial goes on from one of so many at most: who finds eight damaged ones has a damaged disk.
MOST_CANDIDATES: Final = 8


class RetentionPolicy(msgspec.Struct, frozen=True, kw_only=True):
    """How many checkpoints to keep, and which are the best.

    Attributes:
        num_to_keep: of each trial; None keeps all.
        score_attribute: a key of the result; None ranks by age, newest best.
        higher_is_better: the direction of the score.
        in_experiment: of all trials together; None keeps all.
        max_bytes: of all trials together, each checkpoint counted as if it shared nothing.
    """

    num_to_keep: int | None = None
    score_attribute: str | None = None
    higher_is_better: bool = True
    in_experiment: int | None = None
    max_bytes: int | None = None


class TrialCheckpoint(msgspec.Struct, array_like=True):
    """A checkpoint of a trial.

    Attributes:
        order: grows in the experiment with each that is written; not that of steps.
        score: by `RetentionPolicy`; the higher the better.
        written: the hash of its manifest on the disk of ``node``, an instance; both are empty
            where its host wrote it into the store itself.
        committed: None while it is not in the store.
        is_wanted: whether anybody can go on from it; one that is not wanted is only waited for.
        is_damaged: a host found it damaged, and the trial had no other.
    """

    order: int
    score: float
    key: str
    attempt: int
    step: int
    written: str
    node: str
    committed: CheckpointCommitted | None
    is_wanted: bool = True
    is_damaged: bool = False


class CheckpointManager:
    """The checkpoints of one trial in the order of their arrival, which need not be that of steps.

    What is written and not committed is never dropped. Of the committed ones the newest is always
    kept, whatever its score, because a retry goes on from it: so up to ``num_to_keep + 1`` exist. A
    checkpoint whose result lacks the score, or has NaN there, ranks last.
    """

    __slots__ = ("_kept", "rule", "uploading")

    def __init__(self, rule: RetentionPolicy) -> None:
        self.rule = rule
        self._kept: dict[str, TrialCheckpoint] = {}
        #: How many are not committed yet.
        self.uploading = 0

    def __contains__(self, key: str) -> bool:
        return key in self._kept

    def __iter__(self) -> Iterator[TrialCheckpoint]:
        """All, oldest first."""
        return iter(self._kept.values())

    def get(self, key: str) -> TrialCheckpoint | None:
        """One of them."""
        return self._kept.get(key)

    def add_written(
        self,
        checkpoint: CheckpointWritten,
        result: ResultReported | None,
        *,
        order: int,
        node: str,
        is_wanted: bool = True,
    ) -> None:
        """One is on a node's disk; ``result`` is the one it contains, if that is known."""
        self._kept[checkpoint.key] = TrialCheckpoint(
            order=order,
            score=self._score(result, order),
            key=checkpoint.key,
            attempt=checkpoint.attempt,
            step=checkpoint.step,
            written=checkpoint.sha256,
            node=node,
            committed=None,
            is_wanted=is_wanted,
        )
        self.uploading += 1

    def add_committed(
        self, checkpoint: CheckpointCommitted, result: ResultReported | None, *, order: int
    ) -> None:
        """One is in the store, where its host wrote it."""
        self._kept[checkpoint.key] = TrialCheckpoint(
            order=order,
            score=self._score(result, order),
            key=checkpoint.key,
            attempt=checkpoint.attempt,
            step=checkpoint.step,
            written="",
            node="",
            committed=checkpoint,
        )

    def commit(self, checkpoint: CheckpointCommitted) -> None:
        """One that was written is in the store as well; its place and score stay the same."""
        self._kept[checkpoint.key].committed = checkpoint
        self.uploading -= 1

    def remove(self, key: str) -> TrialCheckpoint | None:
        """Keep it no longer; returns it if it was kept."""
        kept = self._kept.pop(key, None)
        if kept is not None and kept.committed is None:
            self.uploading -= 1
        return kept

    def drop_surplus(self) -> list[CheckpointCommitted]:
        """Keep no longer what the rule leaves no place for; returns those."""
        limit = self.rule.num_to_keep
        if limit is None or len(self._kept) - self.uploading <= limit:
            return []
        committed = [kept for kept in self._kept.values() if kept.committed is not None]
        ranked = sorted(committed, key=lambda kept: (kept.score, kept.order))
        worse = [kept for kept in ranked[:-limit] if kept is not committed[-1]]
        for condemned in worse:
            del self._kept[condemned.key]
        return [kept.committed for kept in worse if kept.committed is not None]

    def refs(self, node: str) -> tuple[CheckpointRef, ...]:
        """What a host on this node may go on from, newest first."""
        refs: list[CheckpointRef] = []
        for kept in reversed(self._kept.values()):
            sha256 = "" if kept.committed is None else kept.committed.sha256
            if kept.is_wanted and (sha256 or kept.node == node):
                refs.append(CheckpointRef(kept.key, sha256, kept.step, kept.written))
            if len(refs) == MOST_CANDIDATES:
                break
        return tuple(refs)

    @property
    def node(self) -> str:
        """The attempt that has the newest one on its disk; empty where none is known to."""
        newest = next((kept for kept in reversed(self._kept.values()) if kept.is_wanted), None)
        return "" if newest is None else newest.node

    @property
    def newest(self) -> TrialCheckpoint | None:
        """The newest committed one."""
        kept = reversed(self._kept.values())
        return next((one for one in kept if one.committed is not None), None)

    def kept(self) -> Iterator[CheckpointCommitted]:
        """All that are committed, oldest first."""
        return (kept.committed for kept in self._kept.values() if kept.committed is not None)

    def ranks(self) -> Iterator[tuple[float, int]]:
        """Score and order of each that is committed, oldest first."""
        return ((one.score, one.order) for one in self._kept.values() if one.committed is not None)

    def take_back(self, kept: Iterable[TrialCheckpoint]) -> None:
        """Have these again, as they were when somebody wrote them down; oldest first."""
        for one in kept:
            self._kept[one.key] = one
            self.uploading += one.committed is None

    def _score(self, result: ResultReported | None, order: int) -> float:
        attribute = self.rule.score_attribute
        if attribute is None:
            return float(order)
        value = None if result is None else value_of(result, attribute)
        if not isinstance(value, int | float) or math.isnan(value):
            return -math.inf
        return float(value) if self.rule.higher_is_better else -float(value)
