"""`SlotGranting`: gives free slots to the experiments that are next.

Higher priorities come first. Within a priority, requests with GPUs come first, because GPUs would
otherwise idle. Then comes the owner furthest below its share; of its experiments, the one with
least, then the earliest; and of an experiment, its preferred request.
"""

from __future__ import annotations

import heapq
from collections import Counter
from collections.abc import Callable, Iterable
from typing import Final, NamedTuple

from tunemq_scheduler.farm.allocation.allocation_state import AllocationState, SlotClaim
from tunemq_scheduler.farm.allocation.amounts import (
    POOLS,
    SlotRequest,
    amounts_of,
    covers,
    minus,
    pool_of,
)
from tunemq_scheduler.farm.allocation.members import ShareMember, ShareMembers

#: A request may be passed over this often; then a slot is cleared for it.
MAX_TIMES_PASSED_OVER: Final = 64
#: The most slots to give at a time; the others follow at the next poll, so that requests to the
#: farm are answered meanwhile.
MOST_GRANTS: Final = 2000

#: Serves an experiment's request if possible; returns whether it did.
ServeExperiment = Callable[[ShareMember, SlotRequest], bool]

#: By owner, the experiments that wait on one level.
OwnerQueues = dict[str, "OwnerQueue"]


class SlotGranting:
    """Gives free slots.

    Attributes:
        passed: by request, how often others got something while it waited.
    """

    def __init__(self, state: AllocationState) -> None:
        self._state, self._ledger, self._members = state, state.ledger, state.members
        self.passed: Counter[SlotRequest] = Counter()
        #: Requests for which there is no space until more becomes free, with the highest priority
        #: that waits for each.
        self._blocked: dict[SlotRequest, int] = {}
        self._grown = 0
        self._avoid: dict[str, set[str]] = {}
        #: How many more slots may be given in this run.
        self._left = MOST_GRANTS

    def run(self) -> None:
        """Give all slots that can be given."""
        if self._members.expected:
            return
        self._avoid.clear()
        self._left = MOST_GRANTS
        self.settle_claims()
        if self._ledger.grown != self._grown:
            self._grown = self._ledger.grown
            self._blocked.clear()
        waiting = self._members.waiting
        self._blocked = {one: top for one, top in self._blocked.items() if one in waiting}
        for request in [one for one in waiting if one not in self._blocked]:
            if self._ledger.placement.fit(dict(request)) is None:
                self._block(request)
        open_ones = [request for request in waiting if request not in self._blocked]
        for level, queues in levels_of(self._state, open_ones).items():
            take_turns(self._members, level, queues, self._server(level))
        for request in self.passed.keys() - waiting.keys():
            del self.passed[request]

    def is_blocked(self, request: SlotRequest) -> bool:
        """Return whether no node has space for a request."""
        return request in self._blocked

    # --- waiting requests -------------------------------------------------------------------------

    def _server(self, level: ShareLevel) -> ServeExperiment:
        def serve(member: ShareMember, request: SlotRequest) -> bool:
            if not self._left or request in self._blocked or not self._give(member, request):
                return False
            self._left -= 1
            for other, top in self._blocked.items():
                if top >= level.priority:
                    self.passed[other] += 1
            self.passed.pop(request, None)
            return True

        return serve

    def _give(self, member: ShareMember, request: SlotRequest) -> bool:
        amounts = self._ledger.estimate(request)
        if amounts is None or self._members.quotas.hit(member.owner, amounts):
            return False
        if member.comes_behind(request):
            return False
        avoid = self._avoided_by(member, request)
        fit = self._ledger.placement.fit(dict(request), member.preferred.get(request, ""), avoid)
        if fit is None:
            if not avoid or self._ledger.placement.fit(dict(request)) is None:
                self._block(request)
            return False
        node = self._ledger.nodes[fit]
        devices = node.devices(dict(request), node.capacity)
        if devices is not None:
            self._state.grant(member, request, fit, amounts_of(request, devices))
            if not member.parts[fit].may_grow:
                self._avoid[member.name].add(fit)
        return devices is not None

    def _avoided_by(self, member: ShareMember, request: SlotRequest) -> set[str]:
        if member.name not in self._avoid:
            busy = {one for one, part in member.parts.items() if not part.may_grow}
            self._avoid[member.name] = busy | member.avoided.keys()
        return self._avoid[member.name] | member.excluded.get(request, frozenset())

    def _block(self, request: SlotRequest) -> None:
        waiting = self._members.waiting.get(request, ())
        top = max((self._members[name].priority for name in waiting), default=0)
        self._blocked[request] = top

    # --- claims -----------------------------------------------------------------------------------

    def settle_claims(self) -> None:
        """Give cleared slots, or free ones elsewhere, to the experiments that claimed them.

        There may be thousands of claims, so a claim is checked only when its node has changed.
        """
        state, quotas = self._state, self._members.quotas
        grown, nowhere = self._ledger.grown, set[tuple[str, SlotRequest]]()
        for claim in sorted(state.claims, key=lambda one: -one.member.priority):
            member, request = claim.member, claim.request
            if self._ledger.grown != grown:
                grown = self._ledger.grown
                nowhere.clear()
            is_as_it_was = self._version(claim) == claim.looked_at
            if not self._is_wanted(claim) or not (is_as_it_was or self._may_come(claim)):
                state.drop_claim(claim)
            elif quotas.hit_when_clear(member.owner, claim.amounts):
                continue
            elif not is_as_it_was and self._is_clear(claim):
                state.drop_claim(claim)
                amounts = amounts_of(request, claim.amounts.devices)
                state.grant(member, request, claim.instance_id, amounts)
                self.passed.pop(request, None)
            elif (member.name, request) in nowhere or not self._try_elsewhere(claim):
                nowhere.add((member.name, request))
                claim.looked_at = self._version(claim)

    def _version(self, claim: SlotClaim) -> int:
        node = self._ledger.nodes.get(claim.instance_id)
        return 0 if node is None else node.version

    def _is_wanted(self, claim: SlotClaim) -> bool:
        member, request = claim.member, claim.request
        given = member.idle[request] + member.claims[request]
        wanted = 0 if member.is_paused else member.wants.get(request, 0)
        return member.name in self._members and given <= wanted

    def _may_come(self, claim: SlotClaim) -> bool:
        """Return whether the slot will be clear once all leaving trials have ended."""
        node = self._ledger.nodes.get(claim.instance_id)
        if node is None or not node.is_open:
            return False
        others = self._state.claimed(claim.instance_id, claim.member.priority, claim)
        return covers(minus(node.not_offered, others), claim.amounts)

    def _is_clear(self, claim: SlotClaim) -> bool:
        part = claim.member.parts.get(claim.instance_id)
        may_grow = part is None or part.may_grow
        return may_grow and covers(self._ledger.nodes[claim.instance_id].free, claim.amounts)

    def _try_elsewhere(self, claim: SlotClaim) -> bool:
        member, request = claim.member, claim.request
        fit = self._ledger.placement.fit(dict(request), "", self._avoided_by(member, request))
        if fit is None:
            return False
        node = self._ledger.nodes[fit]
        devices = node.devices(dict(request), node.capacity)
        self._state.drop_claim(claim)
        self._state.grant(member, request, fit, amounts_of(request, devices or {}))
        return True


