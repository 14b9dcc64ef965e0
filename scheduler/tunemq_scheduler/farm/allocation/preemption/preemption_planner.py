"""`PreemptionPlanner`: the common part of all reasons for clearing slots."""

from __future__ import annotations

import math
from typing import Final

from tunemq_scheduler.farm.allocation.books.amounts import NOTHING
from tunemq_scheduler.farm.allocation.books.claims import SlotClaim, SlotClaims
from tunemq_scheduler.farm.allocation.books.ledger import NodeLedger
from tunemq_scheduler.farm.allocation.books.loads import load_of
from tunemq_scheduler.farm.allocation.books.member import ShareMember
from tunemq_scheduler.farm.allocation.books.members import ShareMembers
from tunemq_scheduler.farm.allocation.books.node_parts import SlotGrant
from tunemq_scheduler.farm.allocation.books.slot_requests import SlotRequest
from tunemq_scheduler.farm.allocation.preemption.plans import (
    MayTake,
    PreemptionPlan,
    RankGrant,
    VictimFinder,
)
from tunemq_scheduler.farm.allocation.share_settings import FairShareSettings
from tunemq_scheduler.farm.allocation.turns import OwnerQueues, ShareLevel, levels_of

#: The most slots to clear at once, which limits the time of one decision.
_AT_ONCE: Final = 256


class PreemptionPlanner:
    """The state and tools for clearing slots.

    Attributes:
        now: the time of this turn.
        grace_s: how long preempted trials get to save; None if the farm does not preempt.
    """

    def __init__(
        self,
        settings: FairShareSettings,
        ledger: NodeLedger,
        members: ShareMembers,
        claims: SlotClaims,
    ) -> None:
        self.grace_s = settings.preempt_grace_s if settings.preempts else None
        self.ledger = ledger
        self.members = members
        self.claims = claims
        self.now = 0.0
        self._left = 0

    def begin(self, now: float) -> None:
        """Begin a turn."""
        self.now, self._left = now, _AT_ONCE

    @property
    def is_full(self) -> bool:
        """Whether this turn has cleared enough slots."""
        return self._left <= 0

    def levels(self, requests: list[SlotRequest] | None = None) -> dict[ShareLevel, OwnerQueues]:
        """Return who waits for these requests, or for any."""
        waiting = list(self.members.waiting) if requests is None else requests
        return levels_of(self.members, waiting, self.ledger.capacity.estimate)

    def finder(
        self,
        member: ShareMember,
        request: SlotRequest,
        may_take: MayTake,
        rank: RankGrant,
        at_most: float = math.inf,
    ) -> VictimFinder:
        """Return a finder of slots for an experiment's request."""
        return VictimFinder(
            self.ledger, self.claims, member, request, self.now, may_take, rank, at_most
        )

    def claim(
        self,
        member: ShareMember,
        request: SlotRequest,
        plan: PreemptionPlan,
        kind: str,
        grace_s: float | None,
    ) -> None:
        """Withdraw the slots in the way, and reserve the cleared slot."""
        claim = SlotClaim(member, request, plan.instance_id, plan.amounts, kind, self.now)
        for grant in plan.victims:
            claim.givers[grant.part] = None
            self.ledger.remove(grant, grace_s)
            giver = self.members[grant.part.experiment]
            self.members.book_part(grant.part, counts=True)
            self.members.review(giver, self.now)
        self.claims.add(claim, self.now)
        self._left -= 1

    def is_over_quota(self, member: ShareMember, request: SlotRequest) -> bool:
        """Return whether the owner's quota forbids this, even if other owners release slots."""
        amounts = self.ledger.capacity.estimate(request)
        return amounts is None or bool(self.members.quotas.hit_later(member.owner, amounts))

    def breaks_quota(self, member: ShareMember, plan: PreemptionPlan) -> bool:
        """Return whether the owner would exceed its quota with this plan."""
        own = [one.amounts for one in plan.victims if self.owner_of(one) == member.owner]
        return bool(self.members.quotas.hit_later(member.owner, plan.amounts, own))

    def cost_of(self, request: SlotRequest, pool: str) -> float:
        """Return the cost of a slot for this request."""
        amounts = self.ledger.capacity.estimate(request) or NOTHING
        return load_of(amounts).cost(pool, self.members.totals)

    def cost(self, grant: SlotGrant, pool: str) -> float:
        """Return the cost of a slot."""
        return load_of(grant.amounts).cost(pool, self.members.totals)

    def priority_of(self, grant: SlotGrant) -> int:
        """Return the priority of the experiment that has the slot."""
        return self.members[grant.part.experiment].priority

    def owner_of(self, grant: SlotGrant) -> str:
        """Return the owner of the experiment that has the slot."""
        return self.members[grant.part.experiment].owner
