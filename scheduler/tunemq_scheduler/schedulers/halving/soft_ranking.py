"""`SoftRanking`: whether trials have the same order at two rungs, apart from noise.

O. Bohdal, L. Balles, M. Wistuba, B. Ermis, C. Archambeau, G. Zappella: PASHA: Efficient HPO and NAS
with Progressive Resource Allocation, ICLR 2023 (arXiv:2207.06940), sections 4.2 and 4.3.
"""

from __future__ import annotations

import bisect
import math
from collections.abc import Mapping
from typing import Any, Final

from tunemq_scheduler.schedulers.halving.rung import quantile

#: The finite values of a trial, by its progress, in the order in which it reported them.
Curve = Mapping[float, float]

#: Trials that are compared at most: the best of the rung. It bounds the time that a result takes.
MOST_COMPARED: Final = 100
#: Epsilon is this quantile of the distances of pairs that differ by noise only; N of the paper.
_NOISE_QUANTILE: Final = 0.9


class SoftRanking:
    """The best trials of a rung, in their order there, and their values at the rung below.

    Args:
        epsilon: the difference between values that is noise, until there is a better estimate.
    """

    def __init__(self, epsilon: float = 0.0) -> None:
        self.epsilon = epsilon
        #: Value at the rung, value at the rung below, trial; the best is last.
        self._ranked: list[tuple[float, float, str]] = []
        #: The distances of the pairs whose curves cross each other repeatedly.
        self._distances: dict[tuple[str, str], float] = {}

    def __contains__(self, trial: str) -> bool:
        """Whether a trial is compared."""
        return any(trial == one for *_, one in self._ranked)

    def add(self, trial: str, value: float, below: float, curves: Mapping[str, Curve]) -> None:
        """Add a trial, and estimate epsilon again.

        Args:
            trial: the trial's ID.
            value: its value at the rung; larger is better.
            below: its value at the rung below.
            curves: the values of each trial.
        """
        bisect.insort(self._ranked, (value, below, trial))
        if len(self._ranked) > MOST_COMPARED:
            self.remove(self._ranked[0][2])
        if trial not in self:
            return
        for *_, other in self._ranked:
            distance = crossing_distance(curves.get(trial, {}), curves.get(other, {}))
            if distance is not None:
                self._distances[trial, other] = distance
        if self._distances:
            self.epsilon = quantile(sorted(self._distances.values()), _NOISE_QUANTILE)

    def remove(self, trial: str) -> None:
        """Remove a trial, if it is compared; epsilon stays."""
        self._ranked = [one for one in self._ranked if one[2] != trial]
        self._distances = {
            pair: distance for pair, distance in self._distances.items() if trial not in pair
        }

    @property
    def is_consistent(self) -> bool:
        """Whether each trial has the value below that belongs to its place, up to epsilon.

        Trials with equal values may stand in any order.
        """
        ordered = sorted(below for _, below, _ in self._ranked)
        return all(
            below == expected or abs(below - expected) <= self.epsilon
            for (_, below, _), expected in zip(self._ranked, ordered, strict=True)
        )

    def get_state(self) -> list[Any]:
        """Return the state as JSON values."""
        distances = [[*pair, distance] for pair, distance in self._distances.items()]
        return [self.epsilon, [list(one) for one in self._ranked], distances]

    def set_state(self, state: list[Any]) -> None:
        """Restore the state that `get_state` returned."""
        self.epsilon = state[0]
        self._ranked = [(value, below, trial) for value, below, trial in state[1]]
        self._distances = {(one, other): distance for one, other, distance in state[2]}


def crossing_distance(one: Curve, other: Curve) -> float | None:
    """Return how far two curves are apart in the end, if they cross each other at least twice.

    They are compared where both have a value. Two curves of which one was better, then worse, and
    in the end is better again differ by noise.
    """
    differences = [value - other[time] for time, value in one.items() if time in other]
    if not differences or not differences[-1] or not math.isfinite(differences[-1]):
        return None
    crossings, sign = 0, 0.0
    for difference in differences:
        if difference and difference * sign <= 0:
            crossings += bool(sign)
            sign = math.copysign(1.0, difference)
    return abs(differences[-1]) if crossings >= 2 else None
