"""`Searcher`: the interface of algorithms that suggest configurations, as in Ray Tune."""

from __future__ import annotations

from abc import ABC, abstractmethod
from typing import Any, Literal

from tunemq_scheduler.search.algorithm_states import Stateful
from tunemq_scheduler.search.objective import Metric, Mode, check_objective


class Searcher(Stateful, ABC):
    """Base class of search algorithms: suggest configurations and receive their results.

    **Threads.** One thread at a time calls it, and calls never overlap.

    **Order.** `set_search_properties` is called once, first. Then, for each trial: `suggest`, any
    number of `on_trial_result`, an `on_trial_pause` behind each result at which the trial scheduler
    pauses the trial, one `on_trial_complete`. Trials overlap; results arrive in the journal's
    order.

    **Answers are journalled.** The return value of `suggest` is journalled before a trial runs, and
    never requested again. The returned dict belongs to the caller.

    **Waiting.** `suggest` returns None to be asked again after the next event (a trial ended, a
    result arrived), and ``Searcher.FINISHED`` to end the search. None for 60 s while there is no
    trial ends the search with an error.

    **Seeds.** ``set_search_properties(..., seed=...)`` passes the experiment's seed. A searcher
    whose suggestions depend only on that seed and on earlier calls makes experiments repeatable.

    **Resuming.** A searcher is never pickled. A new one is set up and receives every earlier trial
    by `on_trial_restored`, and their results and ends by the usual methods, in the journal's order.
    A searcher with `get_state` and without `on_trial_restored` is asked to `suggest` them again;
    where it suggests another configuration, `set_state` undoes that. For a trial that it does not
    know then, it receives at the end `add_evaluated_point`, if it has that, and no other call; its
    next suggestion may differ from that of an uninterrupted search.

    **Errors.** An exception in a method ends the experiment in ERROR, with its trials saved.

    Args:
        metric: the result key to optimise, or several. Default: ``TuneConfig``'s metric.
        mode: ``min`` or ``max``, or one for each metric.
    """

    FINISHED: Literal["FINISHED"] = "FINISHED"
    #: Whether it enumerates ``grid_search`` values; a space for other searchers has none.
    goes_through_grids: bool = False
    #: The number of configurations; None if ``num_samples`` decides.
    total_samples: int | None = None

    # Class attributes, so that a subclass that forgets super().__init__() works, too.
    _metric: Metric = None
    _mode: Mode = None

    def __init__(self, metric: Metric = None, mode: Mode = None) -> None:
        check_objective(type(self).__name__, metric, mode)
        self._metric, self._mode = metric, mode

    @property
    def metric(self) -> Metric:
        """The metric to optimise."""
        return self._metric

    @property
    def mode(self) -> Mode:
        """Whether the metric should be small (``min``) or large (``max``)."""
        return self._mode

    @property
    def wants_results(self) -> bool:
        """Whether it wants results before the last one; if False, they are not sent."""
        return type(self).on_trial_result is not Searcher.on_trial_result

    def set_search_properties(
        self,
        metric: Metric,  # noqa: ARG002  a searcher may have its own
        mode: Mode,  # noqa: ARG002
        config: dict[str, Any],  # noqa: ARG002
        **spec: Any,  # noqa: ARG002
    ) -> bool:
        """Set the experiment's metric, mode and search space.

        Args:
            metric: as in ``TuneConfig``.
            mode: as in ``TuneConfig``.
            config: the search space, nested dicts and lists of constants and domains.
            **spec: ``seed`` and ``num_samples``; later versions may pass more.

        Returns:
            True if the searcher searches ``config``; False if it has another space.
        """
        return False

    @abstractmethod
    def suggest(self, trial_id: str) -> dict[str, Any] | str | None:
        """Return a new trial's configuration, None to be asked later, or ``Searcher.FINISHED``.

        It overrides the constants of the search space; domains that it omits are drawn at random.
        """

    def on_trial_result(self, trial_id: str, result: dict[str, Any]) -> None:
        """Called when a trial reported a result that is not its last."""

    def on_trial_pause(self, trial_id: str) -> None:
        """Called when the trial scheduler paused a trial at its newest result."""

    @abstractmethod
    def on_trial_complete(
        self, trial_id: str, result: dict[str, Any] | None = None, error: bool = False
    ) -> None:
        """Called when a trial ended, by itself, by a stop or by an error.

        Args:
            trial_id: the trial's ID.
            result: its last result; None without a result. The metric may be missing or NaN.
            error: whether it failed.
        """

    def on_trial_restored(self, trial_id: str, config: dict[str, Any], **spec: Any) -> bool:  # noqa: ARG002
        """Called for a trial of an earlier run of the experiment; its results follow.

        It is also called again for a trial that ended and runs again. One that failed may start
        from scratch: its results then begin with step 1 again.

        Args:
            trial_id: the trial's ID.
            config: its configuration.
            **spec: ``number``, its place in the search, from 0; later versions may pass more.

        Returns:
            Whether the searcher knows the trial now; by default False.
        """
        return False

    def add_evaluated_point(
        self,
        parameters: dict[str, Any],
        value: float,
        error: bool = False,
        pruned: bool = False,
        intermediate_values: list[float] | None = None,
    ) -> None:
        """Learn from a configuration that was evaluated elsewhere.

        Raises:
            NotImplementedError: this searcher does not support it.
            SearchSpaceError: the configuration does not fit; a trial of an earlier run is skipped.
        """
        raise NotImplementedError(f"{type(self).__name__} cannot learn from evaluated points.")

    def set_max_concurrency(self, max_concurrent: int) -> bool:  # noqa: ARG002
        """Return whether the searcher itself limits the number of live trials to this."""
        return False

    def save(self, checkpoint_path: str) -> None:
        """Write the state to a file, for use outside of experiments.

        Raises:
            NotImplementedError: this searcher does not support it.
        """
        raise NotImplementedError(f"{type(self).__name__} cannot be saved.")

    def restore(self, checkpoint_path: str) -> None:
        """Read the state that `save` wrote.

        Raises:
            NotImplementedError: this searcher does not support it.
        """
        raise NotImplementedError(f"{type(self).__name__} cannot be restored.")


def innermost(searcher: Searcher) -> Searcher:
    """Return the searcher inside wrappers, which hold it as ``searcher``."""
    inner = getattr(searcher, "searcher", None)
    return innermost(inner) if isinstance(inner, Searcher) else searcher


def accepts_points(searcher: Searcher) -> bool:
    """Return whether a searcher overrides `Searcher.add_evaluated_point`."""
    own = type(innermost(searcher)).add_evaluated_point
    return own is not Searcher.add_evaluated_point
