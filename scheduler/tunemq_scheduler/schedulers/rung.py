"""One rung of successive halving: the values of the trials that reached it, and their cutoff."""

from __future__ import annotations

import bisect
from typing import Any


class Rung:
    """Values recorded at one milestone, larger is better, kept in order.

    Recording is a binary search and a move of at most a few tens of kilobytes, and the cutoff is
    read by index, so that a decision costs microseconds with thousands of values.

    Args:
        milestone: how far a trial has to come.
        keep: the share of trials that is to go on, e.g. 1/4.
    """

    __slots__ = ("_quantile", "diverged", "milestone", "values")

    def __init__(self, milestone: float, keep: float) -> None:
        self.milestone = milestone
        self.values: list[float] = []
        self.diverged = 0
        # By way of percent and back, as numpy does it: the last digit decides ties.
        self._quantile = ((1 - keep) * 100) / 100

    @property
    def count(self) -> int:
        """How many trials were recorded."""
        return len(self.values) + self.diverged

    def cutoff(self) -> float | None:
        """The value below which a trial is not among the best; None if nothing is recorded.

        It is numpy's ``nanpercentile`` with linear interpolation, to the last bit: position
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
        """Count a trial in; None is one whose value is not a finite number."""
        if value is None:
            self.diverged += 1
        else:
            bisect.insort(self.values, value)

    def get_state(self) -> list[Any]:
        """JSON values."""
        return [self.milestone, self.diverged, self.values.copy()]

    def set_state(self, state: list[Any]) -> None:
        """Take what `get_state` gave."""
        _, self.diverged, values = state
        self.values = sorted(values)
