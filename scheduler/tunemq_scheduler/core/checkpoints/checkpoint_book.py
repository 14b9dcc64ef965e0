"""`CheckpointBook`: all checkpoints of an experiment, from written to committed to removed.

Each trial's `CheckpointManager` holds that trial's checkpoints. This class handles matters of
several trials or of the store: the global order, references and pins, uploads in progress, and the
experiment's limits.

**Pins.** An attempt may refer to objects of the checkpoint that it was restored from, and later of
its last committed one. So the candidates for its restore stay, manifest and objects, until its
first commit; then that commit stays until the next. All pins end when its process is gone and its
uploads are settled. A state of another trial from which a trial continues stays until that trial
has committed one. The checkpoints from which every new trial begins are pinned forever.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping

import msgspec
from msgspec.structs import replace

from tunemq_scheduler.core.checkpoint_limits import ExperimentLimits, LimitedCheckpoint
from tunemq_scheduler.core.checkpoints.object_references import ObjectReferences
from tunemq_scheduler.core.commands import Command, NotifyCheckpoint
from tunemq_scheduler.core.runner_settings import RunnerSettings
from tunemq_scheduler.core.trials.kept_checkpoints import MOST_CANDIDATES, TrialCheckpoint
from tunemq_scheduler.core.trials.trial import Trial
from tunemq_shared.protocol import messages as m


class _AttemptUploads(msgspec.Struct, array_like=True):
    """An attempt that writes checkpoints, or whose uploads are not settled.

    Attributes:
        bases: the pinned checkpoints whose objects it may refer to.
        unsettled: how many of its checkpoints are neither committed nor lost.
        is_over: whether its process is gone.
    """

    bases: tuple[str, ...]
    unsettled: int = 0
    is_over: bool = False


class CheckpointBookState(msgspec.Struct, array_like=True):
    """A `CheckpointBook` in serialized form, without the trials' own checkpoints."""

    orders: int
    writers: list[tuple[tuple[str, int], _AttemptUploads]]
    uploads: dict[str, dict[str, str]]
    references: ObjectReferences
    limits: dict[str, LimitedCheckpoint]


