"""`PreemptionPlanner`: how slots are cleared, whatever for."""

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

#: At most so many slots are cleared at once: nobody waits for this decision longer than that takes.
_AT_ONCE: Final = 256


class PreemptionPlanner:
    """What all that clear slots work with.

    Attributes:
        now: when it is.
        grace_s: of those that have to give way; None where nobody has to.
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
        """Another turn."""
        self.now, self._left = now, _AT_ONCE

    @property
    def is_full(self) -> bool:
        """Whether enough is cleared for this turn."""
        return self._left <= 0

    def levels(self, requests: list[SlotRequest] | None = None) -> dict[ShareLevel, OwnerQueues]:
        """Who waits, for these requests or for any."""
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
        """Finds slots for an experiment that waits for this."""
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
        """Have those in the way let go of it, and keep it for that one."""
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
        """Whether its owner may not hold so much more, whoever else lets go of it."""
        amounts = self.ledger.capacity.estimate(request)
        return amounts is None or bool(self.members.quotas.hit_later(member.owner, amounts))

    def breaks_quota(self, member: ShareMember, plan: PreemptionPlan) -> bool:
        """Whether its owner would then hold more than it may."""
        own = [one.amounts for one in plan.victims if self.owner_of(one) == member.owner]
        return bool(self.members.quotas.hit_later(member.owner, plan.amounts, own))

    def cost_of(self, request: SlotRequest, pool: str) -> float:
        """What a slot for this costs."""
        amounts = self.ledger.capacity.estimate(request) or NOTHING
        return load_of(amounts).cost(pool, self.members.totals)

    def cost(self, grant: SlotGrant, pool: str) -> float:
        """What a slot costs."""
        return load_of(grant.amounts).cost(pool, self.members.totals)

    def priority_of(self, grant: SlotGrant) -> int:
        """That of the experiment that has the slot."""
        return self.members[grant.part.experiment].priority

    def owner_of(self, grant: SlotGrant) -> str:
        """That of the experiment that has the slot."""
        return self.members[grant.part.experiment].owner
