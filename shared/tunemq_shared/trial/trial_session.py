"""A trial's conversation with its scheduler, seen from the process that runs it.

`TrialSession.report` is the point between two steps: the result is sent, then the checkpoint that
contains it, then orders are looked for; the trial waits here when it has come as far as it was told
to. A trial that is to end is left by an exception (`tunemq_shared.trial.control_flow`).
"""

from __future__ import annotations

import logging
import os
import threading
import time
from collections.abc import Callable, Mapping
from contextlib import AbstractContextManager, nullcontext
from pathlib import Path
from typing import Any, NamedTuple

import msgspec

from tunemq_shared.base.errors import BugError, CheckpointCorrupt, CheckpointError, TuneError
from tunemq_shared.checkpoints.checkpoint import Checkpoint
from tunemq_shared.checkpoints.checkpoint_folders import (
    AS_FOLDER,
    CheckpointForm,
    is_null,
    make_checkpoint_folder,
    remove,
)
from tunemq_shared.checkpoints.checkpoint_sink import CheckpointSink
from tunemq_shared.checkpoints.manifest import CheckpointInfo
from tunemq_shared.protocol.conditions import first_that_holds, lookup
from tunemq_shared.protocol.messages import (
    CheckpointCommitted,
    CheckpointDamaged,
    CheckpointRef,
    CheckpointWritten,
    NodeEvent,
    ResultReported,
    TrialOrder,
)
from tunemq_shared.trial.control_flow import TrialDoneExit, TrialExit, TrialPauseExit, TrialStopExit
from tunemq_shared.trial.metrics import check_comparable, check_expected, check_metrics
from tunemq_shared.trial.progress import TrialProgress
from tunemq_shared.trial.results import (
    ALWAYS_THERE,
    DERIVED,
    DONE,
    TRAINING_ITERATION,
    measured,
    split_derived,
)
from tunemq_shared.trial.trial_channel import TrialChannel
from tunemq_shared.trial.trial_context import TuneContext

logger = logging.getLogger(__name__)


class SavedCheckpoint(NamedTuple):
    """A checkpoint that was kept: where, the state kept with it, its files if at hand."""

    ref: CheckpointRef | None
    state: dict[str, Any]
    path: Path | None

    def given_back(self) -> str | dict[str, Any]:
        """What the trainable gets to restore from.

        Raises:
            BugError: the files are not at hand.
        """
        if self.path is None:
            raise BugError(f"The files of checkpoint {self.ref} were not asked for.")
        return CheckpointForm.noted(self.state, self.path).given_back(self.path)


