"""`Searcher`: the contract of algorithms that suggest configurations. The names are Ray's."""

from __future__ import annotations

from abc import ABC, abstractmethod
from typing import Any, Literal

from tunemq_scheduler.search.algorithm_states import Stateful
from tunemq_scheduler.search.objective import Metric, Mode, check_objective


class Searcher(Stateful, ABC):
    """Suggests configurations and is told what became of them.

    **Threads.** One thread at a time calls it, and never while another call is in flight.

    **Order.** `set_search_properties` is called once, before anything else. Then, for each trial:
    `suggest`, any number of `on_trial_result`, one `on_trial_complete`. Trials overlap; results
    come in the order in which the journal holds them.

    **Answers are facts.** What `suggest` returns is journalled before a trial runs and is never
    asked for again. The returned dict belongs to the caller.

    **Waiting.** `suggest` returns None to be asked again when something has happened (a trial
    ended, a result came), and ``Searcher.FINISHED`` to end the search. None for 60 s while there
    is no trial ends the search with an error.

    **Seeds.** ``set_search_properties(..., seed=...)`` carries the experiment's seed. A searcher
    whose suggestions depend only on that seed and on what it was told makes experiments repeatable.

    **Resuming.** A searcher is never pickled. A new one is set up, told of every earlier trial by
    `on_trial_restored`, and of their results and ends by the usual methods, in the journal's order.
    One that does not know `on_trial_restored` is given finished trials by `add_evaluated_point`, if
    it has that; else it starts anew, and its next suggestion may differ from an uninterrupted
    search's.

    **Errors.** What a method raises ends the experiment in ERROR, with its trials saved.

    Args:
        metric: the name of the value that is optimised, or several; None takes ``TuneConfig``'s.
        mode: ``min`` or ``max``, or one for each metric.
    """

    FINISHED: Literal["FINISHED"] = "FINISHED"
    #: Whether it goes through the values of ``grid_search``; a space for others has none.
    goes_through_grids: bool = False
    #: How many configurations it has; None where ``num_samples`` says so.
    total_samples: int | None = None

    # Here and not only in __init__: a subclass that forgets super().__init__() works, too.
    _metric: Metric = None
    _mode: Mode = None

    def __init__(self, metric: Metric = None, mode: Mode = None) -> None:
        check_objective(type(self).__name__, metric, mode)
        self._metric, self._mode = metric, mode

    @property
    def metric(self) -> Metric:
        """What is optimised."""
        return self._metric

    @property
    def mode(self) -> Mode:
        """Whether it is to be small (``min``) or large (``max``)."""
        return self._mode

    @property
    def wants_results(self) -> bool:
        """Whether results before the last one are of interest; if not, they are not sent."""
        return type(self).on_trial_result is not Searcher.on_trial_result

    def set_search_properties(
        self,
        metric: Metric,  # noqa: ARG002  a searcher may have its own
        mode: Mode,  # noqa: ARG002
        config: dict[str, Any],  # noqa: ARG002
        **spec: Any,  # noqa: ARG002
    ) -> bool:
        """Take over the metric, mode and search space of the experiment.

        Args:
            metric: as in ``TuneConfig``.
            mode: as in ``TuneConfig``.
            config: the search space, nested dicts and lists of constants and domains.
            **spec: ``seed`` and ``num_samples``; more may follow.

        Returns:
            Whether ``config`` is what will be searched; False if the searcher has a space of its
            own.
        """
        return False

    @abstractmethod
    def suggest(self, trial_id: str) -> dict[str, Any] | str | None:
        """The configuration of a new trial, None to be asked later, or ``Searcher.FINISHED``.

        It is merged over the constants of the search space; domains that it leaves are drawn at
        random.
        """

    def on_trial_result(self, trial_id: str, result: dict[str, Any]) -> None:
        """A trial reported something that is not its last result."""

    @abstractmethod
    def on_trial_complete(
        self, trial_id: str, result: dict[str, Any] | None = None, error: bool = False
    ) -> None:
        """A trial ended, by itself, by a stop or by an error.

        Args:
            trial_id: which.
            result: its last result; None if it has none. The metric may be missing or NaN.
            error: whether it failed.
        """

    def on_trial_restored(self, trial_id: str, config: dict[str, Any], **spec: Any) -> bool:  # noqa: ARG002
        """An earlier run of the experiment had this trial; what is told about it follows.

        A trial that ended and continues is told once more.

        Args:
            trial_id: which.
            config: what it runs with.
            **spec: ``number``, its place in the search, from 0; more may follow.

        Returns:
            Whether the searcher knows the trial now; by default it does not.
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
        """Learn from a configuration that was tried elsewhere.

        Raises:
            NotImplementedError: this searcher cannot.
        """
        raise NotImplementedError(f"{type(self).__name__} cannot learn from evaluated points.")

    def set_max_concurrency(self, max_concurrent: int) -> bool:  # noqa: ARG002
        """Whether the searcher itself sees to it that not more than so many trials are live."""
        return False

    def save(self, checkpoint_path: str) -> None:
        """Write the state to a file, for use outside of experiments.

        Raises:
            NotImplementedError: this searcher cannot.
        """
        raise NotImplementedError(f"{type(self).__name__} cannot be saved.")

    def restore(self, checkpoint_path: str) -> None:
        """Read the state that `save` wrote.

        Raises:
            NotImplementedError: this searcher cannot.
        """
        raise NotImplementedError(f"{type(self).__name__} cannot be restored.")


def innermost(searcher: Searcher) -> Searcher:
    """The searcher inside of wrappers, which hold it as ``searcher``."""
    inner = getattr(searcher, "searcher", None)
    return innermost(inner) if isinstance(inner, Searcher) else searcher


def accepts_points(searcher: Searcher) -> bool:
    """Whether a searcher has its own `Searcher.add_evaluated_point`."""
    own = type(innermost(searcher)).add_evaluated_point
    return own is not Searcher.add_evaluated_point
