"""`NodeLedger`: records all nodes and who has which part; never gives more than exists."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Final

from tunemq_scheduler.core.placement.placement import Placement
from tunemq_scheduler.core.placement.placement_node import PlacementNode
from tunemq_scheduler.core.placement.resource_request import WITHHELD, choose, needs_of
from tunemq_scheduler.core.shared_amounts import ResourceAmounts
from tunemq_scheduler.farm.allocation.amounts import (
    MOST_REQUESTS,
    NOTHING,
    SlotRequest,
    amounts_of,
    covers,
    covers_resources,
    minus,
    of_devices,
    total,
)
from tunemq_scheduler.farm.allocation.node_grants import NodePart, SlotGrant
from tunemq_shared.protocol.messages import NodeJoined

#: A node's states; only ready nodes are offered.
READY: Final = "ready"
LOST: Final = "lost"
DRAINING: Final = "draining"


class LedgerNode:
    """A node instance.

    Attributes:
        parts: by experiment; those of a lost node are kept unchanged.
        free: the part that certainly no experiment holds; ``promised`` is reserved for claims, and
            ``capacity`` may be given to any experiment.
        not_offered: the free part once all leaving trials have ended.
        aside: the part of ``withheld`` devices that no experiment holds (withheld has the reasons).
        is_unknown: whether an experiment may hold any part of it.
        is_ending: whether it was told to end.
        alone_for: the experiment that has the node for itself, or will once all others have left.
        version: grows with each change.
    """

    def __init__(self, joined: NodeJoined) -> None:
        self.joined = joined
        #: The node without any trial, which says what it could hold.
        self.empty = PlacementNode(joined.resources, joined.gpus)
        self.total = ResourceAmounts(
            {name: amount for name, amount in self.empty.total.items() if amount > 0},
            dict(self.empty.shares),
        )
        self.free = self.capacity = self.promised = self.not_offered = self.aside = NOTHING
        self.withheld: Mapping[str, str] = {}
        self.parts: dict[str, NodePart] = {}
        self.is_lost = self.is_draining = self.is_unknown = False
        self.is_ending = joined.is_ending
        self.alone_for = ""
        self.version = 0

    @property
    def state(self) -> str:
        """The state, in a word."""
        if self.is_lost:
            return LOST
        return DRAINING if self.is_draining or self.is_ending else READY

    @property
    def is_open(self) -> bool:
        """Whether any experiment may get a part of it."""
        return self.state == READY and not self.alone_for

    @property
    def whole(self) -> ResourceAmounts:
        """All that an experiment could have of it."""
        return minus(self.total, of_devices(self.total, self.withheld))

    def are_alike(self, one: ResourceAmounts, other: ResourceAmounts) -> bool:
        """Return whether both are equal amounts of the same kinds of devices."""
        kinds = {gpu.uuid: (gpu.model, gpu.memory) for gpu in self.joined.gpus}
        shares = [
            sorted((kinds.get(uuid, ("", 0.0)), share) for uuid, share in amounts.devices.items())
            for amounts in (one, other)
        ]
        return one.resources == other.resources and shares[0] == shares[1]

    def could_hold(self, request: Mapping[str, float]) -> bool:
        """Return whether the node, if empty, could hold a request."""
        return self.empty.could_hold(needs_of(request))

    def devices(
        self, request: Mapping[str, float], free: ResourceAmounts
    ) -> dict[str, float] | None:
        """Return the GPUs for a request in this free part; None if it is too small.

        None of these GPUs is withheld.
        """
        return self._devices(request, free, dict.fromkeys(self.withheld, WITHHELD))

    def estimate(self, request: SlotRequest) -> ResourceAmounts | None:
        """Return what a request takes of the empty node; None if it is too large."""
        devices = self._devices(
            dict(request), ResourceAmounts(self.empty.total, self.empty.shares), {}
        )
        return None if devices is None else amounts_of(request, devices)

    def _devices(
        self, request: Mapping[str, float], free: ResourceAmounts, withheld: Mapping[str, float]
    ) -> dict[str, float] | None:
        needs = needs_of(request)
        if not covers_resources(free.resources, needs.amounts):
            return None
        if not needs.names_device:
            return {}
        shares = {**free.devices, **withheld}
        devices = zip(self.empty.shares, self.empty.all_devices(), strict=True)
        named = [(uuid, one._replace(share=shares.get(uuid, 0.0))) for uuid, one in devices]
        chosen = choose([one for _, one in named], needs)
        return chosen if chosen is None else {named[at][0]: one for at, one in chosen.items()}


class NodeLedger:
    """The nodes and their parts.

    Attributes:
        grown: counts how often more became free than before.
        placement: finds the node that a request fits best. Nothing is ever taken from it: the
            ledger sets each node's free part after each change.
    """

    def __init__(self) -> None:
        self.nodes: dict[str, LedgerNode] = {}
        self.grown = 0
        self.placement = Placement()
        self._estimates: dict[SlotRequest, ResourceAmounts | None] = {}
        self._stale: dict[NodePart, None] = {}
        #: Parts of nodes that have not joined yet; experiments knew them before this supervisor
        #: started.
        self._early: dict[str, dict[str, NodePart]] = {}
        #: The last offer's number of deleted parts, by experiment and node instance.
        self._numbers: dict[str, dict[str, int]] = {}

    # --- nodes ------------------------------------------------------------------------------------

    def add_node(self, joined: NodeJoined) -> None:
        """Add a node."""
        instance_id = joined.instance_id
        self.placement.add_node(instance_id, joined.resources, joined.gpus)
        self._estimates.clear()
        node = self.nodes[instance_id] = LedgerNode(joined)
        node.parts = self._early.pop(instance_id, {})
        self.grown += 1
        self.withhold(instance_id, joined.withheld)

    def remove_node(self, instance_id: str) -> None:
        """Remove a node that is gone for good."""
        for numbers in self._numbers.values():
            numbers.pop(instance_id, None)
        self.placement.remove_node(instance_id)
        self._estimates.clear()
        for part in self.nodes.pop(instance_id).parts.values():
            self._stale.pop(part, None)

    def withhold(self, instance_id: str, devices: Mapping[str, str]) -> None:
        """Withhold these devices; all others may be given again."""
        node = self.nodes[instance_id]
        node.withheld = devices
        node.empty.withhold(devices)
        self.placement.withhold(instance_id, devices)
        self.refresh(instance_id)

    def refresh(self, instance_id: str) -> None:
        """Recompute the free part after a change of a node or its parts."""
        node = self.nodes.get(instance_id)
        if node is None:
            return
        node.version += 1
        parts = node.parts.values()
        node.is_unknown = any(part.unknown_until for part in parts)
        taken = total(part.taken for part in parts)
        node.free = NOTHING if node.is_unknown else minus(node.total, taken)
        node.not_offered = minus(node.total, total(part.offer for part in parts))
        if node.withheld or node.aside is not NOTHING:
            node.aside = of_devices(node.free, node.withheld)
            node.free = minus(node.free, node.aside)
            node.not_offered = minus(node.not_offered, of_devices(node.not_offered, node.withheld))
        before = node.capacity
        node.capacity = minus(node.free, node.promised) if node.is_open else NOTHING
        if not covers(before, node.capacity):
            self.grown += 1
        self.placement.offer(instance_id, node.capacity)

    def promise(self, instance_id: str, promised: ResourceAmounts) -> None:
        """Reserve a part of a node for claims."""
        if instance_id in self.nodes:
            self.nodes[instance_id].promised = promised
            self.refresh(instance_id)

    def keep_for(self, instance_id: str, experiment: str) -> None:
        """Reserve a node for one experiment; an empty name ends that."""
        self.nodes[instance_id].alone_for = experiment
        self.refresh(instance_id)

    def estimate(self, request: SlotRequest) -> ResourceAmounts | None:
        """Return what a request takes on a node that could hold it; None if no node ever could."""
        if request not in self._estimates:
            if len(self._estimates) >= MOST_REQUESTS:  # a search may name others each time
                self._estimates.clear()
            found = (node.estimate(request) for node in self.nodes.values())
            self._estimates[request] = next((one for one in found if one is not None), None)
        return self._estimates[request]

    def totals(self) -> dict[str, float]:
        """Return the total resources of all nodes that are not lost."""
        sums: dict[str, float] = {}
        for node in self.nodes.values():
            if not node.is_lost:
                for name, amount in node.total.resources.items():
                    sums[name] = sums.get(name, 0.0) + amount
        return sums

    # --- parts ------------------------------------------------------------------------------------

    def part(self, experiment: str, instance_id: str) -> NodePart:
        """Return an experiment's part of a node; creates it if needed."""
        parts = self._parts(instance_id)
        if experiment not in parts:
            n = self._numbers.get(experiment, {}).get(instance_id, 0)
            parts[experiment] = NodePart(experiment, instance_id, n)
        return parts[experiment]

    def last_offer(self, experiment: str, instance_id: str) -> int:
        """Return the number of the last offer of a node that was sent to an experiment."""
        part = self.nodes[instance_id].parts.get(experiment)
        known = self._numbers.get(experiment, {}).get(instance_id, 0)
        return part.n if part is not None else known

    def remove(self, grant: SlotGrant, grace_s: float | None = None) -> None:
        """Withdraw a slot; with a grace, preempt the trial in it."""
        grant.part.remove(grant, grace_s)
        self.changed(grant.part)

    def hurry(self, part: NodePart, grace_s: float) -> None:
        """Preempt the trials in withdrawn slots."""
        part.hurry(grace_s)
        self.changed(part)

    def say_again(self, part: NodePart) -> None:
        """Send the last offer again, because it may have been lost."""
        part.is_stale = True
        self.changed(part)

    def changed(self, part: NodePart) -> None:
        """Update the node and the pending offers after a change of a part."""
        if part.is_stale:
            self._stale[part] = None
        elif part.is_over:
            self._drop(part)
        self.refresh(part.instance_id)

    def forget(self, part: NodePart) -> None:
        """Remove a part whose experiment holds nothing of the node any more."""
        self._drop(part)
        self.refresh(part.instance_id)

    def forget_numbers(self, experiment: str) -> None:
        """Remove an ended experiment's offer numbers."""
        self._numbers.pop(experiment, None)

    def take_stale(self) -> list[NodePart]:
        """Return the parts with an offer to send, lowered ones first."""
        sendable = [part for part in self._stale if self.counts(part)]
        for part in sendable:
            del self._stale[part]
        return sorted(sendable, key=lambda part: not part.leaving)

    def counts(self, part: NodePart) -> bool:
        """Return whether the part's node is there and not lost."""
        node = self.nodes.get(part.instance_id)
        return node is not None and not node.is_lost

    # --- helpers ----------------------------------------------------------------------------------

    def _parts(self, instance_id: str) -> dict[str, NodePart]:
        node = self.nodes.get(instance_id)
        return node.parts if node else self._early.setdefault(instance_id, {})

    def _drop(self, part: NodePart) -> None:
        self._stale.pop(part, None)
        parts = self._parts(part.instance_id)
        if parts.get(part.experiment) is part:
            del parts[part.experiment]
            self._numbers.setdefault(part.experiment, {})[part.instance_id] = part.n
