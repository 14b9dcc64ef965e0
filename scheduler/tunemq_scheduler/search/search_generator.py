"""`SearchGenerator`: completes a searcher's suggestions to configurations."""

from __future__ import annotations

import logging
from contextlib import suppress
from dataclasses import dataclass
from typing import Any, Literal

from tunemq_scheduler.search.algorithm_states import (
    Stateful,
    pack_state,
    state_of,
    unpack_state,
)
from tunemq_scheduler.search.domain_types import Function
from tunemq_scheduler.search.objective import Metric, Mode, accepted, metric_names, read_number
from tunemq_scheduler.search.searcher import Searcher, accepts_points, innermost
from tunemq_scheduler.search.space import (
    format_tag,
    has_grid,
    merge,
    path_name,
    read_space,
    searched,
    variables,
)
from tunemq_scheduler.search.variants import generators, resolve
from tunemq_shared.base.depth_and_integer_limits import beyond_limits
from tunemq_shared.base.errors import SearchFailed, SearchSpaceError
from tunemq_shared.base.safe_text import repr_of

log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class Suggestion:
    """A configuration for a new trial.

    Attributes:
        config: complete, without any domain; it belongs to the receiver.
        tag: a text that distinguishes it: ``3_lr=0.0100,width=32``.
        evaluated_params: the searched values, by ``outer/inner`` name.
    """

    config: dict[str, Any]
    tag: str
    evaluated_params: dict[str, Any]


