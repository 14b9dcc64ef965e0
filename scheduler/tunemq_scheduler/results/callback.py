"""The base of loggers and of users' callbacks: told what happens during a search.

The hooks and their signatures are Ray Tune's. A callback runs in the loop's thread between two
turns, so a slow one makes the search wait; one that raises ends its experiment with `SearchFailed`.
Hooks come
after the fact was journalled, once for each fact: results that a retried trial repeats are not told
again.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from tunemq_scheduler.results.trial_view import TrialView

__all__ = ["Callback"]


class Callback:
    """Does nothing at every hook; override those that interest you.

    In all hooks ``iteration`` counts the turns of the loop from 0 and ``trials`` holds the search's
    trials; neither may be changed. Take ``**info`` along: later versions may tell more.
    """

    def setup(
        self,
        stop: Any = None,
        num_samples: int | None = None,
        total_num_samples: int | None = None,
        **info: Any,
    ) -> None:
        """Before the first trial: the stop criteria, and how many trials there will be."""

    def on_step_begin(self, iteration: int, trials: Sequence[TrialView], **info: Any) -> None:
        """A turn of the loop begins."""

    def on_step_end(self, iteration: int, trials: Sequence[TrialView], **info: Any) -> None:
        """A turn of the loop ends."""

    def on_trial_start(
        self, iteration: int, trials: Sequence[TrialView], trial: TrialView, **info: Any
    ) -> None:
        """A trial starts on a host, also when it is tried again."""

    def on_trial_restore(
        self, iteration: int, trials: Sequence[TrialView], trial: TrialView, **info: Any
    ) -> None:
        """A trial that just started goes on from its checkpoint."""

    def on_trial_save(
        self, iteration: int, trials: Sequence[TrialView], trial: TrialView, **info: Any
    ) -> None:
        """A trial saved its state."""

    def on_trial_result(
        self,
        iteration: int,
        trials: Sequence[TrialView],
        trial: TrialView,
        result: dict[str, Any],
        **info: Any,
    ) -> None:
        """A trial reported a result, which holds the automatic keys too and must not be changed."""

    def on_trial_complete(
        self, iteration: int, trials: Sequence[TrialView], trial: TrialView, **info: Any
    ) -> None:
        """A trial ended as it should: by itself, at a criterion, or by an algorithm."""

    def on_trial_recover(
        self, iteration: int, trials: Sequence[TrialView], trial: TrialView, **info: Any
    ) -> None:
        """A trial failed and will be tried again."""

    def on_trial_error(
        self, iteration: int, trials: Sequence[TrialView], trial: TrialView, **info: Any
    ) -> None:
        """A trial failed for the last time and is in ERROR."""

    def on_checkpoint(
        self,
        iteration: int,
        trials: Sequence[TrialView],
        trial: TrialView,
        checkpoint: Any,
        **info: Any,
    ) -> None:
        """A checkpoint of a trial is complete and recorded."""

    def on_experiment_end(self, trials: Sequence[TrialView], **info: Any) -> None:
        """This run of the search ends; no other hook follows.

        A search that was paused or interrupted calls it too, and again at the end of the run that
        resumes it: a trial whose ``status`` is PENDING or PAUSED then continues.
        """

    def get_state(self) -> dict[str, Any] | None:
        """What `set_state` needs after a restart; None for nothing."""
        return None

    def set_state(self, state: dict[str, Any]) -> None:
        """Take over what `get_state` returned in an earlier run."""
