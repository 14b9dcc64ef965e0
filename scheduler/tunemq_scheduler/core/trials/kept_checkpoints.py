"""Selects which checkpoints of a trial to retain: the newest, and the best by score."""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator
from typing import Final

import msgspec

from tunemq_scheduler.core.result_lookup import value_of
from tunemq_shared.protocol import messages as m

#: The most checkpoints a trial tries to resume from: eight damaged ones mean a damaged disk.
MOST_CANDIDATES: Final = 8


class RetentionPolicy(msgspec.Struct, frozen=True, kw_only=True):
    """How many checkpoints to retain, and which are the best.

    Attributes:
        num_to_keep: the limit per trial; None keeps all.
        score_attribute: a key of the result; None ranks by age, newest best.
        higher_is_better: the direction of the score.
        in_experiment: the limit for all trials together; None keeps all.
        max_bytes: the limit in bytes for all trials together; each checkpoint counts as if it
            shared no objects.
    """

    num_to_keep: int | None = None
    score_attribute: str | None = None
    higher_is_better: bool = True
    in_experiment: int | None = None
    max_bytes: int | None = None


class TrialCheckpoint(msgspec.Struct, array_like=True):
    """A checkpoint of a trial.

    Attributes:
        order: grows with each checkpoint written in the experiment; independent of steps.
        score: by `RetentionPolicy`; higher is better.
        written: the hash of its manifest on the disk of ``node``, a node instance; both are empty
            if the trial process wrote it directly to the store.
        committed: None until it is in the store.
        is_wanted: whether a trial can resume from it; for an unwanted one the runner only awaits
            the upload.
        is_damaged: a trial process found it damaged, and the trial had no other.
    """

    order: int
    score: float
    key: str
    attempt: int
    step: int
    written: str
    node: str
    committed: m.CheckpointCommitted | None
    is_wanted: bool = True
    is_damaged: bool = False


