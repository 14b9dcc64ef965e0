"""Stoppers that end trials or experiments that no longer improve."""

from __future__ import annotations

import bisect
import math
from collections import deque
from collections.abc import Collection
from typing import Any

from tunemq_scheduler.search.objective import check_count
from tunemq_scheduler.stopping.stopper import Stopper, check_positive, read_metric
from tunemq_shared.base.errors import ConfigError


class TrialPlateauStopper(Stopper):
    """Stop a trial whose metric has hardly changed over its last results.

    Args:
        metric: the result key.
        std: a smaller standard deviation is a plateau.
        num_results: the number of last results to examine.
        grace_period: the fewest results before a trial may stop.
        metric_threshold: stop only trials at least this good.
        mode: whether small (``min``) or large (``max``) values are good; required with
            ``metric_threshold``.
    """

    def __init__(
        self,
        metric: str,
        std: float = 0.01,
        num_results: int = 4,
        grace_period: int = 4,
        metric_threshold: float | None = None,
        mode: str | None = None,
    ) -> None:
        check_positive("TrialPlateauStopper(std)", std)
        check_count("TrialPlateauStopper", "num_results", num_results, least=1)
        check_count("TrialPlateauStopper", "grace_period", grace_period, least=0)
        if metric_threshold is not None and mode not in ("min", "max"):
            raise ConfigError(
                f"TrialPlateauStopper(mode={mode!r}): with metric_threshold it must be "
                "'min' or 'max'."
            )
        self._metric, self._std, self._threshold, self._mode = metric, std, metric_threshold, mode
        self._window, self._grace = num_results, max(grace_period, num_results)
        self._counts: dict[str, int] = {}
        self._values: dict[str, deque[float]] = {}

    def __call__(self, trial_id: str, result: dict[str, Any]) -> bool:
        """Return whether the trial's last results are nearly equal."""
        values = self._values.setdefault(trial_id, deque(maxlen=self._window))
        values.append(read_metric(result, self._metric))
        self._counts[trial_id] = self._counts.get(trial_id, 0) + 1
        if self._counts[trial_id] < self._grace or not self._good_enough(values[-1]):
            return False
        spread = deviation(values)
        plateau = spread < self._std  # False if one is NaN
        if plateau:
            self.reason = (
                f"the standard deviation of the last {len(values)} values of {self._metric}, "
                f"{spread:g}, is below {self._std:g}"
            )
            del self._values[trial_id], self._counts[trial_id]
        return plateau

    def _good_enough(self, value: float) -> bool:
        if self._threshold is None:
            return True
        return value <= self._threshold if self._mode == "min" else value >= self._threshold

    def stop_all(self) -> bool:
        """Return False."""
        return False

    def on_trial_restart(self, trial_id: str) -> None:
        """Forget the trial's results."""
        self._values.pop(trial_id, None)
        self._counts.pop(trial_id, None)

    def get_state(self) -> dict[str, Any]:
        """Return each trial's number of results, and the last of them."""
        values = {trial: list(last) for trial, last in self._values.items()}
        return {"counts": dict(self._counts), "values": values}

    def set_state(self, state: dict[str, Any]) -> None:
        """Restore the state that `get_state` returned."""
        self._counts = dict(state["counts"])
        self._values = {
            trial: deque(last, maxlen=self._window) for trial, last in state["values"].items()
        }


class ExperimentPlateauStopper(Stopper):
    """Stop the experiment when the best values so far are nearly equal.

    When a failed trial restarts, its values no longer count, nor does the plateau if one of them
    was among the best. Values that they had displaced do not come back.

    Args:
        metric: the result key.
        std: a standard deviation of the best values up to this is a plateau.
        top: the number of best values to examine.
        mode: whether the smallest (``min``) or the largest (``max``) values are the best.
        patience: the number of results that the plateau must last.
    """

    def __init__(
        self, metric: str, std: float = 0.001, top: int = 10, mode: str = "min", patience: int = 0
    ) -> None:
        check_positive("ExperimentPlateauStopper(std)", std)
        check_count("ExperimentPlateauStopper", "top", top, least=2)
        check_count("ExperimentPlateauStopper", "patience", patience, least=0)
        if mode not in ("min", "max"):
            raise ConfigError(f"ExperimentPlateauStopper(mode={mode!r}): 'min' or 'max' is needed.")
        self._metric, self._std, self._top, self._patience = metric, std, top, patience
        self._sign = 1.0 if mode == "min" else -1.0
        #: The best values, each with its trial.
        self._best: list[tuple[float, str]] = []
        self._lasted = 0
        self._enough = False

    def __call__(self, trial_id: str, result: dict[str, Any]) -> bool:
        """Return whether the experiment should stop, and this trial with it."""
        value = read_metric(result, self._metric)
        if not math.isnan(value):  # ignore diverged trials
            bisect.insort(self._best, (self._sign * value, trial_id))
            del self._best[self._top :]
        best = [value for value, _ in self._best]
        spread = deviation(best) if len(best) == self._top else math.nan
        plateau = spread <= self._std
        self._lasted = self._lasted + 1 if plateau else 0
        if not self._enough and plateau and self._lasted >= self._patience:
            self._enough = True
            self.reason = (
                f"the standard deviation of the best {self._top} values of {self._metric}, "
                f"{spread:g}, is at most {self._std:g}"
            )
        return self._enough

    def stop_all(self) -> bool:
        """Return whether the plateau has lasted long enough."""
        return self._enough

    def on_trial_restart(self, trial_id: str) -> None:
        """Forget the trial's values, and the plateau that they were part of."""
        others = [one for one in self._best if one[1] != trial_id]
        if len(others) < len(self._best):
            self._best, self._lasted, self._enough = others, 0, False

    def get_state(self) -> dict[str, Any]:
        """Return the best values, and for how many results they have been nearly equal."""
        return {"best": list(self._best), "lasted": self._lasted, "enough": self._enough}

    def set_state(self, state: dict[str, Any]) -> None:
        """Restore the state that `get_state` returned."""
        self._best = [(value, trial) for value, trial in state["best"]]
        self._lasted, self._enough = state["lasted"], state["enough"]


def deviation(values: Collection[float]) -> float:
    """Return the population standard deviation; NaN if it, or a value, is not finite."""
    try:
        mean = math.fsum(values) / len(values)
        return math.sqrt(math.fsum((value - mean) ** 2 for value in values) / len(values))
    except OverflowError:
        return math.nan
