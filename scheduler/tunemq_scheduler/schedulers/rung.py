"""`Rung`: the values of the trials that reached one milestone, and their cutoff."""

from __future__ import annotations

import bisect
from typing import Any


class Rung:
    """Values recorded at one milestone, in order; larger is better.

    Recording costs a binary search and a move of at most a few tens of kilobytes; the cutoff is
    read by index. So a decision costs microseconds, even with thousands of values.

    Args:
        milestone: the progress at which trials are compared, in units of ``time_attr``.
        keep: the fraction of trials that continue, e.g. 1/4.
    """

    __slots__ = ("_quantile", "diverged", "milestone", "values")

    def __init__(self, milestone: float, keep: float) -> None:
        self.milestone = milestone
        self.values: list[float] = []
        self.diverged = 0
        # Convert to percent and back, as numpy does: the last digit decides ties.
        self._quantile = ((1 - keep) * 100) / 100

    @property
    def count(self) -> int:
        """The number of recorded trials."""
        return len(self.values) + self.diverged

    def cutoff(self) -> float | None:
        """Return the smallest value that is among the best; None if no value is recorded.

        It equals numpy's ``nanpercentile`` with linear interpolation, to the last bit: position
        ``(n - 1) * q`` between the two neighbours, counted from the nearer one.
        """
        values = self.values
        if not values:
            return None
        position = (len(values) - 1) * self._quantile
        index = int(position)
        below = values[index]
        above = values[min(index + 1, len(values) - 1)]
        part = position - index
        gap = above - below
        return below + gap * part if part < 0.5 else above - gap * (1 - part)

    def record(self, value: float | None) -> None:
        """Record a trial's value; None if it is not a finite number."""
        if value is None:
            self.diverged += 1
        else:
            bisect.insort(self.values, value)

    def get_state(self) -> list[Any]:
        """Return the state as JSON values."""
        return [self.milestone, self.diverged, self.values.copy()]

    def set_state(self, state: list[Any]) -> None:
        """Restore the state that `get_state` returned."""
        _, self.diverged, values = state
        self.values = sorted(values)
