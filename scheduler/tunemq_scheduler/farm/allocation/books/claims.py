"""`SlotClaims`: slots that are being cleared for one experiment and reserved for it."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Final

from tunemq_scheduler.core.allotments import ResourceAmounts
from tunemq_scheduler.farm.allocation.books.amounts import total
from tunemq_scheduler.farm.allocation.books.ledger import NodeLedger
from tunemq_scheduler.farm.allocation.books.member import ShareMember
from tunemq_scheduler.farm.allocation.books.members import ShareMembers
from tunemq_scheduler.farm.allocation.books.node_parts import NodePart
from tunemq_scheduler.farm.allocation.books.slot_requests import SlotRequest

#: Why a slot is cleared: for a higher priority; for an owner's share; for an equal share among an
#: owner's experiments; because the request is larger than slots that become free.
PRIORITY: Final = "priority"
SHARE: Final = "share"
TURN: Final = "turn"
SIZE: Final = "size"


class SlotClaim:
    """A slot that is being cleared.

    Attributes:
        amounts: the resources that it will have, with the GPUs.
        givers: the parts that have to release something for it.
        looked_at: the node's version at which the slot was found not clear, but still possible.
    """

    __slots__ = ("amounts", "at", "givers", "instance_id", "kind", "looked_at", "member", "request")

    def __init__(
        self,
        member: ShareMember,
        request: SlotRequest,
        instance_id: str,
        amounts: ResourceAmounts,
        kind: str,
        at: float,
    ) -> None:
        self.member = member
        self.request = request
        self.instance_id = instance_id
        self.amounts = amounts
        self.kind = kind
        self.at = at
        self.givers: dict[NodePart, None] = {}
        self.looked_at = -1


class SlotClaims:
    """All open claims, the oldest first."""

    def __init__(self, ledger: NodeLedger, members: ShareMembers) -> None:
        self._ledger = ledger
        self._members = members
        self._claims: dict[SlotClaim, None] = {}
        self._on: dict[str, dict[SlotClaim, None]] = {}

    def __iter__(self) -> Iterator[SlotClaim]:
        return iter(list(self._claims))

    def __len__(self) -> int:
        return len(self._claims)

    def on(self, instance_id: str) -> list[SlotClaim]:
        """Return the claims on a node."""
        return list(self._on.get(instance_id, ()))

    def add(self, claim: SlotClaim, now: float) -> None:
        """Add a claim."""
        self._claims[claim] = None
        self._on.setdefault(claim.instance_id, {})[claim] = None
        self._members.claim(claim.member, claim.request, claim.amounts, +1)
        self._promise(claim.instance_id)
        self._members.review(claim.member, now)

    def drop(self, claim: SlotClaim, now: float) -> None:
        """Remove a claim that is fulfilled or not needed any more."""
        del self._claims[claim], self._on[claim.instance_id][claim]
        if not self._on[claim.instance_id]:
            del self._on[claim.instance_id]
        self._members.claim(claim.member, claim.request, claim.amounts, -1)
        self._promise(claim.instance_id)
        self._members.review(claim.member, now)
        needed = {part for one in self.on(claim.instance_id) for part in one.givers}
        for part in [one for one in claim.givers if one not in needed]:  # a list keeps their order
            self._spare(part, now)

    def move(self, instance_id: str, kept: ResourceAmounts, gone: ResourceAmounts) -> None:
        """Move a claim to devices of equal size that become free on the same node instead."""
        to = dict(zip(kept.devices, gone.devices, strict=True))
        for claim in self.on(instance_id):
            devices = claim.amounts.devices
            if to and to.keys() <= devices.keys():
                self._members.claim(claim.member, claim.request, claim.amounts, -1)
                moved = {to.get(uuid, uuid): share for uuid, share in devices.items()}
                claim.amounts = ResourceAmounts(claim.amounts.resources, moved)
                self._members.claim(claim.member, claim.request, claim.amounts, +1)
                break
        self._promise(instance_id)

    def claimed(
        self, instance_id: str, priority: int, besides: SlotClaim | None = None
    ) -> ResourceAmounts:
        """Return the claimed part of a node for this priority and higher ones."""
        return total(
            claim.amounts
            for claim in self._on.get(instance_id, ())
            if claim.member.priority >= priority and claim is not besides
        )

    def _spare(self, part: NodePart, now: float) -> None:
        """Offer a part again what it no longer has to release."""
        member = self._members.get(part.experiment)
        node = self._ledger.nodes.get(part.instance_id)
        if member is None or member.is_paused or node is None or node.is_draining or node.alone_for:
            return
        if part.restore():
            self._ledger.changed(part)
            self._members.book_part(part, counts=not node.is_lost)
            self._members.review(member, now)

    def _promise(self, instance_id: str) -> None:
        promised = total(claim.amounts for claim in self._on.get(instance_id, ()))
        self._ledger.promise(instance_id, promised)
