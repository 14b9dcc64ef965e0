"""The base of loggers: fewer hooks than a callback has, named after what a log is about."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from tunemq_scheduler.results.callback import Callback

if TYPE_CHECKING:
    from tunemq_scheduler.results.trial_view import TrialView


class LoggerCallback(Callback):
    """A callback that writes something down for each trial; override the ``log_...`` methods.

    A logger may hold records back until `flush`, which the loop calls through `on_step_end` at the
    end of each of its turns, and through `on_experiment_end`.
    """

    def log_trial_start(self, trial: TrialView) -> None:
        """A trial starts, also when it is tried again."""

    def log_trial_restore(self, trial: TrialView) -> None:
        """A trial goes on from its checkpoint."""

    def log_trial_save(self, trial: TrialView) -> None:
        """A trial saved its state."""

    def log_trial_result(self, iteration: int, trial: TrialView, result: dict[str, Any]) -> None:
        """A trial reported a result."""

    def log_trial_end(self, trial: TrialView, failed: bool = False) -> None:
        """A trial is over; ``failed`` when it is in ERROR."""

    def flush(self) -> None:
        """Hand everything that was held back to the operating system."""

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
