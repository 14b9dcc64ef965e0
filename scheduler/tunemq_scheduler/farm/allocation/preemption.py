"""`Preemption`: clears slots for the experiments that are next if none is free.

For a higher priority it preempts lower ones at once. Within a priority, an owner that has missed
much more of its share gets slots of another: first as trials end, some minutes later by preemption.
Experiments of one owner, and requests larger than the slots that become free, get their slots as
trials end.

It clears nothing that would then not fit; and it reserves cleared slots with a claim.
"""

from __future__ import annotations

import functools
import math
from collections import Counter
from typing import Final

from tunemq_scheduler.core.shared_amounts import ResourceAmounts
from tunemq_scheduler.farm.allocation.allocation_state import (
    PRIORITY,
    SHARE,
    SIZE,
    TURN,
    AllocationState,
    SlotClaim,
)
from tunemq_scheduler.farm.allocation.amounts import (
    MOST_REQUESTS,
    NOTHING,
    TOLERANCE,
    SlotRequest,
    load_of,
    pool_of,
)
from tunemq_scheduler.farm.allocation.granting import (
    MAX_TIMES_PASSED_OVER,
    OwnerQueue,
    OwnerQueues,
    ShareLevel,
    levels_of,
    take_turns,
)
from tunemq_scheduler.farm.allocation.members import ShareAccount, ShareMember
from tunemq_scheduler.farm.allocation.node_grants import NodePart, SlotGrant
from tunemq_scheduler.farm.allocation.victim_finder import MayTake, PreemptionPlan, VictimFinder

#: The interval at which shares are compared.
_REVIEW_S: Final = 10.0

#: The most slots to clear at once, which limits the time of one decision.
_AT_ONCE: Final = 256

#: The time after which trials that were expected to end are preempted, in seconds. A node that is
#: reserved for a large request may have empty slots for this long, while its trials end one by one.
_CLAIM_TIMEOUT_S: Final = {SHARE: 240.0, SIZE: 900.0}

#: A request of a higher priority for which no slot could be cleared is tried again after this time.
_RETRY_S: Final = 1.0

#: By how much more of its share one owner must be behind than another, in seconds of it, to get the
#: other's slots: first as trials end, then by preemption.
_SOFT_S: Final = 240.0
_HARD_S: Final = 480.0

#: A trial that has just started is not preempted for shares, which would cause oscillation.
_UNDISTURBED_S: Final = 180.0

#: The most time that trials get to save which are preempted for shares again and again.
_LONGEST_GRACE_S: Final = 86_400.0

#: How long an experiment waits before another of its owner gives slots to it.
_TURN_S: Final = 120.0

#: How long an experiment without slots waits for a large request before one is cleared.
_SIZE_S: Final = 1800.0


