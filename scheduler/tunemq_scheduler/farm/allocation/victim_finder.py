"""`VictimFinder`: finds the node on which clearing a slot costs the least."""

from __future__ import annotations

import heapq
import math
from collections.abc import Callable
from typing import NamedTuple

from tunemq_scheduler.core.shared_amounts import ResourceAmounts
from tunemq_scheduler.farm.allocation.allocation_state import AllocationState
from tunemq_scheduler.farm.allocation.amounts import SlotRequest, amounts_of, minus, plus
from tunemq_scheduler.farm.allocation.ledger import LedgerNode
from tunemq_scheduler.farm.allocation.members import ShareMember
from tunemq_scheduler.farm.allocation.node_grants import SlotGrant

#: Returns whether a slot may be taken after the listed ones; called in the order of taking.
MayTake = Callable[[SlotGrant, list[SlotGrant]], bool]
#: Slots with the lowest rank are taken first; the loss counts only among equal ranks.
RankGrant = Callable[[SlotGrant], float]


class PreemptionPlan(NamedTuple):
    """A slot to clear, and the slots in its way."""

    instance_id: str
    victims: tuple[SlotGrant, ...]
    amounts: ResourceAmounts


class VictimFinder:
    """Finds slots for one request, one after the other, each where the least is lost.

    It checks each node once, and again only when the node is next and may have changed.

    Args:
        state: all nodes and claims.
        member: the experiment that waits for the request.
        request: the request.
        may_take: returns whether a slot may be taken.
        rank: returns which slots are taken first.
        at_most: the most slots to take for one plan.
    """

    def __init__(
        self,
        state: AllocationState,
        member: ShareMember,
        request: SlotRequest,
        may_take: MayTake,
        rank: RankGrant,
        at_most: float = math.inf,
    ) -> None:
        self._state, self._member, self._request = state, member, request
        self._asked = dict(request)
        self._may_take, self._rank, self._at_most = may_take, rank, at_most
        plans = (self._plan(node) for node in state.ledger.nodes.values())
        self._heap = [(self._loss(plan), plan.instance_id) for plan in plans if plan is not None]
        heapq.heapify(self._heap)

    def next(self) -> PreemptionPlan | None:
        """Return the best remaining plan; None if there is none."""
        while self._heap:
            _, instance_id = heapq.heappop(self._heap)
            plan = self._plan(self._state.ledger.nodes[instance_id])
            if plan is not None:
                entry = self._loss(plan), instance_id
                is_best = not self._heap or entry <= self._heap[0]
                heapq.heappush(self._heap, entry)
                if is_best:
                    return plan
        return None

    def _plan(self, node: LedgerNode) -> PreemptionPlan | None:
        if not self._may_use(node) or not node.could_hold(self._asked):
            return None
        instance_id = node.joined.instance_id
        claimed = self._state.claimed(instance_id, self._member.priority)
        # The free part for this priority once all leaving trials have ended.
        free = minus(node.not_offered, claimed)
        devices = node.devices(self._asked, free)
        victims: list[SlotGrant] = []
        if devices is None:
            for grant in self._candidates(node):
                if self._may_take(grant, victims):
                    victims.append(grant)
                    free = plus(free, grant.amounts)
                    devices = node.devices(self._asked, free)
                    if devices is not None:
                        break
        if devices is None:
            return None
        for grant in reversed(victims[:-1]):  # the slots with the greatest loss come last
            less = minus(free, grant.amounts)
            others = node.devices(self._asked, less)
            if others is not None:
                victims.remove(grant)
                free, devices = less, others
        if len(victims) > self._at_most:
            return None
        return PreemptionPlan(instance_id, tuple(victims), amounts_of(self._request, devices))

    def _may_use(self, node: LedgerNode) -> bool:
        instance_id = node.joined.instance_id
        if not node.is_open or node.is_unknown or instance_id in self._member.avoided:
            return False
        if instance_id in self._member.excluded.get(self._request, ()):
            return False
        own = self._member.parts.get(instance_id)
        return own is None or own.may_grow

    def _candidates(self, node: LedgerNode) -> list[SlotGrant]:
        waiting = {one.member.name for one in self._state.claims_on(node.joined.instance_id)}
        waiting.discard(self._member.name)  # it waits for a slot here, so it gives none
        parts = (part for part in node.parts.values() if part.experiment not in waiting)
        grants = [grant for part in parts for grant in part.grants]
        return sorted(grants, key=lambda one: (self._rank(one), one.is_held, -one.at))

    def _loss(self, plan: PreemptionPlan) -> tuple[float, float]:
        rank = max((self._rank(one) for one in plan.victims), default=-math.inf)
        lost = sum((self._state.now - one.at + 1.0) * one.is_held for one in plan.victims)
        return rank, lost
