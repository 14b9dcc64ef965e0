"""`LoggerCallback`: the base class of loggers, with fewer hooks than a callback."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from tunemq_scheduler.results.callback import Callback

if TYPE_CHECKING:
    from tunemq_scheduler.results.trial_view import TrialView


class LoggerCallback(Callback):
    """Base class of callbacks that write records of trials; override the ``log_...`` methods.

    A logger may buffer records until `flush`, which the loop calls through `on_step_end` at the end
    of each turn, and through `on_experiment_end`.
    """

    def log_trial_start(self, trial: TrialView) -> None:
        """Called when a trial starts, also for a retry."""

    def log_trial_restore(self, trial: TrialView) -> None:
        """Called when a trial continues from its checkpoint."""

    def log_trial_save(self, trial: TrialView) -> None:
        """Called when a trial saved its state."""

    def log_trial_result(self, iteration: int, trial: TrialView, result: dict[str, Any]) -> None:
        """Called when a trial reported a result."""

    def log_trial_end(self, trial: TrialView, failed: bool = False) -> None:
        """Called when a trial ended; ``failed`` if it is in ERROR."""

    def flush(self) -> None:
        """Write all buffered data to the operating system."""

    def on_trial_start(
        self, iteration: int, trials: Sequence[TrialView], trial: TrialView, **info: Any
    ) -> None:
        """Calls `log_trial_start`."""
        del iteration, trials, info
        self.log_trial_start(trial)

    def on_trial_restore(
        self, iteration: int, trials: Sequence[TrialView], trial: TrialView, **info: Any
    ) -> None:
        """Calls `log_trial_restore`."""
        del iteration, trials, info
        self.log_trial_restore(trial)

    def on_trial_save(
        self, iteration: int, trials: Sequence[TrialView], trial: TrialView, **info: Any
    ) -> None:
        """Calls `log_trial_save`."""
        del iteration, trials, info
        self.log_trial_save(trial)

    def on_trial_result(
        self,
        iteration: int,
        trials: Sequence[TrialView],
        trial: TrialView,
        result: dict[str, Any],
        **info: Any,
    ) -> None:
        """Calls `log_trial_result`."""
        del trials, info
        self.log_trial_result(iteration, trial, result)

    def on_trial_complete(
        self, iteration: int, trials: Sequence[TrialView], trial: TrialView, **info: Any
    ) -> None:
        """Calls `log_trial_end`."""
        del iteration, trials, info
        self.log_trial_end(trial, failed=False)

    def on_trial_error(
        self, iteration: int, trials: Sequence[TrialView], trial: TrialView, **info: Any
    ) -> None:
        """Calls `log_trial_end`."""
        del iteration, trials, info
        self.log_trial_end(trial, failed=True)

    def on_step_end(self, iteration: int, trials: Sequence[TrialView], **info: Any) -> None:
        """Calls `flush`."""
        del iteration, trials, info
        self.flush()

    def on_experiment_end(self, trials: Sequence[TrialView], **info: Any) -> None:
        """Calls `flush`."""
        del trials, info
        self.flush()
