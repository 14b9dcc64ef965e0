"""`CurveTable`: recorded learning curves of a grid, and the table that is shipped."""

from __future__ import annotations

import gzip
import itertools
import json
import math
from collections.abc import Iterator, Mapping, Sequence
from functools import cache
from importlib.resources import files
from typing import Any, Final

from tunemq_scheduler.search.domains import choice
from tunemq_scheduler.search.objective import is_real
from tunemq_shared.base.errors import ConfigError
from tunemq_shared.trial.results import DONE, TIME_THIS_ITER_S

_RECORDED: Final = {"digits_mlp": "digits_mlp.json.gz"}


class CurveTable:
    """Recorded learning curves of all configurations of a grid, as `simulate` takes them.

    A number that is not in the grid counts as the nearest that is; in proportion, where the grid's
    numbers are all positive. A trial is done at its curve's last step.

    Args:
        grid: the values of each hyperparameter, by name.
        metrics: by name, a metric's curves: one for each configuration, in the order of
            `itertools.product`, with a value for each step. All curves have the same length.
        seconds: the duration of a step, for each configuration.

    Attributes:
        param_space: the search space, which draws from the grid.
        steps: the length of each curve.

    Raises:
        ConfigError: the curves do not fit the grid; the message says how many there are.

    Example:
        >>> from tunemq.testing import CurveTable, simulate
        >>> table = CurveTable(
        ...     {"lr": [0.1, 1.0]},
        ...     {"loss": [[0.9, 0.5, 0.2], [0.8, 0.7, 0.7]]},
        ...     seconds=[60, 60],
        ... )
        >>> simulate(None, None, table, metric="loss", mode="min").time_s
        180.0
    """

    def __init__(
        self,
        grid: Mapping[str, Sequence[Any]],
        metrics: Mapping[str, Sequence[Sequence[float]]],
        seconds: Sequence[float],
    ) -> None:
        self.param_space = {name: choice(list(values)) for name, values in grid.items()}
        self._grid = {name: list(values) for name, values in grid.items()}
        self._metrics, self._seconds = dict(metrics), seconds
        count = math.prod(len(values) for values in self._grid.values())
        for name, found in (*self._metrics.items(), ("seconds", seconds)):
            if len(found) != count:
                raise ConfigError(
                    f"CurveTable: {name} has {len(found)} entries, and the grid has {count} "
                    "configurations; give one for each, in the order of itertools.product."
                )
        lengths = {len(curve) for curves in self._metrics.values() for curve in curves}
        if len(lengths) != 1 or 0 in lengths:
            raise ConfigError(
                f"CurveTable: the curves have {sorted(lengths)} steps; all need the same number."
            )
        (self.steps,) = lengths

    def __len__(self) -> int:
        """The number of configurations."""
        return len(self._seconds)

    def configs(self) -> Iterator[dict[str, Any]]:
        """Yield all configurations of the grid."""
        for values in itertools.product(*self._grid.values()):
            yield dict(zip(self._grid, values, strict=True))

    def __call__(self, config: Mapping[str, Any], step: int) -> dict[str, Any]:
        """Return the metrics of a configuration at a step; of the last step, if it is beyond."""
        row = self._row(config)
        at = min(step, self.steps) - 1
        found: dict[str, Any] = {name: curves[row][at] for name, curves in self._metrics.items()}
        found[TIME_THIS_ITER_S] = self._seconds[row]
        if step >= self.steps:
            found[DONE] = True
        return found

    def _row(self, config: Mapping[str, Any]) -> int:
        row = 0
        for name, values in self._grid.items():
            if name not in config:
                raise ConfigError(
                    f"the configuration {dict(config)!r} has no {name!r}; the table needs "
                    f"{', '.join(self._grid)}."
                )
            value = config[name]
            place = values.index(value) if value in values else _nearest(name, value, values)
            row = row * len(values) + place
        return row


def _nearest(name: str, value: Any, values: list[Any]) -> int:
    if not is_real(value) or not all(is_real(one) for one in values):
        raise ConfigError(f"{name}={value!r} is not in the table; use one of {values}.")
    if value > 0 and all(one > 0 for one in values):
        return min(range(len(values)), key=lambda place: abs(math.log(values[place] / value)))
    return min(range(len(values)), key=lambda place: abs(values[place] - value))


@cache
def recorded_curves(name: str = "digits_mlp") -> CurveTable:
    """Return a table of learning curves that is shipped with TuneMQ.

    ``digits_mlp``: 1,024 neural networks with one hidden layer (scikit-learn's ``MLPClassifier``)
    on scikit-learn's images of handwritten digits, 27 epochs each. The hyperparameters are
    ``solver``, ``lr``, ``alpha``, ``batch_size`` and ``hidden``; the metrics are ``error``, the
    share of validation images that are classified wrongly, and ``loss``, their cross-entropy. The
    duration of an epoch follows from its number of operations, as if there were a thousand times
    as many images: 2 to 18 seconds. `benchmarks/simulator/record_table.py` made it.

    Args:
        name (str): the table's name.

    Returns:
        The table; one object for all callers.

    Raises:
        ConfigError: no table has this name.

    Example:
        >>> from tunemq.testing import recorded_curves, simulate
        >>> table = recorded_curves("digits_mlp")
        >>> len(table), table.steps
        (1024, 27)
        >>> search = simulate("hyperband", None, table, metric="error", mode="min", num_samples=20)
        >>> min(trial.metrics["error"] for trial in search.trials) < 0.1
        True
    """
    if name not in _RECORDED:
        raise ConfigError(f"there are no recorded curves {name!r}; use {', '.join(_RECORDED)}.")
    packed = files(__package__).joinpath(_RECORDED[name]).read_bytes()
    table = json.loads(gzip.decompress(packed))
    seconds = table["seconds"]
    metrics = {
        name: [[value * kind["unit"] for value in curve] for curve in kind["curves"]]
        for name, kind in table["metrics"].items()
    }
    return CurveTable(
        table["space"], metrics, [value * seconds["unit"] for value in seconds["values"]]
    )