class SearchGenerator(Stateful):
    """Ask a searcher for suggestions and complete them to configurations.

    Args:
        searcher: suggests configurations.
        space: the search space: constants, domains, nested dicts and lists.
        num_samples: the number of trials, or how often a grid is tried; -1 for no end.
        metric, mode: as in ``TuneConfig``.
        seed: the experiment's seed.

    Raises:
        SearchSpaceError: the space cannot be searched, or the searcher has another space.
        ConfigError: the searcher does not accept the metric or the mode.
    """

    def __init__(
        self,
        searcher: Searcher,
        space: dict[str, Any],
        num_samples: int = 1,
        metric: Metric = None,
        mode: Mode = None,
        seed: int = 0,
    ) -> None:
        self.searcher = searcher
        self._space, self._num_samples, self._seed = read_space(space), num_samples, seed
        #: Trials of an earlier run that the searcher does not know.
        self._strangers: dict[str, dict[str, Any]] = {}
        self._warned = False
        name = type(searcher).__name__
        if has_grid(self._space) and not innermost(searcher).goes_through_grids:
            raise SearchSpaceError(
                f"{name} does not support grid_search; use choice, or remove search_alg."
            )
        hand_over = searcher.set_search_properties
        spec = accepted(hand_over, {"seed": seed, "num_samples": num_samples})
        taken = hand_over(metric, mode, self._space, **spec)
        unsearched = [p for p, d in variables(self._space) if not isinstance(d, Function)]
        if not taken and unsearched:
            raise SearchSpaceError(
                f"param_space varies {path_name(unsearched[0])!r}, but {name} has its own space "
                "(or uses none); define the search space in one place."
            )

    @property
    def wants_results(self) -> bool:
        """Whether the searcher uses results before the last."""
        return self.searcher.wants_results

    @property
    def required_metrics(self) -> tuple[str, ...]:
        """The metrics that every result must have: those that the searcher optimises."""
        return metric_names(self.searcher.metric)

    @property
    def total(self) -> int | None:
        """The most configurations; None if there is no end."""
        own = innermost(self.searcher).total_samples
        return own if own is not None or self._num_samples < 0 else self._num_samples

    def suggest(self, n: int, trial_id: str) -> Suggestion | Literal["FINISHED"] | None:
        """Return the ``n``-th configuration (from 0), or None or FINISHED as `Searcher.suggest`.

        Raises:
            SearchFailed: the searcher's suggestion is not a configuration.
        """
        if self.total is not None and n >= self.total:
            return Searcher.FINISHED
        suggested = self.searcher.suggest(trial_id)
        if suggested is None:
            return None
        if isinstance(suggested, str) and suggested == Searcher.FINISHED:
            return Searcher.FINISHED
        if not isinstance(suggested, dict):
            raise SearchFailed(
                f"{type(self.searcher).__name__}.suggest() returned {suggested!r}; it must "
                "return a dict, None or Searcher.FINISHED."
            )
        if problem := beyond_limits(suggested, "the configuration"):
            raise SearchFailed(
                f"{type(self.searcher).__name__}.suggest() returned an invalid configuration: "
                f"{problem}."
            )
        config = resolve(merge(self._space, suggested), {}, generators(self._seed, n))
        values = searched(self._space, config)
        names = {path_name(path): value for path, value in values.items()}
        return Suggestion(config, format_tag(n, values), names)

    def on_trial_restored(
        self, n: int, trial_id: str, config: dict[str, Any], *, is_continued: bool = False
    ) -> None:
        """Pass the searcher a trial that it may not know.

        Args:
            n: its place in the search, from 0.
            trial_id: the trial's ID.
            config: its configuration.
            is_continued: whether it had ended and runs again; otherwise an earlier run added it.
        """
        tell = self.searcher.on_trial_restored
        is_known = tell(trial_id, config, **accepted(tell, {"number": n}))
        if not (is_known or (not is_continued and self._suggests_again(trial_id, config))):
            if not self._warned:
                self._warned = True
                log.warning(
                    (
                        "%s cannot restore the trials of an earlier run; its next suggestions may "
                        "differ from those of an uninterrupted search."
                    ),
                    type(innermost(self.searcher)).__name__,
                )
            self._strangers[trial_id] = config

    def _suggests_again(self, trial_id: str, config: dict[str, Any]) -> bool:
        """Ask for a trial of an earlier run again; undo that unless it gets its configuration."""
        learns = type(innermost(self.searcher)).on_trial_restored is not Searcher.on_trial_restored
        state = None if learns else state_of(self.searcher)
        if state is None:
            return False
        before = pack_state(type(self.searcher).__name__, state)
        suggested = self.searcher.suggest(trial_id)
        # Values such as arrays cannot be compared otherwise.
        if isinstance(suggested, dict) and repr_of(merge(config, suggested)) == repr_of(config):
            return True
        self.searcher.set_state(unpack_state(before))
        return False

    def on_trial_result(self, trial_id: str, result: dict[str, Any]) -> None:
        """Pass the searcher a result that is not the last."""
        if trial_id not in self._strangers:
            self.searcher.on_trial_result(trial_id, result)

    def on_trial_pause(self, trial_id: str) -> None:
        """Tell the searcher that a trial was paused at its newest result."""
        if trial_id not in self._strangers:
            self.searcher.on_trial_pause(trial_id)

    def on_trial_complete(
        self,
        trial_id: str,
        result: dict[str, Any] | None = None,
        error: bool = False,
        stopped_early: bool = False,
    ) -> None:
        """Pass the searcher a trial's end; if it does not know the trial, as an evaluated point."""
        config = self._strangers.pop(trial_id, None)
        if config is None:
            self.searcher.on_trial_complete(trial_id, result=result, error=error)
            return
        metrics = self.required_metrics
        if result is None or error or len(metrics) != 1 or not accepts_points(self.searcher):
            return
        value = read_number(result, metrics[0])
        if value is not None:
            with suppress(SearchSpaceError):  # on_trial_restored warned
                self.searcher.add_evaluated_point(config, value, pruned=stopped_early)

    def get_state(self) -> dict[str, Any] | None:
        """Return the searcher's state; None if that would be incomplete."""
        return None if self._strangers else state_of(self.searcher)

    def set_state(self, state: dict[str, Any]) -> None:
        """Restore the state that `get_state` returned."""
        self.searcher.set_state(state)
