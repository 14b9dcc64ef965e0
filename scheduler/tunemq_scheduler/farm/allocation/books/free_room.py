"""`FreeCapacity`: finds the best node for a request, and the GPUs there."""

from __future__ import annotations

from collections.abc import Container, Mapping

from tunemq_scheduler.core.allotments import ResourceAmounts
from tunemq_scheduler.core.placement.placement import Placement
from tunemq_scheduler.core.placement.placement_node import PlacementNode
from tunemq_scheduler.core.placement.resource_request import (
    TOLERANCE,
    WITHHELD,
    DeviceShare,
    choose,
    needs_of,
)
from tunemq_scheduler.farm.allocation.books.amounts import NOTHING
from tunemq_scheduler.farm.allocation.books.slot_requests import SlotRequest, amounts_of
from tunemq_shared.protocol.messages import NodeJoined


class FreeCapacity:
    """The free part of each node; `Placement` chooses, and the ledger keeps the accounts.

    So nothing is ever taken from the placement: the ledger sets the free part after each change.
    """

    def __init__(self) -> None:
        self._placement = Placement()
        self._nodes: dict[str, PlacementNode] = {}
        self._estimates: dict[SlotRequest, ResourceAmounts | None] = {}

    def add_node(self, joined: NodeJoined) -> ResourceAmounts:
        """Add a node, with nothing free yet; return its total resources."""
        self._placement.add_node(joined.instance_id, joined.resources, joined.gpus)
        self._placement.offer(joined.instance_id, NOTHING)
        node = self._nodes[joined.instance_id] = PlacementNode(joined.resources, joined.gpus)
        self.withhold(joined.instance_id, joined.withheld)
        self._estimates.clear()
        whole = {name: amount for name, amount in node.total.items() if amount > 0}
        return ResourceAmounts(whole, dict(node.shares))

    def remove_node(self, instance_id: str) -> None:
        """Remove a node."""
        self._placement.remove_node(instance_id)
        del self._nodes[instance_id]
        self._estimates.clear()

    def withhold(self, instance_id: str, devices: Mapping[str, str]) -> None:
        """Withhold these GPUs, for these reasons; all others may be given again."""
        self._placement.withhold(instance_id, devices)
        self._nodes[instance_id].withhold(devices)

    def set_free(self, instance_id: str, free: ResourceAmounts) -> None:
        """Set the free part of a node."""
        self._placement.offer(instance_id, free)

    def fit(
        self, request: Mapping[str, float], preferred: str = "", avoid: Container[str] = ()
    ) -> str | None:
        """Return the node that a request fits best; None if there is none."""
        return self._placement.fit(request, preferred, avoid)

    def devices(
        self, instance_id: str, request: Mapping[str, float], free: ResourceAmounts
    ) -> dict[str, float] | None:
        """Return the GPUs for a request on a node with this free part; None if it is too small.

        None of these GPUs is withheld.
        """
        withheld = self._nodes[instance_id].withheld
        if withheld:
            shares = {**free.devices, **dict.fromkeys(withheld, WITHHELD)}
            free = ResourceAmounts(free.resources, shares)
        return self._devices(instance_id, request, free)

    def could_hold(self, instance_id: str, request: Mapping[str, float]) -> bool:
        """Return whether a node, if empty, could hold a request."""
        return self._nodes[instance_id].could_hold(needs_of(request))

    def estimate(self, request: SlotRequest) -> ResourceAmounts | None:
        """Return what a request takes on a node that could hold it; None if no node ever could."""
        if request not in self._estimates:
            self._estimates[request] = self._estimated(request)
        return self._estimates[request]

    def why_never(self, request: Mapping[str, float]) -> str | None:
        """Return why no node could hold a request, even if empty."""
        return self._placement.why_never(request)

    def why_not_now(self, request: Mapping[str, float]) -> str | None:
        """Return why no node can take a request now."""
        return self._placement.why_not_now(request)

    def withheld_from(self, request: Mapping[str, float]) -> list[tuple[str, str, str]]:
        """Return the withheld GPUs that would suit a request: node, UUID, and reason."""
        return self._placement.withheld_from(request)

    def _devices(
        self, instance_id: str, request: Mapping[str, float], free: ResourceAmounts
    ) -> dict[str, float] | None:
        needs = needs_of(request)
        for name, amount in needs.amounts.items():
            if amount > free.resources.get(name, 0.0) + TOLERANCE:
                return None
        if not needs.names_device:
            return {}
        devices = zip(self._nodes[instance_id].shares, self._all(instance_id), strict=True)
        named = [(uuid, one._replace(share=free.devices.get(uuid, 0.0))) for uuid, one in devices]
        chosen = choose([one for _, one in named], needs)
        return chosen if chosen is None else {named[at][0]: one for at, one in chosen.items()}

    def _estimated(self, request: SlotRequest) -> ResourceAmounts | None:
        asked = dict(request)
        for instance_id, node in self._nodes.items():
            devices = self._devices(instance_id, asked, ResourceAmounts(node.total, node.shares))
            if devices is not None:
                return amounts_of(request, devices)
        return None

    def _all(self, instance_id: str) -> list[DeviceShare]:
        return self._nodes[instance_id].all_devices()
