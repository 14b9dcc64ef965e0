"""`FunctionRunner`: runs a function trainable, one call that reports as it proceeds.

The function runs in the thread that calls `FunctionRunner.run`, which is the main thread of a trial
process. No other thread helps: the function waits in `report`, and an exception from `report` ends
it.
"""

from __future__ import annotations

import copy
import logging
import numbers
from collections.abc import Callable, Generator
from contextlib import closing
from pathlib import Path
from typing import Any, ClassVar

from tunemq_shared.base.errors import MetricError, TrainableError
from tunemq_shared.checkpoints.checkpoint import Checkpoint
from tunemq_shared.checkpoints.checkpoint_bytes import is_temporary, make_permanent
from tunemq_shared.checkpoints.checkpoint_markers import (
    is_null,
    make_checkpoint_folder,
    make_null_checkpoint,
    read_notes,
    write_notes,
)
from tunemq_shared.trainable.function_signatures import FunctionSignature, function_form
from tunemq_shared.trainable.reporter_argument import StatusReporter
from tunemq_shared.trainable.trainable import Trainable
from tunemq_shared.trial.control_flow import TrialExit, TrialPauseExit
from tunemq_shared.trial.metrics import UNNAMED
from tunemq_shared.trial.progress import TrialProgress
from tunemq_shared.trial.results import TRAINING_ITERATION
from tunemq_shared.trial.session import TrialSession, running

logger = logging.getLogger(__name__)


class FunctionRunner(Trainable):
    """Runs a function as a trial; `wrap_function` makes a subclass for each function."""

    _name: ClassVar[str | None] = "func"
    #: The function's return value, once it has returned.
    output: Any = None

    def _trainable_func(
        self,
        config: dict[str, Any],  # noqa: ARG002  subclasses use it
        reporter: StatusReporter,  # noqa: ARG002  likewise
        checkpoint_dir: str | dict[str, Any] | None,  # noqa: ARG002  likewise
    ) -> Any:
        """Call the function; subclasses define it."""
        raise TrainableError(f"{type(self).__name__} wraps no function; use wrap_function(f).")

    def run(self) -> Any:
        """Run the function to its end as the running trial; returns its return value.

        A returned number or dict is reported as the last result, and each yielded one as a result.

        Raises:
            MetricError: The function ended without a result, although metrics are required.
            TrainableError: It returned a value of another type.
            TrialExit: The trial ended first.
        """
        session = running("FunctionRunner.run")
        session.go_on()
        try:
            self.output = self._called(session)
        except BaseException as error:
            if session.ended is None or error is session.save_error:
                raise
            if not isinstance(error, TrialExit):  # its result stands, so it is only logged
                logger.warning(
                    "Trial %s had ended when its function raised:", session.trial, exc_info=True
                )
        if session.ended is TrialPauseExit and session.progress.iteration:
            session.save_offered()
        if session.ended is not None:
            raise session.ended
        if missing := without_result(f"The function {self._name}", session):
            raise missing
        return self.output

    def _called(self, session: TrialSession) -> Any:
        """Call the function and report what it returns."""
        reporter = StatusReporter(session)
        config = copy.deepcopy(self.config)
        output = self._trainable_func(config, reporter, reporter.get_checkpoint())
        if isinstance(output, Generator):
            with closing(output):
                for item in output:
                    session.report(self._as_metrics(item))
        elif output is not None:
            session.report(self._as_metrics(output))
        if session.progress.iteration:
            session.save_offered()
        return output

    def _as_metrics(self, output: Any) -> dict[str, Any]:
        """Convert a returned or yielded value to metrics."""
        if isinstance(output, dict):
            return output
        if isinstance(output, numbers.Number) or getattr(output, "shape", None) == ():
            return {UNNAMED: output}
        raise TrainableError(
            f"The function {self._name} returned or yielded {type(output).__qualname__}; return a "
            f"number, a dict of metrics, or nothing."
        )

    def execute(self, function: Callable[[FunctionRunner], Any]) -> Any:
        """Call ``function`` with this object."""
        return function(self)

    def step(self) -> dict[str, Any]:
        """Raise TrainableError: a function cannot be stepped.

        Raises:
            TrainableError: Always.
        """
        raise TrainableError(
            f"The function {self._name} runs as a whole, in a trial; only a class trainable can be "
            f"trained step by step."
        )

    def save(self, checkpoint_dir: str | None = None) -> str:
        """Copy the trial's newest checkpoint into its folder; without one, a null checkpoint.

        Raises:
            TrainableError: ``checkpoint_dir`` was given.
        """
        if checkpoint_dir is not None:
            raise TrainableError(
                "A function itself decides where its checkpoints are: give no path."
            )
        return self._save_below(self.logdir)

    def _save_below(self, parent: str) -> str:
        """Copy the trial's newest checkpoint, or make a null one, below ``parent``."""
        kept = running("FunctionRunner.save").newest_checkpoint()
        if kept is None or kept.path is None:
            folder = make_null_checkpoint(parent)
            write_notes(folder, TrialProgress().state())
            return folder
        step = kept.state[TRAINING_ITERATION]
        if is_temporary(kept.path):
            folder = make_permanent(kept.path, parent, step)
        else:
            folder = Checkpoint(kept.path).to_directory(make_checkpoint_folder(parent, step))
        write_notes(folder, kept.state)
        return folder

    def restore(self, checkpoint_path: str | Path | Checkpoint) -> None:
        """Make the function start from a checkpoint of `save`; a null checkpoint changes nothing.

        Raises:
            CheckpointError: Its notes are damaged.
        """
        path = checkpoint_path.path if isinstance(checkpoint_path, Checkpoint) else checkpoint_path
        if not is_null(path):
            session = running("FunctionRunner.restore")
            session.resume_from(Path(path), read_notes(str(path)))


def wrap_function(function: Callable[..., Any]) -> type[FunctionRunner]:
    """Make a class trainable that runs ``function``; its ``__mixins__`` become the first bases.

    Raises:
        TrainableError: The function has none of the accepted signatures.
    """
    form = function_form(function)

    def _trainable_func(
        self: FunctionRunner,  # noqa: ARG001  a method
        config: dict[str, Any],
        reporter: StatusReporter,
        checkpoint_dir: str | dict[str, Any] | None,
    ) -> Any:
        if form is FunctionSignature.CHECKPOINT_DIR:
            return function(config, checkpoint_dir=checkpoint_dir)
        if form is FunctionSignature.REPORTER:
            return function(config, reporter=reporter)
        return function(config)

    name = getattr(function, "__name__", "func")
    bases = (*getattr(function, "__mixins__", ()), FunctionRunner)
    return type(name, bases, {"_name": name, "_trainable_func": _trainable_func})


def without_result(who: str, session: TrialSession) -> MetricError | None:
    """Make the error for a trial that reported nothing although metrics are required, else None."""
    expected = session.start.required_metrics or session.start.finite_metrics
    if not expected or session.progress.iteration:
        return None
    return MetricError(
        f"{who} ended without a result that has {expected[0]!r}: call "
        f"tune.report({{{expected[0]!r}: ...}}), or return that dict."
    )
