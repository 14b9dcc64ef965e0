"""Run one trial in its process: run the trainable with a session, and report how it ended.

It sends exactly one of TrialFinished, TrialPaused and TrialFailed, or none if the trial was
stopped.
"""

from __future__ import annotations

import logging
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from tunemq_shared.base.errors import CheckpointCorrupt, MetricError, StoreError
from tunemq_shared.base.failure_text import one_line, traceback_text
from tunemq_shared.checkpoints.checkpoint_markers import TEMPORARY_PREFIX, remove
from tunemq_shared.protocol.messages import ResultReported, TrialFailed, TrialFinished, TrialPaused
from tunemq_shared.trainable.function_runner import FunctionRunner, without_result, wrap_function
from tunemq_shared.trainable.trainable import Trainable, validate_trainable
from tunemq_shared.trial import memory_errors
from tunemq_shared.trial.control_flow import TrialExit, TrialPauseExit, TrialStopExit
from tunemq_shared.trial.results import SHOULD_CHECKPOINT, full_result
from tunemq_shared.trial.session import TrialSession, active

logger = logging.getLogger(__name__)


class TrainableRunner:
    """Runs trials in this process, one after another, and keeps a trainable object for reuse.

    An object is reused if its trial asked for that (``reuse``) and did not fail, the next trial has
    the very same class, and its ``reset_config`` agrees. Functions are not reused.
    """

    def __init__(self) -> None:
        self._kept: Trainable | None = None

    def run(self, trainable: type[Trainable] | Callable[..., Any], session: TrialSession) -> None:
        """Run one trial to its end; sends an exception of its code instead of raising it.

        Raises:
            OSError: The channel is broken, so that nothing can be sent.
        """
        with active(session):
            failure = self._attempt(trainable, session)
        ended = session.settled()
        if ended is TrialStopExit and failure is not None:
            logger.warning(
                "Trial %s raised while it was stopped:\n%s", session.trial, failure.traceback
            )
        if failure is not None and not session.is_interrupted:
            session.send(failure)
        elif ended in {TrialPauseExit, TrialStopExit}:
            session.send(TrialPaused(session.trial, session.attempt))
        else:
            session.send(TrialFinished(session.trial, session.attempt))

    def close(self) -> None:
        """Clean up the kept object: no trial follows."""
        if self._kept is not None:
            kept, self._kept = self._kept, None
            _clean_up(kept)

    def _attempt(
        self, trainable: type[Trainable] | Callable[..., Any], session: TrialSession
    ) -> TrialFailed | None:
        """Run the trial's code; returns the failure to send, or None."""
        try:
            validate_trainable(trainable)
            if not (isinstance(trainable, type) and issubclass(trainable, Trainable)):
                _run_function(wrap_function(trainable), session)
            elif issubclass(trainable, FunctionRunner):
                _run_function(trainable, session)
            else:
                self._run_class(trainable, session)
        except TrialExit:
            return None
        except BaseException as error:  # noqa: BLE001  `run` sends what user code raised
            if not (isinstance(error, SystemExit) and error.code in {None, 0}):
                return _failure(error, session)
            missing = without_result(_kind_of(trainable), session)
            if missing is not None and session.ended is None:
                return _failure(missing, session)
        return None

    def _run_class(self, trainable: type[Trainable], session: TrialSession) -> None:
        """Set up, restore and train an object of ``trainable``; clean it up if it is not kept."""
        held = self._obtain(trainable, session.config)
        reusable = False
        try:
            held.follow(session.progress)
            _observe(held, session)
            with _restoring():
                path = session.restore()
                if path is not None:
                    held.restore(path)
            _train(held, session)
        except TrialExit:
            reusable = session.start.reuse
            raise
        finally:
            if reusable:
                self._kept = held
            else:
                _clean_up(held)

    def _obtain(self, trainable: type[Trainable], config: dict[str, Any]) -> Trainable:
        """Reuse the kept object if it can become this trial; else make a new one."""
        kept, self._kept = self._kept, None
        if kept is None:
            return trainable(config)
        reused = False
        try:
            reused = type(kept) is trainable and kept.reset(config)
        finally:
            if not reused:
                _clean_up(kept)
        return kept if reused else trainable(config)