class CheckpointManager:
    """The checkpoints of one trial by arrival, which may differ from the order of steps.

    A checkpoint that is written and not committed is never dropped. The newest committed one is
    always retained, whatever its score, because a retry resumes from it: so up to ``num_to_keep +
    1`` exist. A checkpoint whose result lacks the score, or has NaN there, ranks last.
    """

    __slots__ = ("_attempt", "_kept", "rule", "uploading")

    def __init__(self, rule: RetentionPolicy) -> None:
        self.rule = rule
        self._kept: dict[str, TrialCheckpoint] = {}
        #: The newest attempt that wrote one; an older one may still finish an upload.
        self._attempt = 0
        #: The number of checkpoints that are not committed yet.
        self.uploading = 0

    def __contains__(self, key: str) -> bool:
        return key in self._kept

    def __iter__(self) -> Iterator[TrialCheckpoint]:
        """Iterate over all checkpoints, oldest first."""
        return iter(self._kept.values())

    def get(self, key: str) -> TrialCheckpoint | None:
        """Return the checkpoint with this key, or None."""
        return self._kept.get(key)

    def add(
        self,
        checkpoint: m.CheckpointWritten | m.CheckpointCommitted,
        result: m.ResultReported | None,
        *,
        order: int,
        node: str = "",
        is_wanted: bool = True,
    ) -> None:
        """Add a checkpoint on a node's disk, or one that a trial process wrote to the store.

        ``result`` is the one that it contains, if known.
        """
        is_committed = isinstance(checkpoint, m.CheckpointCommitted)
        self._kept[checkpoint.key] = TrialCheckpoint(
            order=order,
            score=self._score(result, order),
            key=checkpoint.key,
            attempt=checkpoint.attempt,
            step=checkpoint.step,
            written="" if is_committed else checkpoint.sha256,
            node=node,
            committed=checkpoint if isinstance(checkpoint, m.CheckpointCommitted) else None,
            is_wanted=is_wanted,
        )
        self.uploading += not is_committed
        self._attempt = max(self._attempt, checkpoint.attempt)

    def commit(self, checkpoint: m.CheckpointCommitted) -> None:
        """Mark a written checkpoint as committed; its order and score stay the same."""
        self._kept[checkpoint.key].committed = checkpoint
        self.uploading -= 1

    def remove(self, key: str) -> TrialCheckpoint | None:
        """Remove a checkpoint; return it if it was retained."""
        kept = self._kept.pop(key, None)
        if kept is not None and kept.committed is None:
            self.uploading -= 1
        return kept

    def drop_surplus(self) -> list[m.CheckpointCommitted]:
        """Remove and return the checkpoints that exceed the rule's limit."""
        limit = self.rule.num_to_keep
        if limit is None or len(self._kept) - self.uploading <= limit:
            return []
        committed = [kept for kept in self._kept.values() if kept.committed is not None]
        ranked = sorted(committed, key=lambda kept: (kept.score, kept.order))
        newest = self.newest
        worse = [kept for kept in ranked[:-limit] if kept is not newest]
        for condemned in worse:
            del self._kept[condemned.key]
        return [kept.committed for kept in worse if kept.committed is not None]

    def since(self, attempt: int) -> Iterator[TrialCheckpoint]:
        """Iterate over the checkpoints of this attempt and later ones, newest first."""
        return (kept for kept in reversed(self._kept.values()) if kept.attempt >= attempt)

    def refs(self, node: str, first_attempt: int = 0) -> tuple[m.CheckpointRef, ...]:
        """Return the checkpoints that a process on this node may resume from, newest first.

        ``first_attempt`` excludes the checkpoints of earlier attempts.
        """
        refs: list[m.CheckpointRef] = []
        for kept in self.since(first_attempt):
            sha256 = "" if kept.committed is None else kept.committed.sha256
            ref = m.CheckpointRef(kept.key, sha256, kept.step, kept.written)
            # A journal of an earlier version may hold hashes that no order can contain.
            is_orderable = "\0" not in ref.key + ref.sha256 + ref.written
            if kept.is_wanted and (sha256 or kept.node == node) and is_orderable:
                refs.append(ref)
            if len(refs) == MOST_CANDIDATES:
                break
        return tuple(refs)

    @property
    def node(self) -> str:
        """The node instance with the newest checkpoint on its disk; empty if none is known."""
        newest = next((kept for kept in reversed(self._kept.values()) if kept.is_wanted), None)
        return "" if newest is None else newest.node

    @property
    def newest(self) -> TrialCheckpoint | None:
        """The newest committed checkpoint of the newest attempt that has one, or None."""
        newest = None
        for one in reversed(self._kept.values()):
            if one.committed is not None and (newest is None or one.attempt > newest.attempt):
                newest = one
                if one.attempt == self._attempt:
                    break
        return newest

    def kept(self) -> Iterator[m.CheckpointCommitted]:
        """Iterate over all committed checkpoints, oldest first."""
        return (kept.committed for kept in self._kept.values() if kept.committed is not None)

    def ranks(self) -> Iterator[tuple[float, int]]:
        """Iterate over the score and order of each committed checkpoint, oldest first."""
        return ((one.score, one.order) for one in self._kept.values() if one.committed is not None)

    def take_back(self, kept: Iterable[TrialCheckpoint]) -> None:
        """Restore dumped checkpoints, oldest first."""
        for one in kept:
            self._kept[one.key] = one
            self._attempt = max(self._attempt, one.attempt)
            self.uploading += one.committed is None

    def _score(self, result: m.ResultReported | None, order: int) -> float:
        attribute = self.rule.score_attribute
        if attribute is None:
            return float(order)
        value = None if result is None else value_of(result, attribute)
        if not isinstance(value, int | float) or not math.isfinite(value):
            return -math.inf  # a trial that diverges has no best checkpoint there
        return float(value) if self.rule.higher_is_better else -float(value)
