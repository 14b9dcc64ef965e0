"""`ShareMember`: one experiment with its demands and slots."""

from __future__ import annotations

from collections import Counter

from tunemq_scheduler.core.allotments import OfferUsage, SlotDemand
from tunemq_scheduler.farm.allocation.books.loads import ResourceLoad
from tunemq_scheduler.farm.allocation.books.node_parts import NodePart, SlotGrant
from tunemq_scheduler.farm.allocation.books.slot_requests import ALONE, SlotRequest, request_of


class ShareMember:
    """An experiment.

    Attributes:
        order: decides turns among experiments of one owner with equal slots.
        wants: by request, how many more slots it would use.
        preferred: by request, its preferred node; ``excluded``: nodes that it would not use;
            ``shunned``: for each demand, nodes that its trials would not use.
        suspect: the demand of a suspect trial that waits for an empty node; ``alone`` are the nodes
            on which its suspect trials run.
        slots: by request, the slots given to it; ``idle`` are the empty ones.
        claims: by request, the slots that are being cleared for it.
        since: by request, since when it waits.
        parts: by node instance.
        avoided: by node instance, until when it gets no offers there, because it left slots empty.
        unused: by node instance, how often it left slots empty.
        behind: by request, until when its other requests come first, because it left a slot empty.
        held: all that it was given and may hold; ``leaving`` is the part to release; ``claimed`` is
            the amount being cleared for it.
        is_expected: whether it ran before this supervisor started, and has not reported yet.
        is_paused: whether it gets nothing.
    """

    def __init__(self, name: str, owner: str, priority: int, order: float) -> None:
        self.name = name
        self.owner = owner
        self.priority = priority
        self.order = order
        self.wants: dict[SlotRequest, int] = {}
        self.preferred: dict[SlotRequest, str] = {}
        self.excluded: dict[SlotRequest, frozenset[str]] = {}
        self.shunned: dict[SlotRequest, list[frozenset[str]]] = {}
        self.suspect: SlotDemand | None = None
        self.alone: frozenset[str] = frozenset()
        self.slots: Counter[SlotRequest] = Counter()
        self.idle: Counter[SlotRequest] = Counter()
        self.claims: Counter[SlotRequest] = Counter()
        self.since: dict[SlotRequest, float] = {}
        self.parts: dict[str, NodePart] = {}
        self.avoided: dict[str, float] = {}
        self.unused: Counter[str] = Counter()
        self.behind: dict[SlotRequest, float] = {}
        self.held = ResourceLoad()
        self.leaving = ResourceLoad()
        self.claimed = ResourceLoad()
        self.is_expected = False
        self.is_paused = False

    def hear(self, usage: OfferUsage) -> None:
        """Take over the demands of a report."""
        self.wants.clear()
        self.preferred.clear()
        self.excluded.clear()
        self.shunned.clear()
        self.suspect, self.alone = None, frozenset(usage.alone)
        for wanted in usage.wants:
            if wanted.is_alone:
                self.suspect, self.wants[ALONE] = wanted, 1
                continue
            request = request_of(wanted.request)
            self.wants[request] = self.wants.get(request, 0) + wanted.count
            self.preferred.setdefault(request, wanted.preferred)
            if wanted.excluded:
                self.shunned.setdefault(request, []).append(frozenset(wanted.excluded))
            # One trial may use nodes that another trial with the same request excludes.
            others = self.excluded.get(request, frozenset(wanted.excluded))
            self.excluded[request] = others.intersection(wanted.excluded)

    def missing(self, request: SlotRequest) -> int:
        """Return how many more slots it needs for this request."""
        if self.is_paused:
            return 0
        given = self.idle[request] + self.claims[request]
        return max(0, self.wants.get(request, 0) - given)

    def comes_behind(self, request: SlotRequest) -> bool:
        """Return whether its other requests are served before this one."""
        others = self.wants.keys() - self.behind.keys() - {ALONE}
        return request in self.behind and any(map(self.missing, others))

    def idle_grants(self) -> list[SlotGrant]:
        """Return its empty slots."""
        parts = self.parts.values()
        return [grant for part in parts for grant in part.grants if not grant.is_held]
