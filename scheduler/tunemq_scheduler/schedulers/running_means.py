"""`RunningMeans`: running averages of trials' values, and their median at any progress."""

from __future__ import annotations

import bisect
import math
from collections.abc import Sequence
from typing import Any

from tunemq_scheduler.schedulers.sorted_values import SortedValues


class _Curve:
    """A trial's progress at each result, and the mean of its values up to there."""

    __slots__ = ("count", "means", "times", "total")

    def __init__(self) -> None:
        self.times: list[float] = []
        self.means: list[float] = []
        self.total = 0.0
        self.count = 0

    def add(self, time: float, value: float) -> float:
        self.total += value
        self.count += 1
        mean = self.total / self.count
        self.times.append(time)
        self.means.append(mean)
        return mean

    def mean_at(self, time: float) -> float:
        place = bisect.bisect_right(self.times, time)
        return self.means[place - 1] if place else math.nan


class RunningMeans:
    """The running means of trials.

    Where each trial that is beyond a progress has reported exactly there, their means are kept in
    order, and the median costs a binary search. Elsewhere each trial is asked.
    """

    def __init__(self) -> None:
        self._curves: dict[str, _Curve] = {}
        #: The last progress of each trial, in order.
        self._last_times = SortedValues[float]()
        #: Progress -> the finite means of the trials that reported there, in order.
        self._columns: dict[float, SortedValues[float]] = {}
        #: Progress -> the number of trials that reported there.
        self._counts: dict[float, int] = {}

    def last_time(self, trial: str) -> float:
        """Return the progress of a trial's last result; minus infinity without any."""
        curve = self._curves.get(trial)
        return curve.times[-1] if curve is not None else -math.inf

    def add(self, trial: str, time: float, value: float) -> None:
        """Add a result; a value that is not finite makes all later means of its trial useless."""
        curve = self._curves.get(trial)
        if curve is None:
            curve = self._curves[trial] = _Curve()
        else:
            self._drop_last_time(curve)
        self._last_times.add(time)
        mean = curve.add(time, value)
        self._counts[time] = self._counts.get(time, 0) + 1
        self._add_mean(time, mean)

    def median_of_others(self, trial: str, time: float) -> tuple[int, float]:
        """Return how many other trials beyond ``time`` have a finite mean there, and its median."""
        beyond = len(self._last_times) - self._last_times.below(time)
        column = self._columns.get(time)
        if column is not None and self._counts[time] == beyond:
            own = self._curves[trial].mean_at(time)
            skipped = column.below(own) if math.isfinite(own) else len(column)
            return _median_without(column, skipped)
        means = sorted(
            mean
            for name, curve in self._curves.items()
            if name != trial and curve.times[-1] >= time
            if math.isfinite(mean := curve.mean_at(time))
        )
        return _median_without(means, len(means))

    def forget(self, trial: str) -> None:
        """Remove a trial."""
        curve = self._curves.pop(trial, None)
        if curve is None:
            return
        self._drop_last_time(curve)
        for time, mean in zip(curve.times, curve.means, strict=True):
            self._counts[time] -= 1
            if math.isfinite(mean):
                self._columns[time].remove(mean)
            if not self._counts[time]:
                del self._counts[time], self._columns[time]

    def _drop_last_time(self, curve: _Curve) -> None:
        self._last_times.remove(curve.times[-1])

    def _add_mean(self, time: float, mean: float) -> None:
        column = self._columns.get(time)
        if column is None:
            column = self._columns[time] = SortedValues()
        if math.isfinite(mean):
            column.add(mean)

    def get_state(self) -> dict[str, Any]:
        """Return the state as JSON values."""
        return {
            name: [curve.times, curve.means, curve.total, curve.count]
            for name, curve in self._curves.items()
        }

    def set_state(self, state: dict[str, Any]) -> None:
        """Restore the state that `get_state` returned."""
        self.__init__()  # type: ignore[misc]
        for name, (times, means, total, count) in state.items():
            curve = self._curves[name] = _Curve()
            curve.times, curve.means = list(times), list(means)
            curve.total, curve.count = total, count
            self._last_times.add(curve.times[-1])
            for time, mean in zip(times, means, strict=True):
                self._counts[time] = self._counts.get(time, 0) + 1
                self._add_mean(time, mean)


def _median_without(
    values: Sequence[float] | SortedValues[float], skipped: int
) -> tuple[int, float]:
    """Return the number and the median of ordered values, without the one at ``skipped``."""
    count = len(values) - (skipped < len(values))
    if not count:
        return 0, math.nan

    def at(place: int) -> float:
        return values[place + (place >= skipped)]

    middle = count // 2
    return count, at(middle) if count % 2 else (at(middle - 1) + at(middle)) / 2