class CheckpointBook:
    """Tracks all checkpoints; the runner calls it while it handles events.

    Args:
        settings: the retention policy, and the checkpoints from which every trial begins.
        live: the trials that have not ended, or whose uploads are not settled.
        forget: called with an ended trial and the key of a checkpoint that was removed.
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
        #: Node -> key -> trial, for checkpoints written there and not settled.
        self._uploads: dict[str, dict[str, str]] = {}

    @property
    def uploading(self) -> int:
        """The number of checkpoints that are written and neither committed nor lost."""
        return sum(len(keys) for keys in self._uploads.values())

    def uploads_of(self, node: str) -> list[str]:
        """Return the keys of this node's checkpoints that are neither committed nor lost."""
        return list(self._uploads.get(node, ()))

    # --- attempts ---------------------------------------------------------------------------------

    def begin(self, trial: Trial, node: str) -> tuple[m.CheckpointRef, ...]:
        """Begin an attempt on this node; return its restore candidates, best first."""
        restore = self._restorable(trial, node)[:MOST_CANDIDATES]
        bases = tuple(ref.key for ref in restore)
        self._writers[trial.trial_id, trial.attempt] = _AttemptUploads(bases)
        self._references.pin(bases)
        self._reconsider(bases)
        return restore

    def candidates(self, trial: Trial, node: str) -> tuple[m.CheckpointRef, ...]:
        """Return the restore candidates of the newest attempt, if it has not begun yet."""
        writer = self._writers.get((trial.trial_id, trial.attempt))
        bases = writer.bases if writer is not None else ()
        return tuple(ref for ref in self._restorable(trial, node) if ref.key in bases)

    def _restorable(self, trial: Trial, node: str) -> tuple[m.CheckpointRef, ...]:
        """Return the checkpoints from which a trial's lineage may resume on a node, best first."""
        own, inherited = trial.checkpoints.refs(node, trial.first_attempt), trial.inherited
        if inherited is None or not inherited.step:
            return (*own, *self._settings.restore)
        return own if inherited.checkpoint is None else (*own, inherited.checkpoint)

    def has_writer(self, trial: str, attempt: int) -> bool:
        """Whether an attempt may still write checkpoints, or uploads some that count."""
        return (trial, attempt) in self._writers

    def end(self, trial: str, attempt: int) -> list[Command]:
        """End an attempt whose process is gone or does not count any more."""
        writer = self._writers.get((trial, attempt))
        if writer is None:
            return []
        writer.is_over = True
        return [*self._forget_writer(trial, attempt), *self._drop_surplus()]

    # --- states of other trials -------------------------------------------------------------------

    def hold(self, key: str) -> None:
        """Keep a checkpoint for a trial that inherits its state, until `release`."""
        self._references.pin([key])
        self._reconsider([key])

    def release(self, trial: Trial) -> list[Command]:
        """Stop keeping the checkpoint that a trial inherited."""
        inherited = trial.inherited
        if inherited is None or inherited.checkpoint is None:
            return []
        trial.inherited = replace(inherited, checkpoint=None)
        return [*self._unpin([inherited.checkpoint.key]), *self._drop_surplus()]

    # --- checkpoints ------------------------------------------------------------------------------

    def written(
        self, trial: Trial, node: str, event: m.CheckpointWritten, *, is_wanted: bool
    ) -> None:
        """Add a checkpoint that is on this node's disk and being uploaded.

        Args:
            trial: its trial.
            node: the instance that has it.
            event: the node's report.
            is_wanted: False if no attempt may resume from it, because its result was dropped.
        """
        writer = self._writers.get((event.trial, event.attempt))
        if writer is None:  # from an attempt that no longer counts
            return
        result = _contained(trial, event)
        kept, order = trial.checkpoints, self._next_order()
        kept.add(event, result, order=order, node=node, is_wanted=is_wanted)
        self._uploads.setdefault(node, {})[event.key] = trial.trial_id
        writer.unsettled += 1

    def committed(self, trial: Trial, event: m.CheckpointCommitted) -> list[Command]:
        """Commit a checkpoint of a live trial; it is known, or was reviewed and accepted."""
        kept = trial.checkpoints
        known = kept.get(event.key)
        if known is not None and known.committed is not None:
            return []
        writer = self._writers.get((event.trial, event.attempt))
        bases = writer.bases if writer is not None else ()
        if not self._references.may_refer(event.shared, bases):
            # A correct writer never refers outside its bases; an incomplete checkpoint is worse
            # than none.
            commands = self._references.condemn(event.trial, event.key)
            return [*commands, *self._settle(kept.remove(event.key), event.trial)]
        # Count its references before releasing anything that protected those objects so far.
        self._references.add(event.shared)
        commands = self._rebase(writer, event.key) if writer is not None else []
        if known is not None and not known.is_wanted:
            commands += self._references.condemn(event.trial, event.key, event)
            commands += self._settle(kept.remove(event.key), event.trial)
            return [*commands, *self._drop_surplus()]
        before = kept.newest
        if known is None:
            kept.add(event, _contained(trial, event), order=self._next_order())
        else:
            kept.commit(event)
        if event.attempt >= trial.first_attempt:
            commands += self.release(trial)
        self._limits.add(kept.get(event.key))
        for dropped in kept.drop_surplus():
            commands += self._condemn(dropped)
        commands += self._settle(known, event.trial)
        self._reconsider([event.key, *([before.key] if before is not None else [])])
        return [NotifyCheckpoint(event.trial, event), *commands, *self._drop_surplus()]

    def lost(self, trial: Trial, key: str) -> list[Command]:
        """Handle an abandoned upload; its parts are deleted from the store."""
        known = trial.checkpoints.get(key)
        if known is not None and known.committed is not None:
            return []
        commands = self._references.condemn(trial.trial_id, key)
        commands += self._settle(trial.checkpoints.remove(key), trial.trial_id)
        return [*commands, *self._drop_surplus()]

    def discard(self, trial: Trial, key: str) -> list[Command]:
        """Exclude a checkpoint from restores; one that is still uploading is removed afterwards."""
        known = trial.checkpoints.get(key)
        if known is None:
            return []
        if known.committed is None:
            known.is_wanted = False
            return []
        trial.checkpoints.remove(key)
        commands = self._condemn(known.committed)
        self.review_newest(trial)
        return commands

    def damaged(self, trial: Trial, key: str) -> list[Command]:
        """Handle a checkpoint that a trial process found damaged; the trial stops using it.

        The last one stays: a trial without any begins from scratch, which would silently lose its
        progress. Each further retry then fails on it.
        """
        others = trial.checkpoints.since(trial.first_attempt)
        has_other = any(one.committed and one.key != key for one in others)
        if has_other or trial.inherited_key or self._settings.restore:
            return self.discard(trial, key)
        if (last := trial.checkpoints.get(key)) is not None:
            last.is_damaged = True
        return []

    def clear(self, trial: Trial) -> list[Command]:
        """Discard all checkpoints of a trial; it resumes from where it first began."""
        commands: list[Command] = []
        for key in [kept.key for kept in trial.checkpoints]:
            commands += self.discard(trial, key)
        return commands

    def give_up(self, node: str, trial: str | None = None) -> list[Command]:
        """Stop waiting for checkpoints that only this node has, of this trial or of all."""
        commands: list[Command] = []
        for key, owner in list(self._uploads.get(node, {}).items()):
            if trial is None or owner == trial:
                commands += self._references.condemn(owner, key)
                commands += self._settle(self._live[owner].checkpoints.remove(key), owner)
        return [*commands, *self._drop_surplus()]

    def owners(self, node: str) -> list[str]:
        """Return the trials with checkpoints on this node that are neither committed nor lost."""
        return list(dict.fromkeys(self._uploads.get(node, {}).values()))

    def trial_over(self, trial: Trial) -> list[Command]:
        """Release the newest checkpoint of a trial that has ended with all uploads settled."""
        self.review_newest(trial)
        return self._drop_surplus()

    def review_newest(self, trial: Trial) -> None:
        """Protect the newest checkpoint of a live trial, and release that of an ended one."""
        newest = trial.checkpoints.newest
        if newest is not None:
            self._reconsider([newest.key])

    # --- state ------------------------------------------------------------------------------------

    def pinned(self) -> Iterator[tuple[str, str]]:
        """Yield the key and manifest hash of pinned checkpoints that no trial retains."""
        for ref in self._settings.restore:
            yield ref.key, ref.sha256
        for committed in self.condemned():
            yield committed.key, committed.sha256

    def condemned(self) -> list[m.CheckpointCommitted]:
        """Return the checkpoints that no trial retains, and that another needs."""
        return self._references.condemned()

    def is_writing(self, folder: str) -> bool:
        """Whether the trial with this folder has a process or an upload."""
        return any(
            folder == trial or folder.endswith(f"_{trial}") for trial, _attempt in self._writers
        )

    def dumped(self) -> CheckpointBookState:
        """Return the state without the trials' own checkpoints, for `take_back`."""
        return CheckpointBookState(
            self._orders,
            list(self._writers.items()),
            self._uploads,
            self._references,
            self._limits.dumped(),
        )

    def take_back(self, state: CheckpointBookState) -> None:
        """Restore the state that `dumped` returned."""
        self._orders, self._uploads = state.orders, state.uploads
        self._writers = dict(state.writers)
        self._references = state.references
        self._limits.take_back(state.limits)

    # --- small things -----------------------------------------------------------------------------

    def _next_order(self) -> int:
        self._orders += 1
        return self._orders

    def _settle(self, upload: TrialCheckpoint | None, trial: str) -> list[Command]:
        """Finish an upload, whatever its outcome; None means there was none."""
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

    def _condemn(self, checkpoint: m.CheckpointCommitted) -> list[Command]:
        self._limits.remove(checkpoint.key)
        return self._references.condemn(checkpoint.trial, checkpoint.key, checkpoint)

    def _reconsider(self, keys: Iterable[str]) -> None:
        """Update whether these checkpoints may be deleted to meet the experiment's limits."""
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
    trial: Trial, event: m.CheckpointWritten | m.CheckpointCommitted
) -> m.ResultReported | None:
    """Return the result that a checkpoint contains; None unless it is the newest one."""
    is_left = event.attempt < trial.first_attempt
    for result in (trial.repeated_result, trial.last_result):
        if result is None or (result.attempt < trial.first_attempt) != is_left:
            continue
        if result.step == event.step:
            return result
    return None
