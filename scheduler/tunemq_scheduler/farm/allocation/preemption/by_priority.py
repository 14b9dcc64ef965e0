"""`PreemptionByPriority`: preempts lower priorities for a higher one, at once."""

from __future__ import annotations

import functools
from typing import Final

from tunemq_scheduler.farm.allocation.books.claims import PRIORITY
from tunemq_scheduler.farm.allocation.books.member import ShareMember
from tunemq_scheduler.farm.allocation.books.node_parts import SlotGrant
from tunemq_scheduler.farm.allocation.books.slot_requests import SlotRequest
from tunemq_scheduler.farm.allocation.preemption.plans import VictimFinder
from tunemq_scheduler.farm.allocation.preemption.preemption_planner import PreemptionPlanner
from tunemq_scheduler.farm.allocation.turns import take_turns

#: A request for which no slot could be cleared is tried again after this time.
_RETRY_S: Final = 1.0


class PreemptionByPriority:
    """Clears slots of experiments with lower priorities for waiting ones."""

    def __init__(self, planner: PreemptionPlanner) -> None:
        self._planner = planner
        #: When nothing could be cleared for each of these.
        self._hopeless: dict[tuple[int, SlotRequest], float] = {}
        self._grown = 0

    def run(self) -> None:
        """Clear the slots that are needed."""
        if self._planner.ledger.grown != self._grown:
            self._grown = self._planner.ledger.grown
            self._hopeless.clear()
        lowest = min(
            (key[0] for key, book in self._planner.members.books.items() if book.held), default=None
        )
        highest = max(
            (key[0] for key, book in self._planner.members.books.items() if book.open), default=None
        )
        if lowest is None or highest is None or highest <= lowest:
            return
        for level, queues in self._planner.levels().items():
            if level.priority > lowest:
                serve = functools.partial(self._outrank, {})
                take_turns(self._planner.members, level, queues, serve)

    def _outrank(
        self,
        planners: dict[tuple[str, SlotRequest], VictimFinder],
        member: ShareMember,
        request: SlotRequest,
    ) -> bool:
        key = (member.priority, request)
        if (
            self._planner.is_full
            or self._planner.now < self._hopeless.get(key, -_RETRY_S) + _RETRY_S
        ):
            return False
        if (member.name, request) not in planners:
            own_only = self._planner.is_over_quota(member, request)

            def may_take(grant: SlotGrant, _before: list[SlotGrant]) -> bool:
                is_theirs = own_only and self._planner.owner_of(grant) != member.owner
                return self._planner.priority_of(grant) < member.priority and not is_theirs

            planners[member.name, request] = self._planner.finder(
                member, request, may_take, lambda grant: float(self._planner.priority_of(grant))
            )
        plan = planners[member.name, request].next()
        if plan is None or self._planner.breaks_quota(member, plan):
            self._hopeless[key] = self._planner.now
            return False
        self._planner.claim(member, request, plan, PRIORITY, self._planner.grace_s)
        return True
