"""`ResultGrid`: the results of all trials of a search."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from typing import TYPE_CHECKING, Any, Final

from tunemq_scheduler.results.csv_cells import flatten
from tunemq_scheduler.results.json_encoding import is_finite, is_number
from tunemq_scheduler.results.result import Result, need_pandas, sign_of
from tunemq_shared.base.errors import ConfigError, MetricError, TrialError
from tunemq_shared.protocol.result_conditions import lookup

if TYPE_CHECKING:
    import pandas as pd

#: Which part of a trial's history decides its rank.
_SCOPES: Final = ("last", "avg", "last-5-avg", "last-10-avg", "all")
_SHOWN: Final = 10


class ResultGrid:
    """The results of all trials of a search, in the order of the trials.

    A grid is a sequence of `Result`: ``len(grid)``, ``grid[0]`` and ``for result in grid`` work.

    Args:
        results (sequence of Result): one for each trial. The grid does not copy them, so the
            sequence may create them on demand.
        experiment_path (str): the experiment's folder.
        metric (str): the default metric of `get_best_result`.
        mode (str): the default mode of `get_best_result`.

    Example:
        >>> from tunemq import Result, ResultGrid
        >>> trials = [Result(metrics={"loss": x}, path=f"/results/{x}") for x in (0.5, 0.25)]
        >>> grid = ResultGrid(trials, experiment_path="/results", metric="loss", mode="min")
        >>> grid.get_best_result().path
        '/results/0.25'
    """

    def __init__(
        self,
        results: Sequence[Result],
        *,
        experiment_path: str,
        metric: str | None = None,
        mode: str | None = None,
    ) -> None:
        self._results = results
        self._metric = metric
        self._mode = mode
        self.experiment_path = experiment_path

    def __len__(self) -> int:
        return len(self._results)

    def __iter__(self) -> Iterator[Result]:
        return iter(self._results)

    def __getitem__(self, index: int) -> Result:
        return self._results[index]

    @property
    def errors(self) -> list[Exception]:
        """The errors of trials that ended in ERROR."""
        return [result.error for result in self if result.error is not None]

    @property
    def num_errors(self) -> int:
        """The number of trials that ended in ERROR."""
        return sum(result.status == "ERROR" for result in self)

    @property
    def num_terminated(self) -> int:
        """The number of trials that ended in TERMINATED."""
        return sum(result.status == "TERMINATED" for result in self)

    def get_best_result(
        self,
        metric: str | None = None,
        mode: str | None = None,
        scope: str = "last",
        filter_nan_and_inf: bool = True,
    ) -> Result:
        """Return the result of the best trial.

        Args:
            metric (str): the result key to compare. Default: the search's metric.
            mode (str): ``"min"`` or ``"max"``: which values are best. Default: the search's mode.
            scope (str): which values of a trial to compare: ``"last"``, the mean of all (``"avg"``)
                or of the last ones (``"last-5-avg"``, ``"last-10-avg"``), or the best (``"all"``).
                All but ``"last"`` read the trials' files.
            filter_nan_and_inf (bool): ignore values that are NaN or infinite. NaN is never best.

        Returns:
            The best trial's `Result`.

        Raises:
            ConfigError: metric or mode is missing, or the scope is invalid.
            MetricError: no trial reported the metric, or only NaN and infinities.
            TrialError: no trial has a result; the message says how the first one failed.
        """
        metric = metric or self._metric
        mode = mode or self._mode
        if metric is None or mode is None:
            raise ConfigError(
                "get_best_result needs a metric and a mode: give both here or in TuneConfig."
            )
        if scope not in _SCOPES:
            raise ConfigError(f"scope={scope!r} is invalid: choose one of {', '.join(_SCOPES)}.")
        sign = sign_of(mode)
        keep: Callable[[Any], bool] = is_finite if filter_nan_and_inf else is_number
        best: Result | None = None
        best_score = math.nan
        for result in self:
            score = _score(result, metric, sign, scope, keep)
            if score is not None and not score <= best_score:  # not <=: anything is above NaN
                best, best_score = result, score
        if best is None:
            raise self._no_best(metric)
        return best

    def get_dataframe(
        self, filter_metric: str | None = None, filter_mode: str | None = None
    ) -> pd.DataFrame:
        """Return a pandas table with one row for each trial.

        Nested keys are ``outer/inner``; ``logdir`` is the trial's folder.

        Args:
            filter_metric (str): show each trial's best result in this metric instead of its last
                one.
            filter_mode (str): ``"min"`` or ``"max"``: which values of ``filter_metric`` are best.

        Raises:
            ConfigError: only one of the two is given.
            TuneError: pandas is not installed.
        """
        pandas = need_pandas("ResultGrid.get_dataframe")
        if filter_metric is None and filter_mode is None:
            rows = [(result, result.metrics) for result in self]
        elif filter_metric is None:
            raise ConfigError("get_dataframe(filter_mode=...) needs filter_metric too.")
        else:
            sign = sign_of(filter_mode)
            rows = [(result, _best_step(result, filter_metric, sign)) for result in self]
        table: pd.DataFrame = pandas.DataFrame(
            [
                {**flatten(metrics), **flatten({"config": result.config}), "logdir": result.path}
                for result, metrics in rows
            ]
        )
        return table

    def __repr__(self) -> str:
        states = Counter(result.status for result in self)
        counts = ", ".join(f"{count} {state}" for state, count in sorted(states.items()))
        shown = "".join(f"\n  {self[index]!r}," for index in range(min(len(self), _SHOWN)))
        more = f"\n  ... {len(self) - _SHOWN} more" if len(self) > _SHOWN else ""
        return f"ResultGrid<{self.experiment_path}: {counts or 'no trials'}>[{shown}{more}\n]"

    def _no_best(self, metric: str) -> Exception:
        reported = [result for result in self if result.metrics]
        if not reported:
            cause = next(iter(self.errors), None)
            told = f"; the first of {self.num_errors} failed trials: {cause}" if cause else ""
            return TrialError(f"no trial has reported a result{told}.")
        if all(lookup(result.metrics, metric) is None for result in reported):
            known = ", ".join(sorted(flatten(reported[-1].metrics)))
            return MetricError(f"no trial reported the metric {metric!r}; there are: {known}.")
        return MetricError(
            f"all values of {metric!r} are NaN or infinite; with filter_nan_and_inf=False infinite "
            "ones may win."
        )


def _score(
    result: Result, metric: str, sign: int, scope: str, keep: Callable[[Any], bool]
) -> float | None:
    """Return a trial's score, higher is better; None if it has no usable value."""
    if scope == "last":
        value = lookup(result.metrics, metric)
        if value is None:  # an earlier result may have it
            values = result.values(metric)
            value = values[-1] if values else None
        return sign * value if keep(value) and not math.isnan(value) else None
    values = [value for value in result.values(metric) if keep(value)]
    if scope.startswith("last-"):
        values = values[-int(scope.split("-")[1]) :]
    if not values:
        return None
    if scope == "all":
        finite = [sign * value for value in values if not math.isnan(value)]
        return max(finite) if finite else None
    mean = sign * sum(values) / len(values)
    return None if math.isnan(mean) else mean


def _best_step(result: Result, metric: str, sign: int) -> dict[str, Any]:
    ranked = [one for one in result.history if is_finite(lookup(one, metric))]
    if not ranked:
        return result.metrics
    return max(ranked, key=lambda one: sign * lookup(one, metric))
