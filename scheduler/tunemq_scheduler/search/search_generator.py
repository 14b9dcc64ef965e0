"""`SearchGenerator`: makes a search algorithm of the experiment's loop out of a `Searcher`."""

from __future__ import annotations

import logging
from typing import Any

from tunemq_scheduler.search.concurrency import ConcurrencyLimiter
from tunemq_scheduler.search.domain_types import Domain, Function
from tunemq_scheduler.search.objective import accepted, metric_names, read_number
from tunemq_scheduler.search.search_algorithm import (
    ENDLESS,
    EXHAUSTED,
    WAIT,
    NoSuggestion,
    SearchAlgorithm,
    SearchSetup,
    Suggestion,
)
from tunemq_scheduler.search.searcher import Searcher, accepts_points, innermost
from tunemq_scheduler.search.space import (
    Path,
    find,
    flatten,
    format_tag,
    has_grid,
    merge,
    path_name,
    variables,
)
from tunemq_scheduler.search.variants import generators, resolve
from tunemq_scheduler.states import state_of
from tunemq_shared.errors import SearchFailed, SearchSpaceError
from tunemq_shared.nesting import too_deep

log = logging.getLogger(__name__)


class SearchGenerator(SearchAlgorithm):
    """Asks a searcher for ``num_samples`` suggestions and completes them to configurations.

    Args:
        searcher: who suggests.
    """

    def __init__(self, searcher: Searcher) -> None:
        self.searcher = searcher
        self._setup = SearchSetup({})
        self._exhausted = False
        self._live: set[str] = set()
        self._strangers: dict[str, dict[str, Any]] = {}
        self._warned = False

    def set_up(self, setup: SearchSetup) -> None:
        """Hand metric, mode and space to the searcher.

        Raises:
            SearchSpaceError: the space has a grid, or both it and the searcher say what is
                searched.
        """
        self._setup = setup = setup.checked()
        name = type(self.searcher).__name__
        if has_grid(setup.space):
            raise SearchSpaceError(
                f"{name} does not go through a grid_search; use choice, or leave out search_alg."
            )
        spec = {"seed": setup.seed, "num_samples": setup.num_samples}
        hand_over = self.searcher.set_search_properties
        taken = hand_over(setup.metric, setup.mode, setup.space, **accepted(hand_over, spec))
        unsearched = [p for p, d in variables(setup.space) if not isinstance(d, Function)]
        if not taken and unsearched:
            raise SearchSpaceError(
                f"param_space varies {path_name(unsearched[0])!r}, but {name} has a space of its "
                "own (or takes none); say in one of the two places what is searched."
            )

    @property
    def wants_results(self) -> bool:
        """Whether the searcher looks at results before the last."""
        return self.searcher.wants_results

    @property
    def required_metrics(self) -> tuple[str, ...]:
        """What the searcher optimises."""
        return metric_names(self.searcher.metric)

    @property
    def total(self) -> int | None:
        """``num_samples``."""
        return None if self._setup.num_samples == ENDLESS else self._setup.num_samples

    @property
    def is_finished(self) -> bool:
        """Whether the searcher has finished or ``num_samples`` is reached."""
        return self._exhausted

    def next_config(self, n: int, trial_id: str) -> Suggestion | NoSuggestion:
        """What the searcher suggests, completed by the constants of the space.

        Raises:
            SearchFailed: it suggested something that is no configuration.
        """
        if self._exhausted or (self.total is not None and n >= self.total):
            self._exhausted = True
            return EXHAUSTED
        suggested = self.searcher.suggest(trial_id)
        if suggested is None:
            return WAIT
        if isinstance(suggested, str) and suggested == Searcher.FINISHED:
            self._exhausted = True
            return EXHAUSTED
        if not isinstance(suggested, dict):
            raise SearchFailed(
                f"{type(self.searcher).__name__}.suggest() gave {suggested!r}; "
                "it must give a dict, None or Searcher.FINISHED."
            )
        if problem := too_deep(suggested, "the configuration"):
            raise SearchFailed(
                f"{type(self.searcher).__name__}.suggest() gave what cannot be used: {problem}."
            )
        self._live.add(trial_id)
        return self._complete(n, suggested)

    def _complete(self, n: int, suggested: dict[str, Any]) -> Suggestion:
        """Add what the searcher left out: constants, and domains drawn at random."""
        space = self._setup.space
        config, evaluated = resolve(merge(space, suggested), {}, generators(self._setup.seed, n))
        for path in flatten(suggested):
            if not _is_constant(space, path):
                evaluated.setdefault(path, find(config, path))
        names = {path_name(path): value for path, value in evaluated.items()}
        return Suggestion(config, format_tag(n, evaluated), names)

    def told_suggested(self, n: int, trial_id: str, config: dict[str, Any]) -> None:  # noqa: ARG002
        """Tell the searcher of a trial of an earlier run, in the way that it knows."""
        self._live.add(trial_id)
        if not self.searcher.on_trial_restored(trial_id, config):
            if not self._warned:
                self._warned = True
                log.warning(
                    "%s cannot take up trials of an earlier run; its next suggestions may differ "
                    "from those of an uninterrupted search.",
                    type(innermost(self.searcher)).__name__,
                )
            self._strangers[trial_id] = config

    def told_result(self, trial_id: str, result: dict[str, Any]) -> None:
        """Tell the searcher."""
        if trial_id in self._live and trial_id not in self._strangers:
            self.searcher.on_trial_result(trial_id, result)

    def told_complete(
        self,
        trial_id: str,
        result: dict[str, Any] | None,
        error: bool = False,
        early_terminated: bool = False,
    ) -> None:
        """Tell the searcher, once; Ray does not tell it early ends from others, either."""
        if trial_id not in self._live:
            return
        self._live.discard(trial_id)
        config = self._strangers.pop(trial_id, None)
        if config is None:
            self.searcher.on_trial_complete(trial_id, result=result, error=error)
            return
        if isinstance(self.searcher, ConcurrencyLimiter):
            self.searcher.forget(trial_id)
        metrics = self.required_metrics
        if result is None or error or len(metrics) != 1 or not accepts_points(self.searcher):
            return
        value = read_number(result, metrics[0])
        if value is not None:
            self.searcher.add_evaluated_point(config, value, pruned=early_terminated)

    def get_state(self) -> dict[str, Any] | None:
        """The searcher's state and the live trials; None where the searcher offers none."""
        searcher = None if self._strangers else state_of(self.searcher)
        if searcher is None:
            return None
        return {"searcher": searcher, "live": sorted(self._live), "exhausted": self._exhausted}

    def set_state(self, state: dict[str, Any]) -> None:
        """Take what `get_state` gave."""
        self.searcher.set_state(state["searcher"])
        self._live, self._exhausted = set(state["live"]), state["exhausted"]


def _is_constant(space: dict[str, Any], path: Path) -> bool:
    """Whether the space itself has a value at ``path``, outside any domain."""
    node: Any = space
    for key in path:
        if isinstance(node, Domain) or not isinstance(node, dict) or key not in node:
            return False
        node = node[key]
    return not any(True for _ in variables(node))