def run_trial(trainable: type[Trainable] | Callable[..., Any], session: TrialSession) -> None:
    """Run one trial in a process that runs no other after it."""
    program = TrainableRunner()
    try:
        program.run(trainable, session)
    finally:
        program.close()


def _run_function(wrapped: type[FunctionRunner], session: TrialSession) -> None:
    """Run a wrapped function to its end."""
    runner = wrapped(session.config)
    with _restoring():
        session.restore()
    try:
        runner.run()
    finally:
        _clean_up(runner)


def _train(trainable: Trainable, session: TrialSession) -> None:
    """Step until the trial ends, saving checkpoints when they are due."""
    start = session.start
    every = start.checkpoint_frequency
    session.saves_when_asked = True
    try:
        while True:
            session.go_on()
            metrics = trainable.checked_step()
            is_due = every > 0 and (session.progress.iteration + 1) % every == 0
            result = session.record(metrics, is_saved=is_due)
            if is_due or result.get(SHOULD_CHECKPOINT):
                _save(trainable, session)
    except TrialExit as end:
        is_due = start.checkpoint_at_end or isinstance(end, TrialPauseExit)
        if is_due and session.saved_step != session.progress.iteration:
            _save(trainable, session)
        raise


def _kind_of(trainable: type[Trainable] | Callable[..., Any]) -> str:
    """The trainable's kind and name, for people."""
    is_class = isinstance(trainable, type) and not issubclass(trainable, FunctionRunner)
    name = getattr(trainable, "__name__", type(trainable).__name__)
    return f"The {'class' if is_class else 'function'} {name}"


def _save(trainable: Trainable, session: TrialSession) -> None:
    """Save a checkpoint of the last step."""
    folder = session.start.folder
    session.make_folder()
    temporary = tempfile.mkdtemp(prefix=TEMPORARY_PREFIX, dir=folder)
    try:
        with session.saving():
            trainable.save(temporary)
            session.save(Path(temporary))
    finally:
        remove(temporary)


def _observe(trainable: Trainable, session: TrialSession) -> None:
    """Call `log_result`, if the trainable defines it, with each complete result."""
    if type(trainable).log_result is Trainable.log_result:
        return
    frame = trainable.frame()

    def show(event: ResultReported) -> None:
        trainable.log_result(full_result(event, frame))

    session.on_result = show


@contextmanager
def _restoring() -> Iterator[None]:
    """Mark exceptions inside as failures to restore."""
    try:
        yield
    except Exception as error:
        raise _RestoreFailed from error


class _RestoreFailed(Exception):
    """The trial could not be restored from its checkpoint; the cause says why."""


def _failure(error: BaseException, session: TrialSession) -> TrialFailed:
    """Make the event that reports ``error`` to the scheduler."""
    kind = memory_errors.kind_of(error) or "user"
    if isinstance(error, _RestoreFailed) and error.__cause__ is not None:
        kind, error = "restore", error.__cause__
    elif isinstance(error, MetricError):
        kind = "metric"
    if isinstance(error, StoreError):
        kind = "restore" if isinstance(error, CheckpointCorrupt) else "storage"
    return TrialFailed(
        session.trial, session.attempt, kind, one_line(error), traceback_text(error), time.time()
    )


def _clean_up(trainable: Trainable) -> None:
    """Call the trainable's clean-up; only log what it raises."""
    try:
        trainable.stop()
    except BaseException:  # the outcome is decided already; the process's log has this
        logger.warning("%s.cleanup() raised:", type(trainable).__name__, exc_info=True)
