"""`VictimFinder`: on which node a slot can be cleared, and who has to let go of what for it."""

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

#: Whether a grant may be taken, after those; asked in the order in which they would be taken.
MayTake = Callable[[SlotGrant, list[SlotGrant]], bool]
#: The lowest is taken first, before what would be lost counts.
RankGrant = Callable[[SlotGrant], float]


class PreemptionPlan(NamedTuple):
    """A slot and those in its way."""

    instance_id: str
    victims: tuple[SlotGrant, ...]
    amounts: ResourceAmounts


class VictimFinder:
    """Finds slots for one request, one after the other, each where the least is lost.

    Each node is looked at once; again only when its turn has come and things may have changed.

    Args:
        may_take: which grants may be in the way.
        rank: which of them go first.
        at_most: so many of them.
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
        """The best of what is left; None when there is nothing."""
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
        for grant in reversed(victims[:-1]):  # those of which most would be lost come last
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
        """What is free once all that is leaving has left, for this priority."""
        claimed = self._claims.claimed(instance_id, self._member.priority)
        return minus(node.not_offered, claimed)

    def _candidates(self, node: LedgerNode) -> list[SlotGrant]:
        waiting = {claim.member.name for claim in self._claims.on(node.joined.instance_id)}
        waiting.discard(self._member.name)  # whoever is to get something here cannot give, too
        parts = (part for part in node.parts.values() if part.experiment not in waiting)
        grants = [grant for part in parts for grant in part.grants]
        return sorted(grants, key=lambda one: (self._rank(one), one.is_held, -one.at))

    def _devices(self, instance_id: str, free: ResourceAmounts) -> dict[str, float] | None:
        return self._ledger.capacity.devices(instance_id, self._asked, free)

    def _loss(self, plan: PreemptionPlan) -> tuple[float, float]:
        rank = max((self._rank(one) for one in plan.victims), default=-math.inf)
        lost = sum((self._now - one.at + 1.0) * one.is_held for one in plan.victims)
        return rank, lost
