"""`ShareMember`: one experiment, what it wants and what it has."""

from __future__ import annotations

from collections import Counter

from tunemq_scheduler.core.allotments import OfferUsage, SlotDemand
from tunemq_scheduler.farm.allocation.books.loads import ResourceLoad
from tunemq_scheduler.farm.allocation.books.node_parts import NodePart, SlotGrant
from tunemq_scheduler.farm.allocation.books.slot_requests import ALONE, SlotRequest, request_of


class ShareMember:
    """An experiment.

    Attributes:
        order: experiments of one owner that have as much as each other take turns by it.
        wants: by request, how many slots it would use beside those that it holds.
        preferred: by request, the node that it would like best; ``excluded``: those of which it
            would make no use; ``shunned``: those of which some of its trials would make none.
        suspect: what a trial of it asks for that may kill its node, and waits for an empty one;
            ``alone`` are the nodes on which such trials of it run.
        slots: by request, the slots that it was given; ``idle`` are those that it has nothing in.
        claims: by request, the slots that are being cleared for it.
        since: by request, since when it waits.
        parts: by attempt.
        avoided: by attempt, until when it is offered nothing there: it made no use of it.
        unused: by attempt, how often it did not.
        behind: by request, until when its other requests come first: it made no use of a slot.
        held: all that it was given and may hold; ``leaving`` is what it has to let go of, of that.
            ``claimed`` is what is being cleared for it.
        is_expected: it ran before this supervisor did, and has not reported yet.
        is_paused: it is to have nothing.
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
        """What it said that it wants."""
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
            # Who waits for the same may use what others shun.
            others = self.excluded.get(request, frozenset(wanted.excluded))
            self.excluded[request] = others.intersection(wanted.excluded)

    def missing(self, request: SlotRequest) -> int:
        """How many slots it still has to get for this request."""
        if self.is_paused:
            return 0
        given = self.idle[request] + self.claims[request]
        return max(0, self.wants.get(request, 0) - given)

    def comes_behind(self, request: SlotRequest) -> bool:
        """Whether another of its requests is to be served before this one."""
        others = self.wants.keys() - self.behind.keys() - {ALONE}
        return request in self.behind and any(map(self.missing, others))

    def idle_grants(self) -> list[SlotGrant]:
        """Those in which it has nothing."""
        parts = self.parts.values()
        return [grant for part in parts for grant in part.grants if not grant.is_held]
