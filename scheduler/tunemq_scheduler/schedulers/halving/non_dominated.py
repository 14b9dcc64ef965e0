"""`NonDominatedPriority`: sort trials by several metrics.

R. Schmucker, M. Donini, M. B. Zafar, D. Salinas, C. Archambeau: Multi-objective Asynchronous
Successive Halving, 2021 (arXiv:2106.12639). Non-dominated sorting: N. Srinivas, K. Deb:
Multiobjective Optimization Using Nondominated Sorting in Genetic Algorithms, Evolutionary
Computation 2 (1994). Epsilon-nets: K. L. Clarkson: Nearest-Neighbor Searching and Metric Space
Dimensions, 2005.
"""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from collections.abc import Sequence

from tunemq_scheduler.search.objective import is_whole
from tunemq_shared.base.errors import ConfigError

#: The values of a trial's metrics; smaller is better.
Point = Sequence[float]


class MOPriority(ABC):
    """Base class of rules that order trials by several metrics (Syne Tune's name).

    A priority depends on nothing but its arguments: no clock, no random numbers without a fixed
    seed.

    Example:
        >>> from tunemq.schedulers import MOPriority, MultiObjectiveASHA
        >>> class Weighted(MOPriority):
        ...     def __call__(self, points):
        ...         return [error + 0.1 * seconds for error, seconds in points]
        >>> Weighted()([(0.5, 1.0), (0.25, 2.0)])
        [0.6, 0.45]
        >>> scheduler = MultiObjectiveASHA(
        ...     ["error", "seconds"], "min", multiobjective_priority=Weighted()
        ... )
    """

    @abstractmethod
    def __call__(self, points: Sequence[Point]) -> Sequence[float]:
        """Return a priority for each point; smaller is better.

        Args:
            points: one for each trial, in the order in which they reached the rung; with one finite
                value for each metric, of which smaller is better: values of metrics with the mode
                ``max`` have the opposite sign.
        """


class NonDominatedPriority(MOPriority):
    """Sort trials into Pareto fronts, and those of a front so that they are far apart.

    A point dominates another if it is nowhere worse and somewhere better. The first front has the
    points that no other dominates; the second those that only points of the first dominate; and so
    on. Within a front, the point with the best value of one metric is first, and the next is always
    the one farthest from those before (an epsilon-net). Of equally far points, the earlier trial
    comes first. Distances are Euclidean, between the values as they are reported: scale metrics
    whose ranges differ much.

    Args:
        dim (int): the index of the metric whose best point is first in each front.

    Raises:
        ConfigError: ``dim`` is not an index.

    Example:
        >>> from tunemq.schedulers import NonDominatedPriority
        >>> NonDominatedPriority()([(0.0, 4.0), (1.0, 3.0), (2.0, 0.0), (2.0, 5.0)])
        [0, 2, 1, 3]
    """

    def __init__(self, dim: int = 0) -> None:
        if not is_whole(dim) or dim < 0:
            raise ConfigError(
                f"NonDominatedPriority(dim={dim!r}): pass the index of a metric, from 0."
            )
        self.dim = dim

    def __call__(self, points: Sequence[Point]) -> Sequence[int]:
        """Return the place of each point, from 0."""
        places = [0] * len(points)
        place = 0
        for front in pareto_fronts(points):
            for index in _spread(points, front, self.dim):
                places[index] = place
                place += 1
        return places


def pareto_fronts(points: Sequence[Point]) -> list[list[int]]:
    """Return the indices of the points of each front, the best front first."""
    fronts: list[list[int]] = []
    # Whatever dominates a point comes before it in this order.
    for index in sorted(range(len(points)), key=lambda one: tuple(points[one])):
        # If none of a front dominates it, none of a later one does.
        low, high = 0, len(fronts)
        while low < high:
            middle = (low + high) // 2
            if _is_dominated(points, index, fronts[middle]):
                low = middle + 1
            else:
                high = middle
        if low == len(fronts):
            fronts.append([])
        fronts[low].append(index)
    for front in fronts:
        front.sort()
    return fronts


def _is_dominated(points: Sequence[Point], index: int, front: list[int]) -> bool:
    """Return whether one of a front is nowhere worse than a point, and somewhere better."""
    point = points[index]
    for one in reversed(front):
        other = points[one]
        for mine, theirs in zip(point, other, strict=True):
            if theirs > mine:
                break
        else:
            if other != point:
                return True
    return False


def _spread(points: Sequence[Point], front: list[int], dim: int) -> list[int]:
    """Order the points of a front so that each is as far as possible from those before."""
    chosen = min(front, key=lambda one: points[one][dim])
    order = [chosen]
    distances = dict.fromkeys(front, math.inf)
    del distances[chosen]
    while distances:
        newest = points[chosen]
        for one, distance in distances.items():
            if (to_newest := math.dist(points[one], newest)) < distance:
                distances[one] = to_newest
        chosen = max(distances, key=distances.__getitem__)
        del distances[chosen]
        order.append(chosen)
    return order
