"""`Rung`: the values of the trials that reached one milestone, and their cutoff."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

from tunemq_scheduler.schedulers.sorted_values import SortedValues


class Rung:
    """Values recorded at one milestone, in order; larger is better.

    A decision costs microseconds, even with a hundred thousand values. A trial has at most one.

    Args:
        milestone: the progress at which trials are compared, in units of ``time_attr``.
        keep: the fraction of trials that continue, e.g. 1/4.
    """

    __slots__ = ("_by_trial", "_quantile", "milestone", "values")

    def __init__(self, milestone: float, keep: float) -> None:
        self.milestone = milestone
        self.values = SortedValues[float]()
        self._by_trial: dict[str, float | None] = {}
        # Convert to percent and back, as numpy does: the last digit decides ties.
        self._quantile = ((1 - keep) * 100) / 100

    @property
    def count(self) -> int:
        """The number of recorded trials."""
        return len(self._by_trial)

    def cutoff(self) -> float | None:
        """Return the smallest value that is among the best; None if no value is recorded."""
        return quantile(self.values, self._quantile) if self.values else None

    def ranked_value(self, trial: str) -> float | None:
        """Return the value by which a trial ranks; None if it is not recorded."""
        if trial not in self._by_trial:
            return None
        value = self._by_trial[trial]
        return -math.inf if value is None else value

    @property
    def trials(self) -> list[str]:
        """The recorded trials."""
        return list(self._by_trial)

    def record(self, trial: str, value: float | None) -> None:
        """Record a trial's value; None if it is not a finite number."""
        self.forget(trial)
        self._by_trial[trial] = value
        if value is not None:
            self.values.add(value)

    def forget(self, trial: str) -> None:
        """Remove the trial's value, if it has one."""
        value = self._by_trial.pop(trial, None)
        if value is not None:
            self.values.remove(value)

    def get_state(self) -> list[Any]:
        """Return the state as JSON values."""
        return [self.milestone, self._by_trial.copy()]

    def set_state(self, state: list[Any]) -> None:
        """Restore the state that `get_state` returned."""
        self._by_trial = dict(state[1])
        found = self._by_trial.values()
        self.values = SortedValues(value for value in found if value is not None)


def quantile(values: Sequence[float] | SortedValues[float], q: float) -> float:
    """Return a quantile of ordered values.

    It equals numpy's ``nanpercentile`` with linear interpolation, to the last bit: position
    ``(n - 1) * q`` between the two neighbours, counted from the nearer one.
    """
    position = (len(values) - 1) * q
    index = int(position)
    below = values[index]
    above = values[min(index + 1, len(values) - 1)]
    part = position - index
    gap = above - below
    return below + gap * part if part < 0.5 else above - gap * (1 - part)
