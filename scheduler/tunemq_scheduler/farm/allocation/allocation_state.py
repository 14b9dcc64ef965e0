"""`AllocationState`: nodes, experiments and claims, and changes that concern several of them."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Final

from tunemq_scheduler.core.shared_amounts import ResourceAmounts
from tunemq_scheduler.farm.allocation.amounts import SlotRequest, total
from tunemq_scheduler.farm.allocation.ledger import NodeLedger
from tunemq_scheduler.farm.allocation.members import FairShareSettings, ShareMember, ShareMembers
from tunemq_scheduler.farm.allocation.node_grants import NodePart, SlotGrant

#: Why a slot is cleared: for a higher priority; for an owner's share; for an equal share among an
#: owner's experiments; because the request is larger than slots that become free.
PRIORITY: Final = "priority"
SHARE: Final = "share"
TURN: Final = "turn"
SIZE: Final = "size"


@dataclass(eq=False, slots=True)
class SlotClaim:
    """A slot that is being cleared for one experiment and reserved for it.

    Attributes:
        amounts: the resources that it will have, with the GPUs.
        givers: the parts that have to release something for it.
        looked_at: the node's version at which the slot was found not clear, but still possible.
    """

    member: ShareMember
    request: SlotRequest
    instance_id: str
    amounts: ResourceAmounts
    kind: str
    at: float
    givers: dict[NodePart, None] = field(default_factory=dict)
    looked_at: int = -1


class AllocationState:
    """What the parts of an allocator share.

    Attributes:
        grace_s: how long preempted trials get to save; None if the farm does not preempt.
        claims: all open claims, the oldest first.
    """

    def __init__(self, settings: FairShareSettings) -> None:
        self.grace_s = settings.grace_s
        self.ledger = NodeLedger()
        self.members = ShareMembers(settings, self.ledger.estimate)
        self.claims: dict[SlotClaim, None] = {}
        self._claims_on: dict[str, dict[SlotClaim, None]] = {}

    @property
    def now(self) -> float:
        """The time."""
        return self.members.now

    # --- slots ------------------------------------------------------------------------------------

    def book(self, part: NodePart) -> None:
        """Update the sums and demands after a change of a part."""
        self.members.book_part(part, counts=self.ledger.counts(part))
        self.members.review(self.members.of(part))

    def part(self, member: ShareMember, instance_id: str) -> NodePart:
        """Return an experiment's part of a node; creates it if needed."""
        part = member.parts[instance_id] = self.ledger.part(member.name, instance_id)
        return part

    def grant(
        self, member: ShareMember, request: SlotRequest, instance_id: str, amounts: ResourceAmounts
    ) -> None:
        """Offer a slot for one trial."""
        part = self.part(member, instance_id)
        part.add(request, amounts, self.now)
        self.ledger.changed(part)
        self.book(part)

    def remove(self, grant: SlotGrant, grace_s: float | None = None) -> None:
        """Withdraw a slot; with a grace, preempt the trial in it."""
        self.ledger.remove(grant, grace_s)
        self.book(grant.part)

    def restore(self, part: NodePart) -> None:
        """Offer withdrawn slots again that are still held and no longer needed by others."""
        if not self.members.of(part).is_paused and part.restore():
            self.ledger.changed(part)
            self.book(part)

    # --- claims -----------------------------------------------------------------------------------

    def claims_on(self, instance_id: str) -> list[SlotClaim]:
        """Return the claims on a node."""
        return list(self._claims_on.get(instance_id, ()))

    def add_claim(self, claim: SlotClaim) -> None:
        """Add a claim."""
        self.claims[claim] = None
        self._claims_on.setdefault(claim.instance_id, {})[claim] = None
        self._count(claim, +1)

    def drop_claim(self, claim: SlotClaim) -> None:
        """Remove a claim that is fulfilled or not needed any more."""
        del self.claims[claim], self._claims_on[claim.instance_id][claim]
        if not self._claims_on[claim.instance_id]:
            del self._claims_on[claim.instance_id]
        self._count(claim, -1)
        needed = {part for one in self.claims_on(claim.instance_id) for part in one.givers}
        node = self.ledger.nodes.get(claim.instance_id)
        if node is None or node.is_draining or node.is_ending or node.alone_for:
            return
        for part in claim.givers:
            if part not in needed:
                self.restore(part)

    def move_claim(self, instance_id: str, kept: ResourceAmounts, gone: ResourceAmounts) -> None:
        """Move a claim to devices of equal size that become free on the same node instead."""
        to = dict(zip(kept.devices, gone.devices, strict=True))
        for claim in self.claims_on(instance_id):
            devices = claim.amounts.devices
            if to and to.keys() <= devices.keys():
                moved = {to.get(uuid, uuid): share for uuid, share in devices.items()}
                claim.amounts = ResourceAmounts(claim.amounts.resources, moved)
                break
        self._promise(instance_id)

    def claimed(
        self, instance_id: str, priority: int, besides: SlotClaim | None = None
    ) -> ResourceAmounts:
        """Return the claimed part of a node for this priority and higher ones."""
        return total(
            claim.amounts
            for claim in self.claims_on(instance_id)
            if claim.member.priority >= priority and claim is not besides
        )

    def _count(self, claim: SlotClaim, times: int) -> None:
        self.members.claim(claim.member, claim.request, claim.amounts, times)
        self._promise(claim.instance_id)
        self.members.review(claim.member)

    def _promise(self, instance_id: str) -> None:
        self.ledger.promise(instance_id, total(one.amounts for one in self.claims_on(instance_id)))
