"""Which checkpoints of a trial are kept: the newest, and the best by score."""

from __future__ import annotations

import math
from collections.abc import Iterator

import msgspec

from tunemq_scheduler.core.values import value_of
from tunemq_shared.messages import CheckpointCommitted, CheckpointRef, ResultReported


class KeepRule(msgspec.Struct, frozen=True, kw_only=True):
    """How many checkpoints to keep, and which are the best.

    Attributes:
        num_to_keep: None keeps all.
        score_attribute: a key of the result; None ranks by age, newest best.
        higher_is_better: the direction of the score.
    """

    num_to_keep: int | None = None
    score_attribute: str | None = None
    higher_is_better: bool = True


class _Kept(msgspec.Struct, array_like=True):
    order: int
    score: float
    checkpoint: CheckpointCommitted


class KeptCheckpoints:
    """The checkpoints of one trial in the order of their arrival, which need not be that of steps.

    The newest is always kept, whatever its score, because a retry goes on from it: so up to
    ``num_to_keep + 1`` exist. A checkpoint whose result lacks the score, or has NaN there, ranks
    last.
    """

    __slots__ = ("_kept", "_next", "_rule")

    def __init__(self, rule: KeepRule) -> None:
        self._rule = rule
        self._kept: dict[str, _Kept] = {}
        self._next = 0

    def add(
        self, checkpoint: CheckpointCommitted, result: ResultReported | None
    ) -> list[CheckpointCommitted]:
        """Keep a new checkpoint; returns those that are kept no longer."""
        if checkpoint.key in self._kept:
            return []
        newest = _Kept(self._next, self._score(result, self._next), checkpoint)
        self._kept[checkpoint.key] = newest
        self._next += 1
        limit = self._rule.num_to_keep
        if limit is None or len(self._kept) <= limit:
            return []
        ranked = sorted(self._kept.values(), key=lambda kept: (kept.score, kept.order))
        worse = [kept.checkpoint for kept in ranked[:-limit] if kept is not newest]
        for condemned in worse:
            del self._kept[condemned.key]
        return worse

    def newest(self) -> CheckpointRef | None:
        """What a retry goes on from."""
        if not self._kept:
            return None
        last = next(reversed(self._kept.values())).checkpoint
        return CheckpointRef(key=last.key, sha256=last.sha256, step=last.step)

    def kept(self) -> Iterator[CheckpointCommitted]:
        """All that are kept, oldest first."""
        return (kept.checkpoint for kept in self._kept.values())

    def _score(self, result: ResultReported | None, order: int) -> float:
        attribute = self._rule.score_attribute
        if attribute is None:
            return float(order)
        value = None if result is None else value_of(result, attribute)
        if not isinstance(value, int | float) or math.isnan(value):
            return -math.inf
        return float(value) if self._rule.higher_is_better else -float(value)
