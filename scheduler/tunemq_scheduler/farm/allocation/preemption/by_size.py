"""`PreemptionBySize`: clears slots for requests larger than those that become free."""

from __future__ import annotations

from collections import Counter
from typing import Final

from tunemq_scheduler.farm.allocation.books.amounts import TOLERANCE
from tunemq_scheduler.farm.allocation.books.claims import SIZE
from tunemq_scheduler.farm.allocation.books.member import ShareMember
from tunemq_scheduler.farm.allocation.books.node_parts import SlotGrant
from tunemq_scheduler.farm.allocation.books.slot_requests import SlotRequest
from tunemq_scheduler.farm.allocation.granting import MAX_TIMES_PASSED_OVER
from tunemq_scheduler.farm.allocation.preemption.preemption_planner import PreemptionPlanner
from tunemq_scheduler.farm.allocation.turns import ShareLevel

#: How long an experiment without slots waits for a large request before one is cleared.
_SIZE_S: Final = 1800.0


class PreemptionBySize:
    """Clears slots for requests that are passed over."""

    def __init__(self, planner: PreemptionPlanner, passed: Counter[SlotRequest]) -> None:
        self._planner = planner
        self._passed = passed

    def run(self) -> None:
        """Clear a slot for each request that smaller ones leave no space for."""
        claimed = {claim.request for claim in self._planner.claims}
        for request in list(self._planner.members.waiting):
            if request in claimed:
                continue
            is_passed = self._passed[request] >= MAX_TIMES_PASSED_OVER
            for level, queues in self._planner.levels([request]).items():
                owner = min(
                    queues,
                    key=lambda one: (
                        self._planner.members.account(level.priority, one, level.pool).standing
                    ),
                )
                member, _ = queues[owner].in_order()[0]
                if is_passed or self._starves(member, request):
                    self._for_size(level, member, request)
                break

    def _starves(self, member: ShareMember, request: SlotRequest) -> bool:
        waits = self._planner.now - member.since.get(request, self._planner.now)
        return waits >= _SIZE_S and not member.slots[request]

    def _for_size(self, level: ShareLevel, member: ShareMember, request: SlotRequest) -> None:
        if self._planner.is_full:
            return
        cost = self._planner.cost_of(request, level.pool)
        own = self._planner.members.account(level.priority, member.owner, level.pool)
        is_below = own.coming + TOLERANCE < own.entitled
        is_below &= not self._planner.is_over_quota(member, request)

        def may_take(grant: SlotGrant, _before: list[SlotGrant]) -> bool:
            giver = self._planner.members[grant.part.experiment]
            if giver.priority > level.priority or grant.part.grace_s is not None:
                return False
            is_smaller = self._planner.cost(grant, level.pool) < cost - TOLERANCE
            return is_smaller and (is_below or giver.owner == member.owner)

        finder = self._planner.finder(
            member, request, may_take, lambda grant: float(self._planner.priority_of(grant))
        )
        plan = finder.next()
        if plan is not None and not self._planner.breaks_quota(member, plan):
            self._planner.claim(member, request, plan, SIZE, None)
