"""`VictimFinder`: finds the node on which clearing a slot costs the least."""

from __future__ import annotations

import heapq
import math
from collections.abc import Callable, Iterator, Mapping
from typing import NamedTuple

from tunemq_scheduler.core.allotments import ResourceAmounts
from tunemq_scheduler.farm.allocation.books.amounts import minus, plus
from tunemq_scheduler.farm.allocation.books.claims import SlotClaims
from tunemq_scheduler.farm.allocation.books.ledger import LedgerNode, NodeLedger
from tunemq_scheduler.farm.allocation.books.member import ShareMember
from tunemq_scheduler.farm.allocation.books.node_parts import SlotGrant
from tunemq_scheduler.farm.allocation.books.slot_requests import SlotRequest, amounts_of

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
        ledger, claims: all nodes and claims.
        member: the experiment that waits for the request.
        request: the request.
        now: the time, in seconds of the allocator's clock.
        may_take: returns whether a slot may be taken.
        rank: returns which slots are taken first.
        at_most: the most slots to take for one plan.
    """

    def __init__(
        self,
        ledger: NodeLedger,
        claims: SlotClaims,
        member: ShareMember,
        request: SlotRequest,
        now: float,
        may_take: MayTake,
        rank: RankGrant,
        at_most: float = math.inf,
    ) -> None:
        self._ledger = ledger
        self._claims = claims
        self._member = member
        self._request = request
        self._asked: Mapping[str, float] = dict(request)
        self._now = now
        self._may_take = may_take
        self._rank = rank
        self._at_most = at_most
        self._heap = list(self._first_look())
        heapq.heapify(self._heap)

    def next(self) -> PreemptionPlan | None:
        """Return the best remaining plan; None if there is none."""
        while self._heap:
            _, instance_id = heapq.heappop(self._heap)
            plan = self._plan(instance_id)
            if plan is not None:
                loss = self._loss(plan)
                if not self._heap or (loss, instance_id) <= self._heap[0]:
                    heapq.heappush(self._heap, (loss, instance_id))
                    return plan
                heapq.heappush(self._heap, (loss, instance_id))
        return None

    def _first_look(self) -> Iterator[tuple[tuple[float, float], str]]:
        for instance_id in self._ledger.nodes:
            plan = self._plan(instance_id)
            if plan is not None:
                yield self._loss(plan), instance_id

    def _plan(self, instance_id: str) -> PreemptionPlan | None:
        node = self._ledger.nodes[instance_id]
        if not self._may_use(node) or not self._ledger.capacity.could_hold(
            instance_id, self._asked
        ):
            return None
        free = self._to_come(instance_id, node)
        devices = self._devices(instance_id, free)
        victims: list[SlotGrant] = []
        if devices is None:
            for grant in self._candidates(node):
                if self._may_take(grant, victims):
                    victims.append(grant)
                    free = plus(free, grant.amounts)
                    devices = self._devices(instance_id, free)
                    if devices is not None:
                        break
        if devices is None:
            return None
        for grant in reversed(victims[:-1]):  # the slots with the greatest loss come last
            less = minus(free, grant.amounts)
            others = self._devices(instance_id, less)
            if others is not None:
                victims.remove(grant)
                free, devices = less, others
        if len(victims) > self._at_most:
            return None
        return PreemptionPlan(instance_id, tuple(victims), amounts_of(self._request, devices))

    def _may_use(self, node: LedgerNode) -> bool:
        instance_id = node.joined.instance_id
        if not node.is_open or instance_id in self._member.avoided:
            return False
        if instance_id in self._member.excluded.get(self._request, ()):
            return False
        own = self._member.parts.get(instance_id)
        return not node.is_unknown and (own is None or own.may_grow)

    def _to_come(self, instance_id: str, node: LedgerNode) -> ResourceAmounts:
        """Return the free part for this priority once all leaving trials have ended."""
        claimed = self._claims.claimed(instance_id, self._member.priority)
        return minus(node.not_offered, claimed)

    def _candidates(self, node: LedgerNode) -> list[SlotGrant]:
        waiting = {claim.member.name for claim in self._claims.on(node.joined.instance_id)}
        waiting.discard(self._member.name)  # it waits for a slot here, so it gives none
        parts = (part for part in node.parts.values() if part.experiment not in waiting)
        grants = [grant for part in parts for grant in part.grants]
        return sorted(grants, key=lambda one: (self._rank(one), one.is_held, -one.at))

    def _devices(self, instance_id: str, free: ResourceAmounts) -> dict[str, float] | None:
        return self._ledger.capacity.devices(instance_id, self._asked, free)

    def _loss(self, plan: PreemptionPlan) -> tuple[float, float]:
        rank = max((self._rank(one) for one in plan.victims), default=-math.inf)
        lost = sum((self._now - one.at + 1.0) * one.is_held for one in plan.victims)
        return rank, lost
