"""`Callback`: the base class of loggers and of user callbacks.

The hooks and their signatures are Ray Tune's. A callback runs in the thread of the experiment's
loop, between two turns: a slow callback delays the search, and an exception in one ends the
experiment with `SearchFailed`. A hook is called once for each event, after the event was
journalled. Results that a retried trial repeats do not call it again.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from tunemq_scheduler.results.trial_view import TrialView

__all__ = ["Callback"]


class Callback:
    """Base class of callbacks: override the hooks that you need; by default each does nothing.

    In all hooks ``iteration`` counts the loop's turns from 0, ``trials`` holds all trials of the
    search, and ``trial`` is the trial concerned. Do not change them. Accept ``**info``: later
    versions may pass more.

    Example:
        >>> from tunemq import Callback, RunConfig
        >>> class PrintErrors(Callback):
        ...     def on_trial_error(self, iteration, trials, trial, **info):
        ...         print(f"{trial.trial_id} failed")
        >>> run_config = RunConfig(callbacks=[PrintErrors()])
    """

    def setup(
        self,
        stop: Any = None,
        num_samples: int | None = None,
        total_num_samples: int | None = None,
        **info: Any,
    ) -> None:
        """Called before the first trial.

        Args:
            stop: the stop criteria, as in `RunConfig`.
            num_samples: as in `TuneConfig`.
            total_num_samples: how many trials there will be.
            **info: more, in later versions.
        """

    def on_step_begin(self, iteration: int, trials: Sequence[TrialView], **info: Any) -> None:
        """Called when a turn of the loop begins."""

    def on_step_end(self, iteration: int, trials: Sequence[TrialView], **info: Any) -> None:
        """Called when a turn of the loop ends."""

    def on_trial_start(
        self, iteration: int, trials: Sequence[TrialView], trial: TrialView, **info: Any
    ) -> None:
        """Called when a trial process starts to run a trial, also for a retry."""

    def on_trial_restore(
        self, iteration: int, trials: Sequence[TrialView], trial: TrialView, **info: Any
    ) -> None:
        """Called when a trial that just started continues from its checkpoint."""

    def on_trial_save(
        self, iteration: int, trials: Sequence[TrialView], trial: TrialView, **info: Any
    ) -> None:
        """Called when a trial saved its state."""

    def on_trial_result(
        self,
        iteration: int,
        trials: Sequence[TrialView],
        trial: TrialView,
        result: dict[str, Any],
        **info: Any,
    ) -> None:
        """Called when a trial reported a result; do not change it.

        ``result`` contains the automatic keys too.
        """

    def on_trial_complete(
        self, iteration: int, trials: Sequence[TrialView], trial: TrialView, **info: Any
    ) -> None:
        """Called when a trial terminated: by itself, by a stop criterion or by an algorithm."""

    def on_trial_recover(
        self, iteration: int, trials: Sequence[TrialView], trial: TrialView, **info: Any
    ) -> None:
        """Called when a trial failed and will be retried."""

    def on_trial_error(
        self, iteration: int, trials: Sequence[TrialView], trial: TrialView, **info: Any
    ) -> None:
        """Called when a trial failed for the last time and is in ERROR."""

    def on_checkpoint(
        self,
        iteration: int,
        trials: Sequence[TrialView],
        trial: TrialView,
        checkpoint: Any,
        **info: Any,
    ) -> None:
        """Called when a checkpoint of a trial is complete and recorded."""

    def on_experiment_end(self, trials: Sequence[TrialView], **info: Any) -> None:
        """Called when this run of the search ends, as the last hook.

        A paused or interrupted search calls it, too, and again at the end of the run that resumes
        it; trials whose ``status`` is PENDING or PAUSED continue then.
        """

    def get_state(self) -> dict[str, Any] | None:
        """Return the state that `set_state` needs after a restart; None for no state."""
        return None

    def set_state(self, state: dict[str, Any]) -> None:
        """Restore the state that `get_state` returned in an earlier run."""