# --- who is next ----------------------------------------------------------------------------------


class ShareLevel(NamedTuple):
    """A group of experiments that compare their shares with each other."""

    priority: int
    pool: str


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
    state: AllocationState, requests: Iterable[SlotRequest]
) -> dict[ShareLevel, OwnerQueues]:
    """Return who waits for one of these requests, by level and owner, in the order of levels."""
    found: dict[ShareLevel, OwnerQueues] = {}
    members = state.members
    for request in requests:
        amounts = state.ledger.estimate(request)
        if amounts is None:
            continue
        for name in members.waiting.get(request, ()):
            member = members[name]
            level = ShareLevel(member.priority, pool_of(amounts))
            queues = found.setdefault(level, {})
            if member.owner not in queues:
                queues[member.owner] = OwnerQueue(members, level)
            queues[member.owner].add(member, request)
    ranked = sorted(found, key=lambda level: (-level.priority, POOLS.index(level.pool)))
    return {level: found[level] for level in ranked}


def take_turns(
    members: ShareMembers, level: ShareLevel, queues: OwnerQueues, serve: ServeExperiment
) -> None:
    """Call ``serve`` for one experiment after another; a served one may be served again."""

    def place(owner: str) -> tuple[float, str]:
        return members.account(level.priority, owner, level.pool).standing, owner

    for queue in queues.values():
        heapq.heapify(queue.heap)
    owners = [place(owner) for owner in queues]
    heapq.heapify(owners)
    while owners:
        _, owner = heapq.heappop(owners)
        queue = queues[owner]
        while queue.heap:
            member = members[heapq.heappop(queue.heap)[2]]
            requests = queue.requests(member)
            if any(member.missing(one) and serve(member, one) for one in requests):
                queue.again(member)
                heapq.heappush(owners, place(owner))
                break
