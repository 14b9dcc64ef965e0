"""`NodeLedger`: records all nodes and who has which part; never gives more than exists."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Final

from tunemq_scheduler.core.allotments import ResourceAmounts
from tunemq_scheduler.farm.allocation.books.amounts import NOTHING, covers, minus, of_devices, total
from tunemq_scheduler.farm.allocation.books.free_room import FreeCapacity
from tunemq_scheduler.farm.allocation.books.node_parts import NodePart, SlotGrant
from tunemq_scheduler.farm.allocation.books.slot_requests import SlotRequest, amounts_of
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
        alone_for: the experiment that has the node for itself, or will once all others have left.
        version: grows with each change.
    """

    __slots__ = (
        "alone_for",
        "aside",
        "capacity",
        "free",
        "is_draining",
        "is_lost",
        "is_unknown",
        "joined",
        "not_offered",
        "parts",
        "promised",
        "total",
        "version",
        "withheld",
    )

    def __init__(self, joined: NodeJoined, whole: ResourceAmounts) -> None:
        self.joined = joined
        self.total = whole
        self.free = self.capacity = self.promised = self.not_offered = self.aside = NOTHING
        self.withheld: Mapping[str, str] = joined.withheld
        self.parts: dict[str, NodePart] = {}
        self.is_lost = False
        self.is_draining = False
        self.is_unknown = False
        self.alone_for = ""
        self.version = 0

    @property
    def state(self) -> str:
        """The state, in a word."""
        return LOST if self.is_lost else DRAINING if self.is_draining else READY

    @property
    def is_open(self) -> bool:
        """Whether any experiment may get a part of it."""
        return self.state == READY and not self.alone_for

    @property
    def whole(self) -> ResourceAmounts:
        """All that an experiment could have of it."""
        return (
            minus(self.total, of_devices(self.total, self.withheld))
            if self.withheld
            else (self.total)
        )

    def are_alike(self, one: ResourceAmounts, other: ResourceAmounts) -> bool:
        """Return whether both are equal amounts of the same kinds of devices."""
        kinds = {gpu.uuid: (gpu.model, gpu.memory) for gpu in self.joined.gpus}
        shares = [
            sorted((kinds.get(uuid, ("", 0.0)), share) for uuid, share in amounts.devices.items())
            for amounts in (one, other)
        ]
        return one.resources == other.resources and shares[0] == shares[1]


class NodeLedger:
    """The nodes and their parts.

    Attributes:
        grown: counts how often more became free than before.
    """

    def __init__(self) -> None:
        self.nodes: dict[str, LedgerNode] = {}
        self.grown = 0
        self.capacity = FreeCapacity()
        self._stale: dict[NodePart, None] = {}
        #: Parts of nodes that have not joined yet; experiments knew them before this supervisor
        #: started.
        self._early: dict[str, dict[str, NodePart]] = {}
        #: The last offer's number of deleted parts, by experiment and node instance.
        self._numbers: dict[str, dict[str, int]] = {}

    # --- nodes ------------------------------------------------------------------------------------

    def add_node(self, joined: NodeJoined) -> None:
        """Add a node."""
        whole = self.capacity.add_node(joined)
        node = self.nodes[joined.instance_id] = LedgerNode(joined, whole)
        node.parts = self._early.pop(joined.instance_id, {})
        self.grown += 1
        self.refresh(joined.instance_id)

    def remove_node(self, instance_id: str) -> None:
        """Remove a node that is gone for good."""
        self._early.pop(instance_id, None)
        for numbers in self._numbers.values():
            numbers.pop(instance_id, None)
        node = self.nodes.pop(instance_id, None)
        if node is not None:
            self.capacity.remove_node(instance_id)
            for part in node.parts.values():
                self._stale.pop(part, None)

    def withhold(self, instance_id: str, devices: Mapping[str, str]) -> None:
        """Withhold these devices; all others may be given again."""
        self.nodes[instance_id].withheld = devices
        self.capacity.withhold(instance_id, devices)
        self.refresh(instance_id)

    def refresh(self, instance_id: str) -> None:
        """Recompute the free part after a change of a node or its parts."""
        node = self.nodes.get(instance_id)
        if node is None:
            return
        node.version += 1
        parts = node.parts.values()
        node.is_unknown = any(part.is_unknown for part in parts)
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
        self.capacity.set_free(instance_id, node.capacity)

    def promise(self, instance_id: str, promised: ResourceAmounts) -> None:
        """Reserve a part of a node for claims."""
        if instance_id in self.nodes:
            self.nodes[instance_id].promised = promised
            self.refresh(instance_id)

    # --- parts ------------------------------------------------------------------------------------

    def part(self, experiment: str, instance_id: str) -> NodePart:
        """Return an experiment's part of a node; creates it if needed."""
        node = self.nodes.get(instance_id)
        parts = node.parts if node else self._early.setdefault(instance_id, {})
        if experiment not in parts:
            n = self._numbers.get(experiment, {}).get(instance_id, 0)
            parts[experiment] = NodePart(experiment, instance_id, n)
        return parts[experiment]

    def last_offer(self, experiment: str, instance_id: str) -> int:
        """Return the number of the last offer of a node that was sent to an experiment."""
        part = self.nodes[instance_id].parts.get(experiment)
        known = self._numbers.get(experiment, {}).get(instance_id, 0)
        return part.n if part is not None else known

    def grant(
        self, part: NodePart, request: SlotRequest, devices: dict[str, float], at: float
    ) -> SlotGrant:
        """Offer a slot for one trial."""
        grant = part.add(request, amounts_of(request, devices), at)
        self.changed(part)
        return grant

    def grant_whole(self, part: NodePart, request: SlotRequest, at: float) -> SlotGrant:
        """Offer a whole node."""
        grant = part.add(request, self.nodes[part.instance_id].whole, at)
        self.changed(part)
        return grant

    def keep_for(self, instance_id: str, experiment: str) -> None:
        """Reserve a node for one experiment; an empty name ends that."""
        self.nodes[instance_id].alone_for = experiment
        self.refresh(instance_id)

    def remove(self, grant: SlotGrant, grace_s: float | None = None) -> None:
        """Withdraw a slot; with a grace, preempt the trial in it."""
        grant.part.remove(grant, grace_s)
        self.changed(grant.part)

    def hurry(self, part: NodePart, grace_s: float) -> None:
        """Preempt the trials in withdrawn slots."""
        part.hurry(grace_s)
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
        sendable = [part for part in self._stale if self._is_heard(part)]
        for part in sendable:
            del self._stale[part]
        return sorted(sendable, key=lambda part: not part.leaving)

    def totals(self) -> dict[str, float]:
        """Return the total resources of all nodes that are not lost."""
        sums: dict[str, float] = {}
        for node in self.nodes.values():
            if not node.is_lost:
                for name, amount in node.total.resources.items():
                    sums[name] = sums.get(name, 0.0) + amount
        return sums

    # --- helpers ----------------------------------------------------------------------------------

    def _is_heard(self, part: NodePart) -> bool:
        node = self.nodes.get(part.instance_id)
        return node is not None and not node.is_lost

    def _drop(self, part: NodePart) -> None:
        self._stale.pop(part, None)
        node = self.nodes.get(part.instance_id)
        parts = node.parts if node else self._early.get(part.instance_id, {})
        if parts.get(part.experiment) is part:
            del parts[part.experiment]
            self._numbers.setdefault(part.experiment, {})[part.instance_id] = part.n
