"""`TrialSession`: a trial's side of the conversation with its scheduler.

`TrialSession.report` is the point between two steps. It sends the result, then the checkpoint that
contains it, then reads new orders; the trial waits here at its horizon. An exception ends a trial
early (`tunemq_shared.trial.control_flow`).
"""

from __future__ import annotations

import logging
import os
import threading
import time
from collections import deque
from collections.abc import Callable, Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager, nullcontext
from pathlib import Path
from typing import Any, Final, NamedTuple

import msgspec

from tunemq_shared.base.errors import BugError, CheckpointCorrupt, CheckpointError, TuneError
from tunemq_shared.checkpoints.checkpoint import Checkpoint
from tunemq_shared.checkpoints.checkpoint_markers import (
    AS_FOLDER,
    CheckpointForm,
    is_null,
    make_checkpoint_folder,
    make_copy_folder,
    remove,
    remove_copies,
)
from tunemq_shared.checkpoints.checkpoint_sink import CheckpointSink
from tunemq_shared.checkpoints.manifest import CheckpointInfo
from tunemq_shared.protocol.messages import (
    CheckpointCommitted,
    CheckpointDamaged,
    CheckpointRef,
    CheckpointWritten,
    NodeEvent,
    ResultReported,
    TrialOrder,
)
from tunemq_shared.protocol.result_conditions import first_that_holds, lookup
from tunemq_shared.trial.control_flow import TrialDoneExit, TrialExit, TrialPauseExit, TrialStopExit
from tunemq_shared.trial.metrics import check_comparable, check_expected, check_metrics
from tunemq_shared.trial.progress import TrialProgress
from tunemq_shared.trial.results import (
    ALWAYS_THERE,
    DERIVED,
    DONE,
    SHOULD_CHECKPOINT,
    TRAINING_ITERATION,
    measured,
    split_derived,
)
from tunemq_shared.trial.trial_channel import TrialChannel
from tunemq_shared.trial.trial_context import TuneContext

#: How many copies of its checkpoints a trial may use at once, for instance in several threads.
_COPIES_KEPT: Final = 4
#: Seconds that a trial whose code ended after a SIGTERM waits for an order to pause, and the pause
#: between two looks.
_NODE_FOLLOWS_S: Final = 1.0
_POLL_INTERVAL_S: Final = 0.05

logger = logging.getLogger(__name__)


class SavedCheckpoint(NamedTuple):
    """A saved checkpoint: its reference, its state, and its folder if that is on this machine."""

    ref: CheckpointRef | None
    state: dict[str, Any]
    path: Path | None

    def given_back(self) -> str | dict[str, Any]:
        """The trainable's restore argument.

        Raises:
            BugError: The files are not on this machine.
        """
        if self.path is None:
            raise BugError(f"The files of checkpoint {self.ref} were not asked for.")
        return CheckpointForm.noted(self.state, self.path).given_back(self.path)