class TrialSession:
    """One epoch of one trial, seen from the process that runs it.

    Used in the process that made it. Its trial's code may `report` and ask for checkpoints in any
    thread; the rest is for the thread that runs the trial.

    Args:
        order: What to run and how far; has its ``start``.
        config: The unpacked configuration.
        channel: The line to the node.
        checkpoints: Where checkpoints are kept.
    """

    def __init__(
        self,
        order: TrialOrder,
        config: dict[str, Any],
        channel: TrialChannel,
        checkpoints: CheckpointSink,
    ) -> None:
        if order.start is None:
            raise BugError(f"The order to start trial {order.trial} lacks its start.")
        self.trial = order.trial
        self.attempt = order.attempt
        self.start = order.start
        self.config = config
        self.context = TuneContext(order.trial, order.start)
        self.progress = TrialProgress()
        #: Called with each result before it is sent.
        self.on_result: Callable[[ResultReported], None] | None = None
        #: What made the trial end before its code did, if anything.
        self.ended: type[TrialExit] | None = None
        #: The step of the newest checkpoint; 0 before the first.
        self.saved_step = 0
        #: Whether the last step can be saved at any time, and not only by the trial's code.
        self.saves_when_asked = False
        self._channel = channel
        self._checkpoints = checkpoints
        self._offered: tuple[Checkpoint, CheckpointForm] | None = None
        self._made_folders: set[str] = set()
        self._saved = 0
        self._kept: SavedCheckpoint | None = None
        self._result: dict[str, Any] = {}
        self._required, self._required_derived = split_derived(self.start.required_metrics)
        self._finite, self._finite_derived = split_derived(self.start.finite_metrics)
        self._obeyed = order
        self._comparable: tuple[str, ...] = ()
        self._obey(order)
        self._pid = os.getpid()
        self._lock = threading.RLock()
        self._is_settled = False
        self._resumed_at = time.monotonic()

    def report(self, metrics: Mapping[str, Any], checkpoint: Checkpoint | None = None) -> None:
        """Send a result, keep its checkpoint, and go on as far as the scheduler wants.

        Reports of several threads follow one another, with all that belongs to each.

        Raises:
            MetricError: a metric is not usable; nothing was sent or counted.
            StoreError: the checkpoint could not be kept; the result was sent.
            TrialUnwinding: the trial has ended; let it pass.
        """
        if checkpoint is not None and not isinstance(checkpoint, Checkpoint):
            raise CheckpointError(
                f"report(checkpoint=...) takes a Checkpoint, not {type(checkpoint).__qualname__}: "
                f"use Checkpoint.from_directory(path)."
            )
        if self._pid != os.getpid():
            raise TuneError(
                f"report() was called in process {os.getpid()}, a child of the trial's process "
                f"{self._pid}. Send the metrics to the trial's process and report them there."
            )
        with self._one_thread():
            if self._is_settled:
                raise TrialDoneExit
            self.record(metrics)
            if checkpoint is not None:
                self.save(Path(checkpoint.path), CheckpointForm(as_dict=checkpoint.is_dict))
            self.save_offered()
            self.go_on()

    def record(self, metrics: Mapping[str, Any]) -> dict[str, Any]:
        """Count and send a result; returns it with its measured keys. It may end the trial."""
        if self.ended is not None:
            raise self.ended
        progress = self.progress
        elapsed_s = time.monotonic() - self._resumed_at
        step = progress.iteration + 1
        plain = check_metrics(metrics, self._required, self._finite, step=step)
        if self._required_derived or self._finite_derived:
            self._check_derived(plain, step)
        if self._comparable:
            check_comparable(plain, self._comparable, step=step)
        event = progress.advance(self.trial, self.attempt, plain, elapsed_s)
        result = measured(event)
        if not event.done and first_that_holds(self.start.stop, result) is not None:
            event = msgspec.structs.replace(event, done=True)
            result[DONE] = True
        if progress.iterations_since_restore == 1:
            self._warn_of_unknown_criteria(result)
        if self.on_result is not None:
            self.on_result(event)
        self._channel.send(event)
        self._result = result
        if event.done:
            self.ended = TrialDoneExit
        return result

    def save(self, source: Path, form: CheckpointForm = AS_FOLDER) -> None:
        """Keep the files below ``source`` as the checkpoint that contains the last result.

        Raises:
            StoreError: they could not be kept.
        """
        self._saved += 1
        step = self.progress.iteration
        state = self.progress.state() | form.state()
        info = CheckpointInfo(
            trial=self.trial,
            attempt=self.attempt,
            n=self._saved,
            step=step,
            metrics=self._result,
            state=state,
        )
        kept = self._checkpoints.save(source, info)
        self._channel.send(kept)
        self.saved_step = step
        self._kept = SavedCheckpoint(_reference(kept), state, None)

    def make_checkpoint_folder(self, step: int) -> str:
        """A folder for the trainable to write a checkpoint into; removed once that is kept."""
        folder = make_checkpoint_folder(self.start.folder, step)
        self._made_folders.add(folder)
        return folder

    def offer(self, checkpoint: Checkpoint, form: CheckpointForm) -> None:
        """Have the next report take ``checkpoint`` along, in place of one offered before."""
        if self._offered is not None and self._offered[0].path != checkpoint.path:
            self._discard_offered()
        self._offered = checkpoint, form

    @property
    def has_offered(self) -> bool:
        """Whether a checkpoint waits for the next report."""
        return self._offered is not None

    def save_offered(self) -> None:
        """Keep the checkpoint that was offered for the last result, if one was."""
        with self._one_thread():
            if self._offered is not None:
                checkpoint, form = self._offered
                self.save(Path(checkpoint.path), form)
                self._discard_offered()

    def go_on(self) -> None:
        """Return when the next step may begin; its time counts from here.

        Raises:
            TrialUnwinding: there is no next step.
        """
        if self.ended is not None:
            raise self.ended
        self._look_for_orders()
        while True:
            if self._obeyed.stop or (self._obeyed.pause and self._may_pause):
                self.ended = TrialStopExit if self._obeyed.stop else TrialPauseExit
                raise self.ended
            horizon = self._obeyed.run_until
            if not horizon or self._is_repeated or first_that_holds(horizon, self._result) is None:
                break
            self._obey(self._channel.wait())
        self._resumed_at = time.monotonic()

    def look_for_stop(self) -> None:
        """Look, in the middle of a step, whether the trial is to stop; a pause waits for its end.

        Raises:
            StopTrial: it is.
        """
        self._look_for_orders()
        if self._obeyed.stop:
            self.ended = TrialStopExit
            raise self.ended

    @property
    def reported_metrics(self) -> tuple[str, ...]:
        """The metrics that somebody expects of every result and that only the trial's code has."""
        return self._required

    def settled(self) -> type[TrialExit] | None:
        """What made the trial end, now that its code is left; a stop replaces a pause.

        Threads that the code left behind report nothing any more.
        """
        with self._one_thread():
            self._is_settled = True
            if self.ended is TrialPauseExit:
                self._look_for_orders()
                if self._obeyed.stop:
                    self.ended = TrialStopExit
            return self.ended

    @property
    def _may_pause(self) -> bool:
        """Whether nothing of it is to be repeated, where that matters."""
        is_saved = self.saves_when_asked or self.saved_step == self.progress.iteration
        return is_saved or not self._obeyed.at_checkpoint

    @property
    def _is_repeated(self) -> bool:
        """Whether the last step is one that an earlier epoch reported, too.

        Such a result is dropped where it is read, so nobody would tell a trial that waits there to
        go on: its times, say, may reach a horizon that those of the first record did not.
        """
        return self.progress.iteration <= self.start.last_step

    def restore(self) -> Path | None:
        """Take up the checkpoint to go on from, and return its files; None for a fresh start.

        It is the newest that is whole: of each damaged one the node is told.

        Raises:
            CheckpointCorrupt: none is whole; says what is wrong with each.
            StoreError: it cannot be read now.
        """
        candidates = self.start.restore
        following = [*(ref.key for ref in candidates[1:]), ""]
        damages = []
        for ref, instead in zip(candidates, following, strict=False):
            try:
                path, state = self._checkpoints.open(ref)
            except CheckpointCorrupt as error:
                self._say_damaged(ref, error, instead)
                damages.append(str(error))
                continue
            if is_null(path):
                return None
            self.resume_from(path, {TRAINING_ITERATION: ref.step} | state, ref)
            return path
        if damages:
            raise CheckpointCorrupt(
                f"trial {self.trial} has no checkpoint that it could go on from: "
                f"{' '.join(damages)}"
            )
        return None

    def resume_from(
        self, path: Path, state: dict[str, Any], ref: CheckpointRef | None = None
    ) -> None:
        """Count on from ``state``; ``path`` is the newest checkpoint, but not a new one."""
        self.progress.restore(state)
        self.saved_step = self.progress.iteration
        self._kept = SavedCheckpoint(ref, state, path)

    def newest_checkpoint(self) -> SavedCheckpoint | None:
        """The newest checkpoint with its files at hand; before the first, the restored one.

        Raises:
            CheckpointCorrupt: its files are damaged; the node was told.
            StoreError: its files cannot be read now.
        """
        with self._one_thread():
            kept = self._kept
            if kept is not None and kept.path is None and kept.ref is not None:
                try:
                    path, _ = self._checkpoints.open(kept.ref)
                except CheckpointCorrupt as error:
                    self._say_damaged(kept.ref, error, "")
                    raise
                kept = self._kept = kept._replace(path=path)
            return kept

    def send(self, event: NodeEvent) -> None:
        """Say something about the trial to its node."""
        self._channel.send(event)

    def _one_thread(self) -> AbstractContextManager[object]:
        """Held by one thread at a time; a forked child may have got the lock taken, for good."""
        return self._lock if self._pid == os.getpid() else nullcontext()

    def _discard_offered(self) -> None:
        """Forget what was offered, with its files if they are in a folder that was made for it."""
        if self._offered is not None:
            folder, self._offered = str(self._offered[0].path), None
            if folder in self._made_folders:
                self._made_folders.discard(folder)
                remove(folder)

    def _say_damaged(self, ref: CheckpointRef, error: CheckpointCorrupt, instead: str) -> None:
        """Say that ``ref`` is damaged, and the key of what is taken instead."""
        logger.warning("%s Instead: %s.", error, instead or "nothing")
        self._channel.send(
            CheckpointDamaged(self.trial, self.attempt, ref.key, str(error), instead)
        )

    def _look_for_orders(self) -> None:
        """Take in the newest order, if one has come."""
        order = self._channel.poll()
        if order is not None:
            self._obey(order)

    def _obey(self, order: TrialOrder) -> None:
        """Take ``order`` as the newest; one for another epoch came too late to mean anything."""
        if (order.trial, order.attempt) != (self.trial, self.attempt):
            return
        self._obeyed = order
        keys = [condition.key for condition in (*self.start.stop, *order.run_until)]
        self._comparable = tuple(key for key in dict.fromkeys(keys) if key not in ALWAYS_THERE)

    def _check_derived(self, plain: dict[str, Any], step: int) -> None:
        """Raise MetricError unless what the expected automatic keys are made from is there."""
        known = self.progress.state() | plain
        for key, source in DERIVED.items():
            if known.get(key) is None and known.get(source) is not None:
                known[key] = known[source]
        check_expected(known, self._required_derived, self._finite_derived, step=step)

    def _warn_of_unknown_criteria(self, result: dict[str, Any]) -> None:
        for criterion in self.start.stop:
            if lookup(result, criterion.key) is None:
                logger.warning(
                    "The stop criterion %s >= %s names a metric that the first result lacks; "
                    "it holds no trial back. Reported keys are %s.",
                    criterion.key,
                    criterion.bound,
                    sorted(result),
                )


def _reference(kept: CheckpointWritten | CheckpointCommitted) -> CheckpointRef:
    """What finds a checkpoint again that was just kept."""
    if isinstance(kept, CheckpointWritten):
        return CheckpointRef(kept.key, "", kept.step, written=kept.sha256)
    return CheckpointRef(kept.key, kept.sha256, kept.step)
