"""Grid and random search."""

from __future__ import annotations

import bisect
import itertools
from collections.abc import Mapping, Sequence
from typing import Any

from tunemq_scheduler.search.objective import is_whole
from tunemq_scheduler.search.search_algorithm import (
    ENDLESS,
    EXHAUSTED,
    WAIT,
    NoSuggestion,
    SearchAlgorithm,
    SearchSetup,
    Suggestion,
    check_max_concurrent,
)
from tunemq_scheduler.search.space import (
    Grid,
    Path,
    find,
    format_tag,
    merge,
    path_name,
    read_space,
    variables,
)
from tunemq_scheduler.search.variants import generators, resolve
from tunemq_shared.errors import ConfigError, SearchSpaceError


class BasicVariantGenerator(SearchAlgorithm):
    """Goes through all combinations of the grids ``num_samples`` times; draws the rest at random.

    Configuration n depends only on the seed and n, so nothing is generated ahead and a resumed
    search goes on exactly.

    Args:
        points_to_evaluate: configurations to begin with, complete or in part; what a point leaves
            out is drawn or gone through as usual. Each takes the place of one of the
            ``num_samples``.
        max_concurrent: how many trials may be live at a time; 0 for no limit.
        constant_grid_search: draw once for all combinations of a sample, not for each of them.
        random_state: a seed of its own instead of the experiment's; a number, or a generator (of
            the standard library or numpy) from which one is drawn.
    """

    def __init__(
        self,
        points_to_evaluate: Sequence[dict[str, Any]] | None = None,
        max_concurrent: int = 0,
        constant_grid_search: bool = False,
        random_state: Any = None,
    ) -> None:
        self.max_concurrent = check_max_concurrent(
            "BasicVariantGenerator(max_concurrent)", max_concurrent
        )
        self._points = list(points_to_evaluate or [])
        self._constant_grid_search = constant_grid_search
        self._own_seed = _read_seed(random_state)
        self._seed: object = None
        self._live: set[str] = set()
        self._exhausted = False
        self._stretches: list[_Stretch] = []
        self._ends: list[int] = []
        self._endless = False
        self._searched: list[Path] = []

    def set_up(self, setup: SearchSetup) -> None:
        """Read the space and lay out the points and samples.

        Raises:
            SearchSpaceError: the space or a point is not usable.
        """
        setup = setup.checked()
        self._seed = setup.seed if self._own_seed is None else self._own_seed
        self._searched = [path for path, _ in variables(setup.space)]
        self._stretches = [
            _Stretch(merge(setup.space, _read_point(index, point, setup.space)))
            for index, point in enumerate(self._points)
        ]
        self._endless = setup.num_samples == ENDLESS
        rest = max(0, setup.num_samples - len(self._points))
        if rest or self._endless:
            self._stretches.append(_Stretch(setup.space, rest))
        sizes = (stretch.size for stretch in self._stretches)
        self._ends = list(itertools.accumulate(sizes))

    @property
    def total(self) -> int | None:
        """How many configurations there are; None if there is no end."""
        return None if self._endless else self._ends[-1]

    @property
    def is_finished(self) -> bool:
        """Whether all have been given."""
        return self._exhausted

    def next_config(self, n: int, trial_id: str) -> Suggestion | NoSuggestion:
        """The ``n``-th configuration; WAIT while ``max_concurrent`` trials are live."""
        if not self._endless and n >= self._ends[-1]:
            self._exhausted = True
            return EXHAUSTED
        if self.max_concurrent is not None and len(self._live) >= self.max_concurrent:
            return WAIT
        suggestion = self.suggestion(n)
        self._live.add(trial_id)
        return suggestion

    def suggestion(self, n: int) -> Suggestion:
        """The ``n``-th configuration, whether or not it is due; ``n`` below `total`."""
        # An endless search stays in the last stretch, whose number of samples does not count.
        which = min(bisect.bisect_right(self._ends, n), len(self._stretches) - 1)
        stretch = self._stretches[which]
        sample, cell = divmod(n - (self._ends[which - 1] if which else 0), stretch.grid.size)
        drawn_for = ("sample", which, sample) if self._constant_grid_search else (n,)
        config, evaluated = resolve(
            stretch.space, stretch.grid.pick(cell), generators(self._seed, *drawn_for)
        )
        if which < len(self._points):
            evaluated = self._with_preset(config, evaluated)
        names = {path_name(path): value for path, value in evaluated.items()}
        return Suggestion(config, format_tag(n, evaluated), names)

    def _with_preset(self, config: dict[Any, Any], evaluated: dict[Path, Any]) -> dict[Path, Any]:
        """With the values that a point gave to what the space would have varied."""
        for path in self._searched:
            if not any(other[: len(path)] == path for other in evaluated):
                try:
                    evaluated[path] = find(config, path)
                except LookupError:
                    continue  # the point replaced a whole part of the space
        return evaluated

    def told_suggested(self, n: int, trial_id: str, config: dict[str, Any]) -> None:  # noqa: ARG002
        """Count a trial of an earlier run as live."""
        self._live.add(trial_id)

    def told_complete(
        self,
        trial_id: str,
        result: dict[str, Any] | None,  # noqa: ARG002  it does not look at results
        error: bool = False,  # noqa: ARG002
        early_terminated: bool = False,  # noqa: ARG002
    ) -> None:
        """Count the trial as live no more."""
        self._live.discard(trial_id)

    def get_state(self) -> dict[str, Any]:
        """Which trials are live; all else follows from the seed."""
        return {"live": sorted(self._live)}

    def set_state(self, state: dict[str, Any]) -> None:
        """Take what `get_state` gave."""
        self._live = set(state["live"])


class _Stretch:
    """Consecutive configurations from one space: a point's, or those of all further samples."""

    def __init__(self, space: dict[Any, Any], samples: int = 1) -> None:
        self.space = space
        self.grid = Grid(space)
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


def _unknown_key(point: Mapping[Any, Any], space: Any, path: Path) -> Path | None:
    for key, value in point.items():
        if key not in space:
            return (*path, key)
        if isinstance(value, Mapping) and isinstance(space[key], dict):
            unknown = _unknown_key(value, space[key], (*path, key))
            if unknown is not None:
                return unknown
    return None


def _read_seed(state: Any) -> int | None:
    if state is None or (is_whole(state)):
        return None if state is None else int(state)
    for draw, argument in (("getrandbits", 63), ("integers", 2**63 - 1), ("randint", 2**31 - 1)):
        if hasattr(state, draw):  # random.Random, numpy's Generator, numpy's RandomState
            return int(getattr(state, draw)(argument))
    raise ConfigError(
        f"BasicVariantGenerator(random_state={state!r}): a whole number or a generator is needed."
    )
