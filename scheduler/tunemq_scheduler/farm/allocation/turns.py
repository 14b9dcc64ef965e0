"""`take_turns`: the order in which waiting experiments are served.

Higher priorities come first. Within a priority, requests with GPUs come first, because GPUs would
otherwise idle. Then comes the owner furthest below its share; of its experiments, the one with
least, then the earliest; and of an experiment, its preferred request.
"""

from __future__ import annotations

import heapq
from collections.abc import Callable, Iterable
from typing import NamedTuple

from tunemq_scheduler.core.allotments import ResourceAmounts
from tunemq_scheduler.farm.allocation.books.loads import POOLS, pool_of
from tunemq_scheduler.farm.allocation.books.member import ShareMember
from tunemq_scheduler.farm.allocation.books.members import ShareMembers
from tunemq_scheduler.farm.allocation.books.slot_requests import SlotRequest

#: Serves an experiment's request if possible; returns whether it did.
ServeExperiment = Callable[[ShareMember, SlotRequest], bool]
#: By owner, the experiments that wait on one level.
OwnerQueues = dict[str, "OwnerQueue"]


class ShareLevel(NamedTuple):
    """A group of experiments that compare their shares with each other."""

    priority: int
    pool: str

    @property
    def rank(self) -> tuple[int, int]:
        """The sort key; the lowest comes first."""
        return -self.priority, POOLS.index(self.pool)


class OwnerQueue:
    """An owner's waiting experiments on one level."""

    def __init__(self, members: ShareMembers, level: ShareLevel) -> None:
        self.heap: list[tuple[float, float, str]] = []
        self._members = members
        self._level = level
        self._requests: dict[str, dict[SlotRequest, None]] = {}

    def add(self, member: ShareMember, request: SlotRequest) -> None:
        """Add a request of an experiment."""
        if member.name not in self._requests:
            self._requests[member.name] = {}
            self.heap.append(self._entry(member))
        self._requests[member.name][request] = None

    def requests(self, member: ShareMember) -> list[SlotRequest]:
        """Return an experiment's requests, in its own order."""
        mine = self._requests[member.name]
        return [request for request in member.wants if request in mine]

    def in_order(self) -> list[tuple[ShareMember, SlotRequest]]:
        """Return all experiments with their requests, in the order of their turns."""
        members = [self._members[name] for *_, name in sorted(self.heap)]
        return [(one, request) for one in members for request in self.requests(one)]

    def again(self, member: ShareMember) -> None:
        """Put a served experiment back, after those that have less."""
        heapq.heappush(self.heap, self._entry(member))

    def _entry(self, member: ShareMember) -> tuple[float, float, str]:
        cost = self._members.coming(member, self._level.pool)
        return cost, member.order, member.name


def levels_of(
    members: ShareMembers,
    requests: Iterable[SlotRequest],
    estimate: Callable[[SlotRequest], ResourceAmounts | None],
) -> dict[ShareLevel, OwnerQueues]:
    """Return who waits for one of these requests, by level and owner, in the order of levels."""
    found: dict[ShareLevel, OwnerQueues] = {}
    for request in requests:
        amounts = estimate(request)
        if amounts is None:
            continue
        pool = pool_of(amounts)
        for name in members.waiting.get(request, ()):
            member = members[name]
            level = ShareLevel(member.priority, pool)
            queues = found.setdefault(level, {})
            if member.owner not in queues:
                queues[member.owner] = OwnerQueue(members, level)
            queues[member.owner].add(member, request)
    return {level: found[level] for level in sorted(found, key=lambda one: one.rank)}


def take_turns(
    members: ShareMembers,
    level: ShareLevel,
    queues: OwnerQueues,
    serve: ServeExperiment,
) -> None:
    """Call ``serve`` for one experiment after another; a served one may be served again."""
    for queue in queues.values():
        heapq.heapify(queue.heap)
    owners = [(_standing(members, level, owner), owner) for owner in queues]
    heapq.heapify(owners)
    while owners:
        _, owner = heapq.heappop(owners)
        queue = queues[owner]
        while queue.heap:
            member = members[heapq.heappop(queue.heap)[2]]
            requests = queue.requests(member)
            if any(member.missing(one) and serve(member, one) for one in requests):
                queue.again(member)
                heapq.heappush(owners, (_standing(members, level, owner), owner))
                break


def _standing(members: ShareMembers, level: ShareLevel, owner: str) -> float:
    return members.account(level.priority, owner, level.pool).standing
