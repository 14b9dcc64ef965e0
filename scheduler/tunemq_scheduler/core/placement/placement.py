"""Choice of a node for a trial: best fit, no oversubscription, fractions on a single GPU."""

from __future__ import annotations

from collections.abc import Container, Iterable, Mapping, Sequence
from typing import Final, NamedTuple

import msgspec

from tunemq_scheduler.core.placement.placement_node import PlacementNode
from tunemq_scheduler.core.placement.placement_reasons import why_never, why_not_now
from tunemq_scheduler.core.placement.resource_request import (
    TOLERANCE,
    DeviceShare,
    ResourceRequest,
    choose,
    needs_of,
)
from tunemq_scheduler.core.shared_amounts import ResourceAmounts
from tunemq_shared.base.errors import InvariantBroken
from tunemq_shared.protocol.messages import Gpu, NodeJoined

#: A request in canonical form: sorted by name.
_Request = tuple[tuple[str, float], ...]
_Key = tuple[tuple[tuple[str, float], ...], tuple[DeviceShare, ...]]
#: A measure of what a node would have left; smaller is better.
_Left = tuple[bool, float, float, float, float]

_NOTHING: Final = ResourceAmounts()


class PlacementNodeState(msgspec.Struct, array_like=True):
    """A `PlacementNode` in serialized form; see there for the fields."""

    total: dict[str, float]
    free: dict[str, float]
    gpus: tuple[Gpu, ...]
    shares: dict[str, float]
    offered: ResourceAmounts | None
    withheld: dict[str, str]


class PlacementState(msgspec.Struct, array_like=True):
    """A `Placement` in serialized form: the nodes and the buckets.

    The order of both matters: of several equal nodes the first is chosen.
    """

    nodes: dict[str, PlacementNodeState]
    buckets: list[list[str]]
    aside: frozenset[str]
    reserved: list[tuple[str, _Request]]


class _Bucket(NamedTuple):
    """Nodes with equal free resources."""

    free: dict[str, float]
    devices: tuple[DeviceShare, ...]
    nodes: dict[str, None]


