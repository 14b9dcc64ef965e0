"""Which node hosts a trial: best fit, never oversubscribed, and in words why it does not fit."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Final

from tunemq_shared.errors import InvariantBroken

#: Sums of fractions such as 0.1 ten times must still fit into 1.
_TOLERANCE: Final = 1e-9

_Free = tuple[tuple[str, float], ...]


class Placement:
    """The nodes' resources, what is taken of them, and the choice of a node.

    Nodes with the same free resources share a bucket, so that a choice costs as many comparisons as
    there are different amounts free, not as there are nodes.
    """

    def __init__(self) -> None:
        self._total: dict[str, dict[str, float]] = {}
        self._free: dict[str, dict[str, float]] = {}
        self._buckets: dict[_Free, dict[str, None]] = {}

    def __contains__(self, incarnation: str) -> bool:
        return incarnation in self._total

    @property
    def total(self) -> dict[str, float]:
        """All nodes' resources together."""
        return _sums(self._total)

    @property
    def free(self) -> dict[str, float]:
        """What is free of them."""
        return _sums(self._free)

    def add_node(self, incarnation: str, resources: Mapping[str, float]) -> None:
        """A node offers its resources."""
        self._total[incarnation] = dict(resources)
        self._free[incarnation] = dict(resources)
        self._into_bucket(incarnation)

    def remove_node(self, incarnation: str) -> None:
        """A node is gone, with all that was taken of it."""
        self._out_of_bucket(incarnation)
        del self._total[incarnation], self._free[incarnation]

    def fit(self, request: Mapping[str, float], preferred: str = "") -> str | None:
        """A node that has enough free now; None when there is none.

        Args:
            preferred: taken if it has; else that which would have least left over is.
        """
        if preferred in self._free and _left_over(self._free[preferred], request) is not None:
            return preferred
        best: _Free | None = None
        least = (0.0, 0.0)
        for bucket in self._buckets:
            left = _left_over(dict(bucket), request)
            if left is not None and (best is None or left < least):
                best, least = bucket, left
        return None if best is None else next(iter(self._buckets[best]))

    def take(self, incarnation: str, request: Mapping[str, float]) -> None:
        """Take a request's resources of a node.

        Raises:
            InvariantBroken: the node has not enough.
        """
        free = self._free[incarnation]
        if _left_over(free, request) is None:
            raise InvariantBroken(
                f"node {incarnation} has {free} free, {dict(request)} was placed on it"
            )
        self._change(incarnation, request, -1)

    def give_back(self, incarnation: str, request: Mapping[str, float]) -> None:
        """Give a request's resources back; a node that is gone has nothing to give back to."""
        if incarnation in self._free:
            self._change(incarnation, request, +1)

    def why_never(self, request: Mapping[str, float]) -> str | None:
        """Why no node, were it empty, could hold the request; None when one could."""
        if any(_left_over(total, request) is not None for total in self._total.values()):
            return None
        for name, amount in request.items():
            most = max((total.get(name, 0.0) for total in self._total.values()), default=0.0)
            if amount > most + _TOLERANCE:
                return f"a trial asks for {name}={amount:g}, the most that any node has is {most:g}"
        wanted = ", ".join(f"{name}={amount:g}" for name, amount in request.items())
        return f"a trial asks for {wanted}, and no single node has all of it"

    def _change(self, incarnation: str, request: Mapping[str, float], sign: int) -> None:
        self._out_of_bucket(incarnation)
        free = self._free[incarnation]
        for name, amount in request.items():
            if amount:
                free[name] = round(free.get(name, 0.0) + sign * amount, 9)
        self._into_bucket(incarnation)

    def _into_bucket(self, incarnation: str) -> None:
        key = tuple(self._free[incarnation].items())
        self._buckets.setdefault(key, {})[incarnation] = None

    def _out_of_bucket(self, incarnation: str) -> None:
        key = tuple(self._free[incarnation].items())
        bucket = self._buckets[key]
        del bucket[incarnation]
        if not bucket:
            del self._buckets[key]


def _left_over(
    free: Mapping[str, float], request: Mapping[str, float]
) -> tuple[float, float] | None:
    """What would be left, of scarce things such as GPUs and of CPUs; None when it does not fit."""
    for name, amount in request.items():
        if amount > free.get(name, 0.0) + _TOLERANCE:
            return None
    scarce = cpus = 0.0
    for name, amount in free.items():
        if name == "cpu":
            cpus = amount - request.get(name, 0.0)
        elif name != "memory":
            scarce += amount - request.get(name, 0.0)
    return scarce, cpus


def _sums(nodes: Mapping[str, Mapping[str, float]]) -> dict[str, float]:
    sums: dict[str, float] = {}
    for resources in nodes.values():
        for name, amount in resources.items():
            sums[name] = round(sums.get(name, 0.0) + amount, 9)
    return sums