class TrialSession:
    """One attempt of one trial, seen from the process that runs it.

    Only the process that made it may use it. The trial's code may `report` and ask for checkpoints
    in any thread; the rest is for the thread that runs the trial.

    Args:
        order: What to run and how far; has its ``start``.
        config: The unpacked configuration.
        channel: The connection to the node.
        checkpoints: Saves and restores checkpoints.
        got_sigterm: Returns whether a handler of the trial's code received SIGTERM.
    """

    def __init__(
        self,
        order: TrialOrder,
        config: dict[str, Any],
        channel: TrialChannel,
        checkpoints: CheckpointSink,
        got_sigterm: Callable[[], bool] = bool,
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
        #: What made the trial end before its code did, or None.
        self.ended: type[TrialExit] | None = None
        #: Whether its code ended because of a SIGTERM that its node got, too: it is to continue.
        self.is_interrupted = False
        #: The step of the newest checkpoint; 0 before the first.
        self.saved_step = 0
        #: Why the newest checkpoint could not be saved; None if it was.
        self.save_error: Exception | None = None
        #: Whether the session can save the last step at any time, not only the trial's code.
        self.saves_when_asked = False
        self._channel = channel
        self._checkpoints = checkpoints
        self._got_sigterm = got_sigterm
        self._offered: tuple[Checkpoint, CheckpointForm] | None = None
        self._made_folders: set[str] = set()
        self._saved = 0
        #: How many nested `saving` contexts are open.
        self._savers = 0
        self._kept: SavedCheckpoint | None = None
        #: Copies of this attempt's own checkpoints that its code asked for.
        self._copies = deque[Path]()
        self._result: dict[str, Any] = {}
        self._required, self._required_derived = split_derived(self.start.required_metrics)
        self._finite, self._finite_derived = split_derived(self.start.finite_metrics)
        self._obeyed = order
        self._comparable: tuple[str, ...] = ()
        self._obey(order)
        self._pid = os.getpid()
        self._lock = threading.RLock()
        #: The thread that reports; 0 for none.
        self._reporting = 0
        self._is_settled = False
        self._resumed_at = time.monotonic()

    def report(self, metrics: Mapping[str, Any], checkpoint: Checkpoint | None = None) -> None:
        """Send a result, save its checkpoint, and wait until the next step may begin.

        Reports of several threads run one after another, each as a whole.

        Raises:
            MetricError: A metric is invalid; nothing was sent or counted.
            StoreError: The checkpoint could not be saved; the result was sent.
            TuneError: A signal handler calls it during another report, or a forked process does.
            TrialExit: The trial has ended; do not catch it.
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
        if self._reporting == threading.get_ident():
            raise TuneError(
                "report() was called during another report() of the same thread, by a signal "
                "handler: set a flag in the handler, and report in the training loop."
            )
        with self.one_thread():
            if self._is_settled:
                raise TrialDoneExit
            self._reporting = threading.get_ident()
            try:
                self.record(metrics, is_saved=checkpoint is not None or self.has_offered)
                if checkpoint is not None:
                    self.save(Path(checkpoint.path), CheckpointForm(as_dict=checkpoint.is_dict))
                self.save_offered()
                self.go_on()
            finally:
                self._reporting = 0

    def record(self, metrics: Mapping[str, Any], *, is_saved: bool = False) -> dict[str, Any]:
        """Count and send a result; returns it with its measured keys. It may end the trial.

        ``is_saved``: the checkpoint that contains it is saved next.
        """
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
        is_saved = is_saved or (self.saves_when_asked and bool(plain.get(SHOULD_CHECKPOINT)))
        event = progress.advance(self.trial, self.attempt, plain, elapsed_s, is_saved=is_saved)
        result = measured(event)
        if not (event.done or self._is_repeated) and first_that_holds(self.start.stop, result):
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
        """Save the files below ``source`` as the checkpoint that contains the last result.

        Raises:
            StoreError: They could not be saved.
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
        try:
            with self.saving():
                kept = self._checkpoints.save(source, info)
            self.save_error = None
        except Exception as error:
            self.save_error = error
            raise
        self._channel.send(kept)
        self.saved_step = step
        self._kept = SavedCheckpoint(_reference(kept), state, None)

    @contextmanager
    def saving(self) -> Iterator[None]:
        """Let the node wait for what happens inside before it ends a stopped trial's process."""
        self._savers += 1
        if self._savers == 1:
            self._channel.saves(is_saving=True)
        try:
            yield
        finally:
            self._savers -= 1
            if not self._savers:
                self._channel.saves(is_saving=False)

    def make_folder(self) -> None:
        """Make the trial's folder if it is missing.

        Raises:
            StoreError: The store of which it is a part is not there.
        """
        self._checkpoints.make_folder(self.start.folder)

    def make_checkpoint_folder(self, step: int) -> str:
        """Make a folder in which the trainable writes a checkpoint; removed once that is saved."""
        self.make_folder()
        folder = make_checkpoint_folder(self.start.folder, step, self._made_folders)
        self._made_folders.add(folder)
        return folder

    def offer(self, checkpoint: Checkpoint, form: CheckpointForm) -> None:
        """Let the next report save ``checkpoint``, instead of one offered before."""
        if self._offered is not None and self._offered[0].path != checkpoint.path:
            self._discard_offered()
        self._offered = checkpoint, form

    @property
    def has_offered(self) -> bool:
        """Whether a checkpoint waits for the next report."""
        return self._offered is not None

    def save_offered(self) -> None:
        """Save the offered checkpoint with the last result, if there is one."""
        with self.one_thread():
            if self._offered is not None:
                checkpoint, form = self._offered
                self.save(Path(checkpoint.path), form)
                self._discard_offered()

    def go_on(self) -> None:
        """Wait until the next step may begin; its time counts from here.

        Raises:
            TrialExit: There is no next step.
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

    def report_before_pause(
        self, metrics: Mapping[str, Any], checkpoint: Checkpoint | None = None
    ) -> bool:
        """Report another result of a trial that pauses; return whether it counts.

        It does not if the trial has reached its horizon: whether it continues is not decided yet.

        Raises:
            MetricError: A metric is invalid; nothing was sent or counted.
            StoreError: The checkpoint could not be saved; the result was sent.
        """
        with self.one_thread():
            horizon = self._obeyed.run_until
            is_there = horizon and not self._is_repeated and first_that_holds(horizon, self._result)
            if self.ended is not TrialPauseExit or self._obeyed.stop or is_there:
                return False
            self.ended = None
            try:
                self.record(metrics, is_saved=checkpoint is not None)
                if checkpoint is not None:
                    self.save(Path(checkpoint.path))
            finally:
                self.ended = self.ended or TrialPauseExit
            return True

    def look_for_stop(self) -> None:
        """Check in the middle of a step whether the trial must stop; a pause waits for its end.

        Raises:
            TrialStopExit: The trial must stop.
        """
        self._look_for_orders()
        if self._obeyed.stop:
            self.ended = TrialStopExit
            raise self.ended

    @property
    def reported_metrics(self) -> tuple[str, ...]:
        """The metrics that every result must have and that only the trial's code can report."""
        return self._required

    def settled(self) -> type[TrialExit] | None:
        """What made the trial end, called after its code ended; a stop replaces a pause.

        From now on, reports of threads that the code left behind raise, and the copies of
        checkpoints are gone.
        """
        with self.one_thread():
            self._is_settled = True
            remove_copies(self.start.folder, self.attempt)
            if self.ended is None and self._got_sigterm():
                self._wait_for_pause()
            if self.ended is TrialPauseExit:
                self._look_for_orders()
                if self._obeyed.stop:
                    self.ended = TrialStopExit
            return self.ended

    def _wait_for_pause(self) -> None:
        """Wait a moment for an order to pause: a machine that shuts down signals all processes."""
        deadline = time.monotonic() + _NODE_FOLLOWS_S
        self._look_for_orders()
        while not (self._obeyed.pause or self._obeyed.stop) and time.monotonic() < deadline:
            time.sleep(_POLL_INTERVAL_S)
            self._look_for_orders()
        if self._obeyed.pause or self._obeyed.stop:
            self.ended, self.is_interrupted = TrialPauseExit, True

    @property
    def _may_pause(self) -> bool:
        """Whether the trial can pause without losing steps that the order wants saved."""
        is_saved = self.saves_when_asked or self.saved_step == self.progress.iteration
        return is_saved or not self._obeyed.at_checkpoint

    @property
    def _is_repeated(self) -> bool:
        """Whether an earlier attempt also reported the last step.

        The scheduler drops such a result, so it would never answer a trial that waits there: its
        times, say, may reach a horizon that those of the first record did not. Nor may it end the
        trial by a stop criterion, which no recorded result would meet.
        """
        return self.progress.iteration <= self.start.last_step

    def restore(self) -> Path | None:
        """Restore the checkpoint to continue from; returns a copy of it, None for a fresh start.

        It takes the newest intact one and reports each damaged one to the node.

        Raises:
            CheckpointCorrupt: None is intact; names the damage of each.
            StoreError: It cannot be read now.
        """
        candidates = self.start.restore
        following = [*(ref.key for ref in candidates[1:]), ""]
        damages = []
        for ref, instead in zip(candidates, following, strict=False):
            try:
                path, state = self._copied(ref)
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
                f"trial {self.trial} has no checkpoint that it could continue from: "
                f"{' '.join(damages)}"
            )
        return None

    def resume_from(
        self, path: Path, state: dict[str, Any], ref: CheckpointRef | None = None
    ) -> None:
        """Continue counting from ``state``; ``path`` is the newest checkpoint, but not new."""
        self.progress.restore(state)
        self.saved_step = self.progress.iteration
        self._kept = SavedCheckpoint(ref, state, path)

    def newest_checkpoint(self) -> SavedCheckpoint | None:
        """The newest checkpoint with a copy of its files; before the first, the restored one.

        The copy of a restored one stays until the trial ends, and so do the newest few others.

        Raises:
            CheckpointCorrupt: Its files are damaged; the node has been informed.
            StoreError: Its files cannot be read now.
        """
        with self.one_thread():
            kept = self._kept
            if kept is not None and kept.path is None and kept.ref is not None:
                try:
                    path, _ = self._copied(kept.ref)
                except CheckpointCorrupt as error:
                    self._say_damaged(kept.ref, error, "")
                    raise
                self._copies.append(path.parent)
                if len(self._copies) > _COPIES_KEPT:
                    remove(self._copies.popleft())
                kept = self._kept = kept._replace(path=path)
            return kept

    def send(self, event: NodeEvent) -> None:
        """Send an event about the trial to its node."""
        self._channel.send(event)

    def one_thread(self) -> AbstractContextManager[object]:
        """The session's lock; none in a forked child, where another thread may hold it for ever."""
        return self._lock if self._pid == os.getpid() else nullcontext()

    def _copied(self, ref: CheckpointRef) -> tuple[Path, dict[str, Any]]:
        """Copy the checkpoint's files into the trial's folder; returns the copy and its state."""
        self.make_folder()
        copy = Path(make_copy_folder(self.start.folder, self.attempt), "files")
        return copy, self._checkpoints.get(ref, copy)

    def _discard_offered(self) -> None:
        """Forget the offered checkpoint, and remove its files if the session made their folder."""
        if self._offered is not None:
            folder, self._offered = str(self._offered[0].path), None
            if folder in self._made_folders:
                self._made_folders.discard(folder)
                remove(folder)

    def _say_damaged(self, ref: CheckpointRef, error: CheckpointCorrupt, instead: str) -> None:
        """Report that ``ref`` is damaged, and the key that is used instead."""
        logger.warning("%s Instead: %s.", error, instead or "nothing")
        self._channel.send(
            CheckpointDamaged(self.trial, self.attempt, ref.key, str(error), instead)
        )

    def _look_for_orders(self) -> None:
        """Apply the newest order, if one has arrived."""
        order = self._channel.poll()
        if order is not None:
            self._obey(order)

    def _obey(self, order: TrialOrder) -> None:
        """Take ``order`` as the newest; ignore a late one for another attempt."""
        if (order.trial, order.attempt) != (self.trial, self.attempt):
            return
        self._obeyed = order
        keys = [condition.key for condition in (*self.start.stop, *order.run_until)]
        self._comparable = tuple(key for key in dict.fromkeys(keys) if key not in ALWAYS_THERE)

    def _check_derived(self, plain: dict[str, Any], step: int) -> None:
        """Raise MetricError unless the sources of the expected automatic keys are there."""
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
    """Make the reference of a checkpoint that was just saved."""
    if isinstance(kept, CheckpointWritten):
        return CheckpointRef(kept.key, "", kept.step, written=kept.sha256)
    return CheckpointRef(kept.key, kept.sha256, kept.step)
