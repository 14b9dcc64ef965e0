"""`CheckpointBook`: all checkpoints of an experiment, from written to committed to removed.

What a trial has is in its `CheckpointManager`; here is what concerns more than one trial, or the
store: the order of all, references and pins, uploads under way, and the experiment's limits.

**Pins.** An epoch may refer to objects of the checkpoint that it was restored from, and later of
its own last committed one. So the candidates that it was started with stay, manifest and objects,
until its first commit; then that one stays, until the next. When its host is gone and what it wrote
is settled, none of them has to. What every new trial begins from is pinned for ever.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import Any

import msgspec

from tunemq_scheduler.core.checkpoints.object_references import (
    ObjectReferences,
    ObjectReferencesState,
)
from tunemq_scheduler.core.commands import Command, NotifyCheckpoint
from tunemq_scheduler.core.experiment_limits import ExperimentLimits, LimitedCheckpoint
from tunemq_scheduler.core.runner_settings import RunnerSettings
from tunemq_scheduler.core.trials.kept_checkpoints import MOST_CANDIDATES, TrialCheckpoint
from tunemq_scheduler.core.trials.trial import Trial
from tunemq_shared.protocol.messages import (
    CheckpointCommitted,
    CheckpointRef,
    CheckpointWritten,
    ResultReported,
)


class _AttemptUploads(msgspec.Struct, array_like=True):
    """An epoch that writes checkpoints, or has some that are not settled.

    Attributes:
        bases: the pinned checkpoints whose objects it may refer to.
        unsettled: how many it wrote that are neither committed nor lost.
        is_over: whether its host is gone.
    """

    bases: tuple[str, ...]
    unsettled: int = 0
    is_over: bool = False


class CheckpointBookState(msgspec.Struct, array_like=True):
    """A `CheckpointBook` written down, but for what the trials hold."""

    orders: int
    writers: list[tuple[tuple[str, int], _AttemptUploads]]
    uploads: dict[str, dict[str, str]]
    references: ObjectReferencesState
    limits: dict[str, LimitedCheckpoint]


class CheckpointBook:
    """Keeps the books; told by the runner, which is told by events.

    Args:
        settings: what to keep, and what every trial begins from.
        live: the trials that are not over, or whose uploads are not settled.
        forget: takes a trial that is over, and the key of a checkpoint that it has no longer.
    """

    def __init__(
        self,
        settings: RunnerSettings,
        live: Mapping[str, Trial],
        forget: Callable[[str, str], None],
    ) -> None:
        self._settings = settings
        self._live = live
        self._forget = forget
        self._references = ObjectReferences()
        self._references.pin(ref.key for ref in settings.restore)
        self._limits = ExperimentLimits(settings.keep)
        self._orders = 0
        self._writers: dict[tuple[str, int], _AttemptUploads] = {}
        #: Node -> key -> trial, of what is written there and not settled.
        self._uploads: dict[str, dict[str, str]] = {}

    @property
    def uploading(self) -> int:
        """How many checkpoints are written and neither committed nor lost."""
        return sum(len(keys) for keys in self._uploads.values())

    def uploads_of(self, node: str) -> list[str]:
        """The keys of what is written on this node and neither committed nor lost."""
        return list(self._uploads.get(node, ()))

    # --- epochs -----------------------------------------------------------------------------------

    def begin(self, trial: Trial, node: str) -> tuple[CheckpointRef, ...]:
        """An epoch starts on this node; returns what it may go on from, the best first."""
        own = trial.checkpoints.refs(node)
        restore = (*own, *self._settings.restore)[:MOST_CANDIDATES]
        bases = tuple(ref.key for ref in restore)
        self._writers[trial.trial_id, trial.attempt] = _AttemptUploads(bases)
        self._references.pin(bases)
        self._reconsider(bases)
        return restore

    def candidates(self, trial: Trial, node: str) -> tuple[CheckpointRef, ...]:
        """What the newest epoch, which this node has, may go on from if it has not begun yet."""
        writer = self._writers.get((trial.trial_id, trial.attempt))
        bases = writer.bases if writer is not None else ()
        return tuple(
            ref
            for ref in (*trial.checkpoints.refs(node), *self._settings.restore)
            if ref.key in bases
        )

    def end(self, trial: str, attempt: int) -> list[Command]:
        """An epoch's host is gone, or counts no longer: it writes no more."""
        writer = self._writers.get((trial, attempt))
        if writer is None:
            return []
        writer.is_over = True
        return [*self._forget_writer(trial, attempt), *self._drop_surplus()]

    # --- checkpoints ------------------------------------------------------------------------------

    def written(
        self, trial: Trial, node: str, event: CheckpointWritten, *, is_wanted: bool
    ) -> None:
        """A checkpoint is on this node's disk, and on its way to the store.

        Args:
            is_wanted: False for one that nobody may go on from, because its result was dropped.
        """
        writer = self._writers.get((event.trial, event.attempt))
        if writer is None:  # of an attempt that counts no longer
            return
        result = _contained(trial, event)
        kept, order = trial.checkpoints, self._next_order()
        kept.add_written(event, result, order=order, node=node, is_wanted=is_wanted)
        self._uploads.setdefault(node, {})[event.key] = trial.trial_id
        writer.unsettled += 1

    def committed(self, trial: Trial, event: CheckpointCommitted) -> list[Command]:
        """A checkpoint of a live trial is in the store; it is known, or reviewed and found good."""
        kept = trial.checkpoints
        known = kept.get(event.key)
        if known is not None and known.committed is not None:
            return []
        writer = self._writers.get((event.trial, event.attempt))
        bases = writer.bases if writer is not None else ()
        if not self._references.may_refer(event.shared, bases):
            # No writer that keeps to its bases makes one; half a checkpoint is worse than none.
            commands = self._references.condemn(event.trial, event.key)
            return [*commands, *self._settle(kept.remove(event.key), event.trial)]
        # What it refers to is counted before anything that held it so far lets go.
        self._references.add(event.shared)
        commands = self._rebase(writer, event.key) if writer is not None else []
        if known is not None and not known.is_wanted:
            commands += self._references.condemn(event.trial, event.key, event)
            commands += self._settle(kept.remove(event.key), event.trial)
            return [*commands, *self._drop_surplus()]
        before = kept.newest
        if known is None:
            kept.add_committed(event, _contained(trial, event), order=self._next_order())
        else:
            kept.commit(event)
        self._limits.add(kept.get(event.key))
        for dropped in kept.drop_surplus():
            commands += self._condemn(dropped)
        commands += self._settle(known, event.trial)
        self._reconsider([event.key, *([before.key] if before is not None else [])])
        return [NotifyCheckpoint(event.trial, event), *commands, *self._drop_surplus()]

    def lost(self, trial: Trial, key: str) -> list[Command]:
        """An upload was given up; of what the store has of it nothing stays."""
        known = trial.checkpoints.get(key)
        if known is not None and known.committed is not None:
            return []
        commands = self._references.condemn(trial.trial_id, key)
        commands += self._settle(trial.checkpoints.remove(key), trial.trial_id)
        return [*commands, *self._drop_surplus()]

    def discard(self, trial: Trial, key: str) -> list[Command]:
        """Nobody may go on from it; one that is still being uploaded is waited for."""
        known = trial.checkpoints.get(key)
        if known is None:
            return []
        if known.committed is None:
            known.is_wanted = False
            return []
        trial.checkpoints.remove(key)
        commands = self._condemn(known.committed)
        newest = trial.checkpoints.newest
        if newest is not None:
            self._reconsider([newest.key])
        return commands

    def damaged(self, trial: Trial, key: str) -> list[Command]:
        """A host found it damaged; the trial no longer goes on from it.

        The last one stays, for a trial without any begins from nothing, which would silently lose
        what it had learnt: each further try fails on it.
        """
        has_other = any(one.committed and one.key != key for one in trial.checkpoints)
        if has_other or self._settings.restore:
            return self.discard(trial, key)
        if (last := trial.checkpoints.get(key)) is not None:
            last.is_damaged = True
        return []

    def clear(self, trial: Trial) -> list[Command]:
        """A trial has no checkpoint any more; it goes on from where it began."""
        commands: list[Command] = []
        for key in [kept.key for kept in trial.checkpoints]:
            commands += self.discard(trial, key)
        return commands

    def give_up(self, node: str, trial: str | None = None) -> list[Command]:
        """Wait no longer for what only this node has, of this trial or of all."""
        commands: list[Command] = []
        for key, owner in list(self._uploads.get(node, {}).items()):
            if trial is None or owner == trial:
                commands += self._references.condemn(owner, key)
                commands += self._settle(self._live[owner].checkpoints.remove(key), owner)
        return [*commands, *self._drop_surplus()]

    def owners(self, node: str) -> list[str]:
        """The trials that have something on this node which is neither committed nor lost."""
        return list(dict.fromkeys(self._uploads.get(node, {}).values()))

    def trial_over(self, trial: Trial) -> list[Command]:
        """A trial is over and its uploads are settled: nothing of it is held back any longer."""
        newest = trial.checkpoints.newest
        if newest is not None:
            self._reconsider([newest.key])
        return self._drop_surplus()

    def revived(self, trial: Trial) -> None:
        """A trial that was over is not: its newest checkpoint is held back again."""
        newest = trial.checkpoints.newest
        if newest is not None:
            self._reconsider([newest.key])

    # --- what stands ------------------------------------------------------------------------------

    def pinned(self) -> Iterator[tuple[str, str]]:
        """Key and manifest's hash of what no trial keeps, and is there nevertheless."""
        for ref in self._settings.restore:
            yield ref.key, ref.sha256
        for committed in self._references.condemned():
            yield committed.key, committed.sha256

    def is_writing(self, folder: str) -> bool:
        """Whether the trial with this folder has a host, or an upload."""
        return any(
            folder == trial or folder.endswith(f"_{trial}") for trial, _attempt in self._writers
        )

    def state(self) -> tuple[Any, ...]:
        """All of it but what the trials hold; equal states give equal values."""
        return (
            self._orders,
            sorted(self._writers.items()),
            sorted((node, sorted(keys)) for node, keys in self._uploads.items()),
            self._references.state(),
            self._limits.state(),
        )

    def dumped(self) -> CheckpointBookState:
        """All of it but what the trials hold."""
        return CheckpointBookState(
            self._orders,
            list(self._writers.items()),
            self._uploads,
            self._references.dumped(),
            self._limits.dumped(),
        )

    def take_back(self, state: CheckpointBookState) -> None:
        """Be as it was when it was `dumped`."""
        self._orders, self._uploads = state.orders, state.uploads
        self._writers = dict(state.writers)
        self._references.take_back(state.references)
        self._limits.take_back(state.limits)

    # --- small things -----------------------------------------------------------------------------

    def _next_order(self) -> int:
        self._orders += 1
        return self._orders

    def _settle(self, upload: TrialCheckpoint | None, trial: str) -> list[Command]:
        """An upload is over, this way or that; None where there was none."""
        if upload is None or not upload.node:
            return []
        uploads = self._uploads[upload.node]
        del uploads[upload.key]
        if not uploads:
            del self._uploads[upload.node]
        self._writers[trial, upload.attempt].unsettled -= 1
        return self._forget_writer(trial, upload.attempt)

    def _forget_writer(self, trial: str, attempt: int) -> list[Command]:
        writer = self._writers[trial, attempt]
        if writer.unsettled or not writer.is_over:
            return []
        del self._writers[trial, attempt]
        return self._unpin(writer.bases)

    def _rebase(self, writer: _AttemptUploads, key: str) -> list[Command]:
        before, writer.bases = writer.bases, (key,)
        self._references.pin(writer.bases)
        return self._unpin(before)

    def _unpin(self, keys: Iterable[str]) -> list[Command]:
        keys = tuple(keys)
        commands = self._references.unpin(keys)
        self._reconsider(keys)
        return commands

    def _condemn(self, checkpoint: CheckpointCommitted) -> list[Command]:
        self._limits.remove(checkpoint.key)
        return self._references.condemn(checkpoint.trial, checkpoint.key, checkpoint)

    def _reconsider(self, keys: Iterable[str]) -> None:
        """Whether these may go for the sake of others; asked whenever that may have changed."""
        for key in keys:
            if key in self._limits:
                trial = self._live.get(self._limits.trial_of(key))
                newest = trial.checkpoints.newest if trial is not None else None
                is_newest = newest is not None and newest.key == key
                if is_newest or self._references.is_pinned(key):
                    self._limits.hold_back(key)
                else:
                    self._limits.let_go(key)

    def _drop_surplus(self) -> list[Command]:
        commands: list[Command] = []
        for dropped in self._limits.drop_surplus():
            trial = self._live.get(dropped.trial)
            if trial is not None:
                trial.checkpoints.remove(dropped.key)
            else:
                self._forget(dropped.trial, dropped.key)
            commands += self._references.condemn(dropped.trial, dropped.key, dropped)
        return commands


def _contained(
    trial: Trial, event: CheckpointWritten | CheckpointCommitted
) -> ResultReported | None:
    """The result that it contains; that of a repeated step is not here any more."""
    return trial.last_result if event.step == trial.last_step else None