class Preemption:
    """Makes claims, and withdraws the slots in their way.

    Args:
        state: the nodes, experiments and claims.
        passed: by request, how often others got something while it waited.
    """

    def __init__(self, state: AllocationState, passed: Counter[SlotRequest]) -> None:
        self._state, self._ledger, self._members = state, state.ledger, state.members
        self._passed = passed
        self._reviewed_at = -_REVIEW_S
        #: How many more slots this turn may clear.
        self._left = 0
        #: When nothing could be cleared for each priority and request.
        self._hopeless: dict[tuple[int, SlotRequest], float] = {}
        self._grown = 0

    def run(self) -> None:
        """Clear the slots that are needed."""
        if self._members.expected:
            return
        self._left = _AT_ONCE
        self._for_priorities()
        if self._state.now >= self._reviewed_at + _REVIEW_S:
            self._reviewed_at = self._state.now
            self._hurry()
            self._for_shares()
            self._for_turns()
            self._for_sizes()

    def _hurry(self) -> None:
        """Preempt trials that were expected to end and did not."""
        if self._state.grace_s is None:
            return
        for claim in self._state.claims:
            if self._state.now >= claim.at + _CLAIM_TIMEOUT_S.get(claim.kind, math.inf):
                for part in claim.givers:
                    if part.leaving and part.grace_s is None:
                        self._ledger.hurry(part, self._grace_s(part, self._state.grace_s))

    def _grace_s(self, part: NodePart, grace_s: float) -> float:
        """Return how long the trials of a part get to save: each time twice as long.

        So trials that never save are not preempted without end, each time before they are done.
        """
        member = self._members.of(part)
        if member.hurried_at < self._state.now:
            member.hurried, member.hurried_at = member.hurried + 1, self._state.now
        longest = max(grace_s, _LONGEST_GRACE_S)
        return min(grace_s * 2.0 ** min(member.hurried - 1, 100), longest)

    # --- for higher priorities, at once -----------------------------------------------------------

    def _for_priorities(self) -> None:
        if self._ledger.grown != self._grown:
            self._grown = self._ledger.grown
            self._hopeless.clear()
        books = self._members.books.items()
        lowest = min((priority for (priority, _), book in books if book.held), default=math.inf)
        if any(priority > lowest and book.open for (priority, _), book in books):
            for level, queues in self._levels().items():
                if level.priority > lowest:
                    serve = functools.partial(self._outrank, {})
                    take_turns(self._members, level, queues, serve)

    def _outrank(
        self,
        finders: dict[tuple[str, SlotRequest], VictimFinder],
        member: ShareMember,
        request: SlotRequest,
    ) -> bool:
        key = (member.priority, request)
        now = self._state.now
        if self._left <= 0 or now < self._hopeless.get(key, -_RETRY_S) + _RETRY_S:
            return False
        if (member.name, request) not in finders:
            own_only = self._is_over_quota(member, request)

            def may_take(grant: SlotGrant, _before: list[SlotGrant]) -> bool:
                giver = self._giver(grant)
                is_theirs = own_only and giver.owner != member.owner
                return giver.priority < member.priority and not is_theirs

            finders[member.name, request] = VictimFinder(
                self._state, member, request, may_take, self._priority_of
            )
        plan = finders[member.name, request].next()
        if plan is None or self._breaks_quota(member, plan):
            if len(self._hopeless) >= MOST_REQUESTS:
                self._hopeless.clear()
            self._hopeless[key] = now
            return False
        self._claim(member, request, plan, PRIORITY, self._state.grace_s)
        return True

    # --- for owners below their share, from those above theirs ------------------------------------

    def _for_shares(self) -> None:
        for level, queues in self._levels().items():
            accounts = {
                owner: self._account(level, owner)
                for priority, owner in self._members.books
                if priority == level.priority
            }
            if len(accounts) > 1:
                for owner in sorted(queues, key=lambda one: -accounts[one].behind_s):
                    self._for_share_of(level, owner, queues[owner], accounts)

    def _for_share_of(
        self, level: ShareLevel, owner: str, queue: OwnerQueue, accounts: dict[str, ShareAccount]
    ) -> None:
        own = accounts[owner]
        furthest = min(
            (one.behind_s for one in accounts.values() if one.coming > one.entitled + TOLERANCE),
            default=own.behind_s,
        )
        gap = own.behind_s - furthest
        if gap < _SOFT_S:
            return
        is_hard = gap >= _HARD_S

        def rank(grant: SlotGrant) -> float:
            account = accounts.get(self._giver(grant).owner)
            return account.behind_s if account is not None else 0.0

        for member, request in queue.in_order():
            cost = self._cost_of(request, level)
            may_take = self._may_share(level, own, accounts, cost, is_hard=is_hard)
            at_most = math.inf if self._state.grace_s is not None else 1
            finder = VictimFinder(self._state, member, request, may_take, rank, at_most)
            while member.missing(request) and own.coming + TOLERANCE < own.entitled:
                if self._left <= 0 or self._is_over_quota(member, request):
                    return
                plan = finder.next()
                if plan is None:
                    break
                grace_s = self._state.grace_s if is_hard else None
                self._claim(member, request, plan, SHARE, grace_s)
                for other in accounts:
                    self._account(level, other)

    def _may_share(
        self,
        level: ShareLevel,
        own: ShareAccount,
        accounts: dict[str, ShareAccount],
        cost: float,
        *,
        is_hard: bool,
    ) -> MayTake:
        least = _HARD_S if is_hard else _SOFT_S

        def may_take(grant: SlotGrant, before: list[SlotGrant]) -> bool:
            giver = self._giver(grant)
            if giver.priority != level.priority or accounts[giver.owner] is own:
                return False
            if pool_of(grant.amounts) != level.pool:
                return False
            if is_hard and grant.is_held and self._state.now < grant.at + _UNDISTURBED_S:
                return False
            if not is_hard and grant.part.grace_s is not None:
                return False  # the others would be preempted, too
            theirs = accounts[giver.owner]
            gone = sum(
                self._cost(one.amounts, level)
                for one in before
                if self._giver(one).owner == giver.owner
            )
            above = theirs.coming - theirs.entitled
            # A slot counts as a whole even if only a piece of it is given away.
            is_above = above > TOLERANCE and gone < max(above, cost) - TOLERANCE
            return is_above and own.behind_s - theirs.behind_s >= least

        return may_take

    # --- among the experiments of an owner, as trials end -----------------------------------------

    def _for_turns(self) -> None:
        now = self._state.now
        for level, queues in self._levels().items():
            #: By owner, the most that one of its experiments has.
            most: dict[str, float] = {}
            for member in self._members:
                if member.priority == level.priority:
                    has = self._members.coming(member, level.pool)
                    most[member.owner] = max(has, most.get(member.owner, 0.0))
            for owner, queue in queues.items():
                for member, request in queue.in_order():
                    if now < member.since.get(request, now) + _TURN_S:
                        continue
                    if not self._for_turn(level, member, request, most[owner]):
                        break

    def _for_turn(
        self, level: ShareLevel, member: ShareMember, request: SlotRequest, most: float
    ) -> bool:
        def coming(one: ShareMember) -> float:
            return self._members.coming(one, level.pool)

        cost = self._cost_of(request, level)
        after = coming(member) + cost
        if self._left <= 0 or most - cost < after - TOLERANCE:
            return False

        def may_take(grant: SlotGrant, before: list[SlotGrant]) -> bool:
            giver = self._giver(grant)
            if (giver.owner, giver.priority) != (member.owner, level.priority):
                return False
            if giver is member or grant.part.grace_s is not None:
                return False
            gone = sum(
                self._cost(one.amounts, level)
                for one in (*before, grant)
                if one.part.experiment == giver.name
            )
            return coming(giver) - gone >= after - TOLERANCE

        finder = VictimFinder(
            self._state,
            member,
            request,
            may_take,
            lambda grant: -coming(self._giver(grant)),
            at_most=1,  # if several had to end, the first slot would stay empty for long
        )
        plan = finder.next()
        if plan is None or self._breaks_quota(member, plan):
            return False
        self._claim(member, request, plan, TURN, None)
        return True

    # --- for requests larger than the slots that become free --------------------------------------

    def _for_sizes(self) -> None:
        claimed = {claim.request for claim in self._state.claims}
        for request in [one for one in self._members.waiting if one not in claimed]:
            levels = self._levels([request])
            if not levels:
                continue
            level, queues = next(iter(levels.items()))
            owner = min(queues, key=lambda one: self._account(level, one).standing)
            member, _ = queues[owner].in_order()[0]
            waits_s = self._state.now - member.since.get(request, self._state.now)
            starves = waits_s >= _SIZE_S and not member.slots[request]
            if self._left > 0 and (starves or self._passed[request] >= MAX_TIMES_PASSED_OVER):
                self._for_size(level, member, request)

    def _for_size(self, level: ShareLevel, member: ShareMember, request: SlotRequest) -> None:
        cost = self._cost_of(request, level)
        own = self._account(level, member.owner)
        is_below = own.coming + TOLERANCE < own.entitled
        is_below &= not self._is_over_quota(member, request)

        def may_take(grant: SlotGrant, _before: list[SlotGrant]) -> bool:
            giver = self._giver(grant)
            if giver.priority > level.priority or grant.part.grace_s is not None:
                return False
            is_smaller = self._cost(grant.amounts, level) < cost - TOLERANCE
            return is_smaller and (is_below or giver.owner == member.owner)

        plan = VictimFinder(self._state, member, request, may_take, self._priority_of).next()
        if plan is not None and not self._breaks_quota(member, plan):
            self._claim(member, request, plan, SIZE, None)

    # --- what they share --------------------------------------------------------------------------

    def _levels(self, requests: list[SlotRequest] | None = None) -> dict[ShareLevel, OwnerQueues]:
        """Return who waits for these requests, or for any."""
        return levels_of(self._state, self._members.waiting if requests is None else requests)

    def _account(self, level: ShareLevel, owner: str) -> ShareAccount:
        return self._members.account(level.priority, owner, level.pool)

    def _claim(
        self,
        member: ShareMember,
        request: SlotRequest,
        plan: PreemptionPlan,
        kind: str,
        grace_s: float | None,
    ) -> None:
        """Withdraw the slots in the way, and reserve the cleared slot."""
        claim = SlotClaim(member, request, plan.instance_id, plan.amounts, kind, self._state.now)
        for grant in plan.victims:
            claim.givers[grant.part] = None
            if kind == SHARE and grace_s is not None:
                self._state.remove(grant, self._grace_s(grant.part, grace_s))
            else:
                self._state.remove(grant, grace_s)
        if kind == PRIORITY and grace_s is not None:
            # Slots that leave already may do so with the longer grace of shares.
            for part in list(self._ledger.nodes[plan.instance_id].parts.values()):
                if part.leaving and self._members.of(part).priority < member.priority:
                    self._ledger.hurry(part, grace_s)
        self._state.add_claim(claim)
        self._left -= 1

    def _is_over_quota(self, member: ShareMember, request: SlotRequest) -> bool:
        """Return whether the owner's quota forbids this, even if other owners release slots."""
        amounts = self._ledger.estimate(request)
        return amounts is None or bool(self._members.quotas.hit_later(member.owner, amounts))

    def _breaks_quota(self, member: ShareMember, plan: PreemptionPlan) -> bool:
        """Return whether the owner would exceed its quota with this plan."""
        own = [one.amounts for one in plan.victims if self._giver(one).owner == member.owner]
        return bool(self._members.quotas.hit_later(member.owner, plan.amounts, own))

    def _cost_of(self, request: SlotRequest, level: ShareLevel) -> float:
        """Return the cost of a slot for this request."""
        return self._cost(self._ledger.estimate(request) or NOTHING, level)

    def _cost(self, amounts: ResourceAmounts, level: ShareLevel) -> float:
        return load_of(amounts).cost(level.pool, self._members.totals)

    def _giver(self, grant: SlotGrant) -> ShareMember:
        return self._members.of(grant.part)

    def _priority_of(self, grant: SlotGrant) -> float:
        return float(self._giver(grant).priority)
