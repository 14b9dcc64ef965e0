"""`PreemptionByTurn`: balances slots among an owner's experiments."""

from __future__ import annotations

from typing import Final

from tunemq_scheduler.farm.allocation.books.amounts import TOLERANCE
from tunemq_scheduler.farm.allocation.books.claims import TURN
from tunemq_scheduler.farm.allocation.books.member import ShareMember
from tunemq_scheduler.farm.allocation.books.node_parts import SlotGrant
from tunemq_scheduler.farm.allocation.books.slot_requests import SlotRequest
from tunemq_scheduler.farm.allocation.preemption.preemption_planner import PreemptionPlanner
from tunemq_scheduler.farm.allocation.turns import ShareLevel

#: How long an experiment waits before another of its owner gives slots to it.
_TURN_S: Final = 120.0


class PreemptionByTurn:
    """Clears slots of experiments that have more than another of their owner, as trials end."""

    def __init__(self, planner: PreemptionPlanner) -> None:
        self._planner = planner

    def run(self) -> None:
        """Balance each owner's experiments, as far as slots can be divided."""
        for level, queues in self._planner.levels().items():
            most = self._most(level)
            for owner, queue in queues.items():
                for member, request in queue.in_order():
                    if self._planner.now < member.since.get(request, self._planner.now) + _TURN_S:
                        continue
                    if not self._for_turn(level, member, request, most[owner]):
                        break

    def _most(self, level: ShareLevel) -> dict[str, float]:
        """Return, by owner, the most that one of its experiments has."""
        most: dict[str, float] = {}
        for member in self._planner.members:
            if member.priority == level.priority:
                has = self._planner.members.coming(member, level.pool)
                most[member.owner] = max(has, most.get(member.owner, 0.0))
        return most

    def _for_turn(
        self, level: ShareLevel, member: ShareMember, request: SlotRequest, most: float
    ) -> bool:
        if self._planner.is_full:
            return False
        cost = self._planner.cost_of(request, level.pool)
        after = self._planner.members.coming(member, level.pool) + cost
        if most - cost < after - TOLERANCE:
            return False

        def may_take(grant: SlotGrant, before: list[SlotGrant]) -> bool:
            giver = self._planner.members[grant.part.experiment]
            if (giver.owner, giver.priority) != (member.owner, level.priority):
                return False
            if giver is member or grant.part.grace_s is not None:
                return False
            gone = sum(
                self._planner.cost(one, level.pool)
                for one in (*before, grant)
                if one.part.experiment == giver.name
            )
            return self._planner.members.coming(giver, level.pool) - gone >= after - TOLERANCE

        finder = self._planner.finder(
            member,
            request,
            may_take,
            lambda grant: (
                -self._planner.members.coming(
                    self._planner.members[grant.part.experiment], level.pool
                )
            ),
            at_most=1,  # if several had to end, the first slot would stay empty for long
        )
        plan = finder.next()
        if plan is None or self._planner.breaks_quota(member, plan):
            return False
        self._planner.claim(member, request, plan, TURN, None)
        return True
