"""Which node hosts a trial: best fit, never oversubscribed, and in words why it does not fit."""

from __future__ import annotations

from collections.abc import Container, Iterable, Mapping
from typing import Final

import msgspec

from tunemq_shared.errors import InvariantBroken

#: Sums of fractions such as 0.1 ten times must still fit into 1.
_TOLERANCE: Final = 1e-9

_Free = tuple[tuple[str, float], ...]


class PlacementState(msgspec.Struct, array_like=True):
    """A `Placement` written down: each node's resources, in all and free, and the buckets.

    The order of both counts: of several nodes that would do the first is chosen.
    """

    nodes: list[tuple[str, dict[str, float], dict[str, float]]]
    buckets: list[list[str]]
    aside: frozenset[str]


class Placement:
    """The nodes' resources, what is taken of them, and the choice of a node.

    Nodes with the same free resources share a bucket, so that a choice costs as many comparisons as
    there are different amounts free, not as there are nodes.
    """

    def __init__(self) -> None:
        self._total: dict[str, dict[str, float]] = {}
        self._free: dict[str, dict[str, float]] = {}
        #: Of those nodes that are not set aside.
        self._buckets: dict[_Free, dict[str, None]] = {}
        self._aside: frozenset[str] = frozenset()

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
        self._aside -= {incarnation}

    def set_aside(self, incarnations: Iterable[str]) -> None:
        """From now on nothing is placed on these nodes; all others are as always."""
        aside = frozenset(incarnations)
        if aside == self._aside:
            return
        changed = [one for one in self._free if (one in aside) != (one in self._aside)]
        for incarnation in changed:
            self._out_of_bucket(incarnation)
        self._aside = aside
        for incarnation in changed:
            self._into_bucket(incarnation)

    def fit(
        self, request: Mapping[str, float], preferred: str = "", avoid: Container[str] = ()
    ) -> str | None:
        """A node that has enough free now; None when there is none.

        Args:
            preferred: taken if it has; else that which would have least left over is.
            avoid: nodes that will not do.
        """
        is_usable = preferred in self._free and preferred not in self._aside
        if is_usable and preferred not in avoid and could_hold(self._free[preferred], request):
            return preferred
        best: str | None = None
        least = (0.0, 0.0)
        for bucket, nodes in self._buckets.items():
            left = _left_over(dict(bucket), request)
            if left is not None and (best is None or left < least):
                node = next((one for one in nodes if one not in avoid), None)
                best, least = (best, least) if node is None else (node, left)
        return best

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
        if any(could_hold(total, request) for total in self._total.values()):
            return None
        for name, amount in request.items():
            most = max((total.get(name, 0.0) for total in self._total.values()), default=0.0)
            if amount > most + _TOLERANCE:
                return f"a trial asks for {name}={amount:g}, the most that any node has is {most:g}"
        wanted = ", ".join(f"{name}={amount:g}" for name, amount in request.items())
        return f"a trial asks for {wanted}, and no single node has all of it"

    def dumped(self) -> PlacementState:
        """All of it."""
        nodes = [(node, total, self._free[node]) for node, total in self._total.items()]
        buckets = [list(bucket) for bucket in self._buckets.values()]
        return PlacementState(nodes, buckets, self._aside)

    def take_back(self, state: PlacementState) -> None:
        """Be as it was when it was `dumped`."""
        self._total = {node: total for node, total, _ in state.nodes}
        self._free = {node: free for node, _, free in state.nodes}
        self._buckets = {
            tuple(self._free[bucket[0]].items()): dict.fromkeys(bucket) for bucket in state.buckets
        }
        self._aside = state.aside

    def _change(self, incarnation: str, request: Mapping[str, float], sign: int) -> None:
        self._out_of_bucket(incarnation)
        free = self._free[incarnation]
        for name, amount in request.items():
            if amount:
                free[name] = round(free.get(name, 0.0) + sign * amount, 9)
        self._into_bucket(incarnation)

    def _into_bucket(self, incarnation: str) -> None:
        if incarnation in self._aside:
            return
        key = tuple(self._free[incarnation].items())
        self._buckets.setdefault(key, {})[incarnation] = None

    def _out_of_bucket(self, incarnation: str) -> None:
        if incarnation in self._aside:
            return
        key = tuple(self._free[incarnation].items())
        bucket = self._buckets[key]
        del bucket[incarnation]
        if not bucket:
            del self._buckets[key]


def could_hold(resources: Mapping[str, float], request: Mapping[str, float]) -> bool:
    """Whether the resources suffice for the request."""
    return _left_over(resources, request) is not None


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