class Placement:
    """The nodes' resources, their use, and the choice of a node.

    Nodes with the same free resources share a bucket, so that a choice costs one comparison per
    different free amount, not one per node. Nodes are in no bucket while they are set aside,
    reserved for one request (`reserve`), or use more than their offer.
    """

    def __init__(self) -> None:
        self._nodes: dict[str, PlacementNode] = {}
        self._buckets: dict[_Key, _Bucket] = {}
        self._in_bucket: dict[str, _Key] = {}
        self._aside: frozenset[str] = frozenset()
        #: The reservations by node, and by request.
        self._reserved: dict[str, _Request] = {}
        self._reserves: dict[_Request, str] = {}
        #: Whether any empty node could hold a request; a cache for queries of each turn.
        self._could_hold: dict[_Request, bool] = {}
        #: The nodes that changed since `touched` was called.
        self._touched: dict[str, None] = {}

    def __contains__(self, instance_id: str) -> bool:
        return instance_id in self._nodes

    @property
    def total(self) -> dict[str, float]:
        """All nodes' resources together, except withheld devices that no trial holds."""
        return _sums(node.there() for node in self._nodes.values())

    @property
    def free(self) -> dict[str, float]:
        """The part of `total` that is not held; on shared nodes others may hold some of it."""
        return _sums(node.not_held() for node in self._nodes.values())

    # --- nodes ------------------------------------------------------------------------------------

    def add_node(
        self, instance_id: str, resources: Mapping[str, float], gpus: Sequence[Gpu] = ()
    ) -> None:
        """Add a node and its resources; GPUs that it does not list are numbered."""
        self._nodes[instance_id] = PlacementNode(resources, gpus)
        self._could_hold.clear()
        self._into_bucket(instance_id)

    def remove_node(self, instance_id: str) -> None:
        """Remove a node and all that is held of it."""
        self._unreserve_node(instance_id)
        self._out_of_bucket(instance_id)
        self._touched[instance_id] = None
        self._could_hold.clear()
        del self._nodes[instance_id]
        self._aside -= {instance_id}

    def offer(self, instance_id: str, amounts: ResourceAmounts) -> None:
        """Limit from now on what may be held of a node that other experiments share.

        While more is held than is offered, nothing is placed there.
        """
        self._out_of_bucket(instance_id)
        self._nodes[instance_id].offer(amounts)
        self._into_bucket(instance_id)
        self._review_reserved(instance_id)

    def withhold(self, instance_id: str, devices: Mapping[str, str]) -> None:
        """Place nothing new on these GPUs of a node, for the given reasons.

        All others become available again; a trial that holds a withheld GPU keeps it.
        """
        self._out_of_bucket(instance_id)
        self._nodes[instance_id].withhold(devices)
        self._into_bucket(instance_id)
        self._review_reserved(instance_id)

    def set_aside(self, instance_ids: Iterable[str]) -> None:
        """Place nothing on these nodes from now on; all others become available."""
        aside = frozenset(instance_ids)
        if aside == self._aside:
            return
        changed = [one for one in self._nodes if (one in aside) != (one in self._aside)]
        for instance_id in changed:
            self._unreserve_node(instance_id)
            self._out_of_bucket(instance_id)
        self._aside = aside
        for instance_id in changed:
            self._into_bucket(instance_id)

    # --- requests ---------------------------------------------------------------------------------

    def fit(
        self, request: Mapping[str, float], preferred: str = "", avoid: Container[str] = ()
    ) -> str | None:
        """Return a node that has enough free now, or None.

        Args:
            request: amounts by resource name.
            preferred: the node to use if it has room; otherwise the best fit wins.
            avoid: nodes that must not be used.
        """
        needs = needs_of(request)
        is_usable = preferred in self._in_bucket and preferred not in avoid
        if is_usable and self._nodes[preferred].can_hold(needs):
            return preferred
        if self._reserves:
            kept = self._reserves.get(_in_one_form(request))
            if kept is not None and kept not in avoid and self._nodes[kept].can_hold(needs):
                return kept
        best: str | None = None
        least: _Left | None = None
        for bucket in self._buckets.values():
            left = _left_over(bucket.free, bucket.devices, needs)
            if left is not None and (least is None or left < least):
                node = next((one for one in bucket.nodes if one not in avoid), None)
                if node is not None:
                    best, least = node, left
        return best

    def can_hold(self, instance_id: str, request: Mapping[str, float]) -> bool:
        """Whether a node has enough free now, set aside or not."""
        return self._nodes[instance_id].can_hold(needs_of(request))

    def is_whole(self, instance_id: str) -> bool:
        """Whether all of a node except its withheld GPUs is available."""
        return self._nodes[instance_id].is_whole()

    def take(self, instance_id: str, request: Mapping[str, float]) -> dict[str, float]:
        """Allocate a request on a node; return the GPUs and the share of each.

        Raises:
            InvariantBroken: the node has not enough.
        """
        node, needs = self._nodes[instance_id], needs_of(request)
        devices = node.devices_for(needs) if node.has_amounts(needs) else None
        if devices is None:
            raise _too_much(instance_id, node, request)
        self._change(instance_id, needs, devices, -1)
        return devices

    def hold(
        self, instance_id: str, request: Mapping[str, float], devices: Mapping[str, float]
    ) -> None:
        """Allocate an existing slot regardless of offers and reservations.

        Raises:
            InvariantBroken: the node's total resources do not suffice.
        """
        node, needs = self._nodes[instance_id], needs_of(request)
        if not node.has_in_all(needs, devices):
            raise _too_much(instance_id, node, request)
        self._change(instance_id, needs, devices, -1)

    def give_back(
        self, instance_id: str, request: Mapping[str, float], devices: Mapping[str, float]
    ) -> None:
        """Free a request's resources; does nothing if the node is gone."""
        if instance_id in self._nodes:
            self._change(instance_id, needs_of(request), devices, +1)

    # --- keeping a node for one request -----------------------------------------------------------

    def reserve(self, request: Mapping[str, float], avoid: Container[str] = ()) -> str | None:
        """Reserve a node for this request, until `unreserve`; return it.

        It is the node that must free the least first. None if no available node could ever hold the
        request. The search looks at every node.
        """
        needs = needs_of(request)
        best: str | None = None
        least = float("inf")
        for instance_id, node in self._nodes.items():
            if instance_id in self._in_bucket and instance_id not in avoid:
                missing = node.missing(needs)
                if missing < least:
                    best, least = instance_id, missing
        if best is not None:
            self._out_of_bucket(best)
            form = _in_one_form(request)
            self._reserved[best], self._reserves[form] = form, best
        return best

    def unreserve(self, request: Mapping[str, float]) -> None:
        """Remove the reservation of a request, if there is one."""
        if self._reserves and (node := self._reserves.get(_in_one_form(request))) is not None:
            self._unreserve_node(node)

    @property
    def reserved(self) -> list[tuple[str, _Request]]:
        """The reserved nodes, each with its request."""
        return list(self._reserved.items())

    def is_reserved_for(self, request: Mapping[str, float]) -> bool:
        """Whether a node is reserved for this request."""
        return bool(self._reserves) and _in_one_form(request) in self._reserves

    # --- held resources ---------------------------------------------------------------------------

    def held(self, instance_id: str) -> ResourceAmounts:
        """Return the amounts held of a node."""
        return self._nodes[instance_id].held()

    def excess(self, instance_id: str) -> ResourceAmounts:
        """Return the amounts held of a node beyond its offer."""
        return self._nodes[instance_id].excess()

    def touched(self) -> list[str]:
        """Return the nodes that came, went or changed since the previous call."""
        nodes = list(self._touched)
        self._touched.clear()
        return nodes

    # --- explanations -----------------------------------------------------------------------------

    def could_hold(self, request: Mapping[str, float]) -> bool:
        """Whether any node, if empty, could hold the request."""
        form = _in_one_form(request)
        if form not in self._could_hold:
            self._could_hold[form] = self.why_never(request) is None
        return self._could_hold[form]

    def capacity(self, request: Mapping[str, float]) -> int:
        """Return how many such requests all nodes could hold if empty and fully offered."""
        needs = needs_of(request)
        return sum(node.capacity(needs) for node in self._nodes.values())

    def why_never(self, request: Mapping[str, float]) -> str | None:
        """Explain why no node could hold the request even if empty; None if one could."""
        return why_never(self._nodes.values(), request)

    def why_not_now(self, request: Mapping[str, float]) -> str | None:
        """Explain why no node can take the request now; None if one can."""
        if self.fit(request) is not None:
            return None
        usable = [self._nodes[one] for one in self._in_bucket]
        return why_not_now(self._nodes.values(), usable, request)

    def withheld_from(self, request: Mapping[str, float]) -> list[tuple[str, str, str]]:
        """Return the GPUs that would fit a request but are withheld: node, UUID and reason."""
        needs = needs_of(request)
        return [
            (instance_id, uuid, why)
            for instance_id, node in self._nodes.items()
            if node.withheld
            for uuid, why in node.withheld_from(needs).items()
        ]

    # --- serialization ----------------------------------------------------------------------------

    def dumped(self) -> PlacementState:
        """Return the whole state."""
        nodes = {
            name: PlacementNodeState(
                node.total, node.free, node.gpus, node.shares, node.offered, node.withheld
            )
            for name, node in self._nodes.items()
        }
        buckets = [list(bucket.nodes) for bucket in self._buckets.values()]
        return PlacementState(nodes, buckets, self._aside, self.reserved)

    def take_back(self, state: PlacementState) -> None:
        """Restore the state that `dumped` returned."""
        for name, known in state.nodes.items():
            node = self._nodes[name] = PlacementNode(known.total, known.gpus)
            if known.offered is not None:
                node.offer(known.offered)
            node.withhold(known.withheld)
            node.take_back(known.free, known.shares)
            self._touched[name] = None
        self._could_hold.clear()
        self._aside = state.aside
        self._reserved = dict(state.reserved)
        self._reserves = {request: node for node, request in state.reserved}
        for bucket in state.buckets:
            for name in bucket:
                self._into_bucket(name)

    # --- small things -----------------------------------------------------------------------------

    def _change(
        self, instance_id: str, needs: ResourceRequest, devices: Mapping[str, float], sign: int
    ) -> None:
        self._out_of_bucket(instance_id)
        self._nodes[instance_id].change(needs, devices, sign)
        self._into_bucket(instance_id)

    def _into_bucket(self, instance_id: str) -> None:
        self._touched[instance_id] = None
        node = self._nodes[instance_id]
        if instance_id in self._aside or instance_id in self._reserved:
            return
        if node.offered is not None and not node.is_open():
            return
        key = node.key()
        bucket = self._buckets.get(key)
        if bucket is None:
            bucket = self._buckets[key] = _Bucket(dict(key[0]), key[1], {})
        bucket.nodes[instance_id] = None
        self._in_bucket[instance_id] = key

    def _out_of_bucket(self, instance_id: str) -> None:
        key = self._in_bucket.pop(instance_id, None)
        if key is not None:
            bucket = self._buckets[key]
            del bucket.nodes[instance_id]
            if not bucket.nodes:
                del self._buckets[key]

    def _review_reserved(self, instance_id: str) -> None:
        """Remove a node's reservation for a request that it cannot hold any more."""
        request = self._reserved.get(instance_id)
        if request is not None and not self._nodes[instance_id].may_ever_hold(
            needs_of(dict(request))
        ):
            self._unreserve_node(instance_id)

    def _unreserve_node(self, instance_id: str) -> None:
        request = self._reserved.pop(instance_id, None)
        if request is not None:
            del self._reserves[request]
            self._into_bucket(instance_id)


