"""Grid and random search."""

from __future__ import annotations

import bisect
import itertools
from collections.abc import Mapping, Sequence
from typing import Any

from tunemq_scheduler.search.objective import Metric, Mode, check_count, is_whole
from tunemq_scheduler.search.searcher import Searcher
from tunemq_scheduler.search.space import GridCombinations, SpacePath, merge, path_name, read_space
from tunemq_scheduler.search.variants import generators, resolve
from tunemq_shared.base.errors import ConfigError, SearchSpaceError


class BasicVariantGenerator(Searcher):
    """Try all grid combinations ``num_samples`` times; draw all other values at random.

    Configuration n depends only on the seed and n. So the search generates nothing ahead, and a
    resumed search continues exactly.

    Args:
        points_to_evaluate: the first configurations, complete or partial; the search draws or
            enumerates missing values as usual. Each replaces one of the ``num_samples``.
        max_concurrent: the most live trials; 0 for no limit.
        constant_grid_search: draw random values once for all grid combinations of a sample, instead
            of for each.
        random_state: a seed that replaces the experiment's: a number, or a generator (of the
            standard library or numpy) from which a seed is drawn.
    """

    goes_through_grids = True

    def __init__(
        self,
        points_to_evaluate: Sequence[dict[str, Any]] | None = None,
        max_concurrent: int = 0,
        constant_grid_search: bool = False,
        random_state: Any = None,
    ) -> None:
        super().__init__()
        check_count("BasicVariantGenerator", "max_concurrent", max_concurrent, least=0)
        self.max_concurrent = max_concurrent
        self._points = list(points_to_evaluate or [])
        self._constant_grid_search = constant_grid_search
        self._own_seed = _read_seed(random_state)
        self._seed: object = None
        self._count = 0
        self._config_ranges: list[_ConfigRange] = []
        self._ends: list[int] = []

    def set_search_properties(
        self,
        metric: Metric,  # noqa: ARG002  it looks at no results
        mode: Mode,  # noqa: ARG002
        config: dict[str, Any],
        **spec: Any,
    ) -> bool:
        """Read the space, and number the points and samples.

        Raises:
            SearchSpaceError: the space or a point is invalid.
        """
        self._seed = spec["seed"] if self._own_seed is None else self._own_seed
        self._config_ranges = [
            _ConfigRange(merge(config, _read_point(index, point, config)))
            for index, point in enumerate(self._points)
        ]
        self._count = 0  # reset after an earlier experiment
        endless = spec["num_samples"] < 0
        rest = max(0, spec["num_samples"] - len(self._points))
        if rest or endless:
            self._config_ranges.append(_ConfigRange(config, rest))
        self._ends = list(
            itertools.accumulate(config_range.size for config_range in self._config_ranges)
        )
        self.total_samples = None if endless else self._ends[-1]
        return True

    def suggest(self, trial_id: str) -> dict[str, Any]:  # noqa: ARG002  only the count matters
        """Return the next configuration."""
        self._count += 1
        return self.config(self._count - 1)

    def config(self, n: int) -> dict[str, Any]:
        """Return the ``n``-th configuration; ``n`` is below `total_samples`."""
        # An endless search stays in the last range, whose number of samples is ignored.
        which = min(bisect.bisect_right(self._ends, n), len(self._config_ranges) - 1)
        config_range = self._config_ranges[which]
        sample, cell = divmod(n - (self._ends[which - 1] if which else 0), config_range.grid.size)
        drawn_for = ("sample", which, sample) if self._constant_grid_search else (n,)
        return resolve(
            config_range.space, config_range.grid.pick(cell), generators(self._seed, *drawn_for)
        )

    def on_trial_complete(
        self, trial_id: str, result: dict[str, Any] | None = None, error: bool = False
    ) -> None:
        """Ignore the result."""

    def on_trial_restored(self, trial_id: str, config: dict[str, Any], **spec: Any) -> bool:  # noqa: ARG002
        """Count the trial."""
        self._count = max(self._count, spec.get("number", self._count) + 1)
        return True

    def get_state(self) -> dict[str, Any]:
        """Return the number of suggested configurations; the seed determines the rest."""
        return {"count": self._count}

    def set_state(self, state: dict[str, Any]) -> None:
        """Restore the state that `get_state` returned."""
        self._count = state["count"]


class _ConfigRange:
    """Consecutive configurations of one space: those of a point, or of all remaining samples."""

    def __init__(self, space: dict[Any, Any], samples: int = 1) -> None:
        self.space = space
        self.grid = GridCombinations(space)
        self.size = samples * self.grid.size


def _read_point(index: int, point: Any, space: dict[Any, Any]) -> dict[Any, Any]:
    if not isinstance(point, Mapping):
        raise SearchSpaceError(f"points_to_evaluate[{index}] is {point!r}; a dict is needed.")
    unknown = _unknown_key(point, space, ())
    if unknown is not None:
        raise SearchSpaceError(
            f"points_to_evaluate[{index}] sets {path_name(unknown)!r}, which the search space "
            f"does not have; add it to param_space, or use one of {list(space)}."
        )
    return read_space(point)


def _unknown_key(point: Mapping[Any, Any], space: Any, path: SpacePath) -> SpacePath | None:
    for key, value in point.items():
        if key not in space:
            return (*path, key)
        if isinstance(value, Mapping) and isinstance(space[key], dict):
            unknown = _unknown_key(value, space[key], (*path, key))
            if unknown is not None:
                return unknown
    return None


def _read_seed(state: Any) -> int | None:
    if state is None or is_whole(state):
        return None if state is None else int(state)
    for draw, argument in (("getrandbits", 63), ("integers", 2**63 - 1), ("randint", 2**31 - 1)):
        if hasattr(state, draw):  # random.Random, numpy's Generator, numpy's RandomState
            return int(getattr(state, draw)(argument))
    raise ConfigError(
        f"BasicVariantGenerator(random_state={state!r}) is invalid: pass a whole number or a "
        "generator."
    )