def could_hold(joined: NodeJoined, request: Mapping[str, float]) -> bool:
    """Whether a node, if empty and with nothing withheld, could hold the request."""
    return PlacementNode(joined.resources, joined.gpus).could_hold(needs_of(request))


def holds_when_empty(joined: NodeJoined, request: Mapping[str, float]) -> bool:
    """Whether a node, if empty, could hold the request without its withheld GPUs."""
    node = PlacementNode(joined.resources, joined.gpus)
    node.withhold(joined.withheld)
    return node.can_hold(needs_of(request))


def _left_over(
    free: Mapping[str, float], devices: Sequence[DeviceShare], needs: ResourceRequest
) -> _Left | None:
    """Measure what would be left, scarce resources such as GPUs first; None if it does not fit.

    A node with GPUs comes last for a trial that uses none. Then the order is by what would be left
    of a shared device, of all scarce resources, by the memory of the chosen devices, and by the
    CPUs left.
    """
    amounts = needs.amounts
    for name, amount in amounts.items():
        if amount > free.get(name, 0.0) + TOLERANCE:
            return None
    of_device = taken = memory = 0.0
    if needs.names_device:
        chosen = choose(devices, needs)
        if chosen is None:
            return None
        for place, share in chosen.items():
            of_device = devices[place].share - share
            taken += share
            memory = max(memory, devices[place].memory)
    scarce = cpus = 0.0
    for name, amount in free.items():
        if name == "cpu":
            cpus = amount - amounts.get(name, 0.0)
        elif name != "memory":
            scarce += amount - amounts.get(name, 0.0)
    return bool(devices) and not needs.names_device, of_device, scarce - taken, memory, cpus


def _too_much(
    instance_id: str, node: PlacementNode, request: Mapping[str, float]
) -> InvariantBroken:
    return InvariantBroken(
        f"node {instance_id} has {node.free} free ({node.shares} of its GPUs), {dict(request)} was "
        "placed on it"
    )


def _in_one_form(request: Mapping[str, float]) -> _Request:
    return tuple(sorted(request.items()))


def _sums(nodes: Iterable[Mapping[str, float]]) -> dict[str, float]:
    sums: dict[str, float] = {}
    for resources in nodes:
        for name, amount in resources.items():
            sums[name] = round(sums.get(name, 0.0) + amount, 9)
    return sums
