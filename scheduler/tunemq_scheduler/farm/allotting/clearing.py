"""`Clearing`: room is made for those to whom it is due, where there is none.

For a higher priority at once, at the cost of lower ones. Within one priority an owner's slots go to
another when the one has missed so much more of its share than the other that it is worth the
trouble: first as trials end, after some minutes more by preemption. Experiments of one owner, and
requests larger than all that comes free by itself, get their slots as trials end.

Nothing is cleared for what would then not fit; and what is cleared for somebody is claimed.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Iterator
from typing import Final

from tunemq_scheduler.farm.allotting.accounts import Account
from tunemq_scheduler.farm.allotting.amounts import NOTHING, TOLERANCE
from tunemq_scheduler.farm.allotting.claims import PRIORITY, SHARE, SIZE, TURN, Claim, Claims
from tunemq_scheduler.farm.allotting.granting import PATIENCE, Granting
from tunemq_scheduler.farm.allotting.ledger import Ledger
from tunemq_scheduler.farm.allotting.loads import load_of, pool_of
from tunemq_scheduler.farm.allotting.member import Member
from tunemq_scheduler.farm.allotting.members import Members
from tunemq_scheduler.farm.allotting.parts import Grant
from tunemq_scheduler.farm.allotting.plans import MayTake, Plan, Planner, Rank
from tunemq_scheduler.farm.allotting.requests import Request
from tunemq_scheduler.farm.allotting.settings import AllotterSettings
from tunemq_scheduler.farm.allotting.turns import Level, Queues, levels_of, take_turns

#: So often shares are compared.
REVIEW_S: Final = 10.0
#: One owner has missed so much more of its share than another one, in seconds of it, that it gets
#: slots of theirs: as trials end, and by preemption.
_SOFT_S: Final = 240.0
_HARD_S: Final = 480.0
#: Who just began is not preempted for anybody's share: that goes to and fro.
_UNDISTURBED_S: Final = 180.0
#: Experiments of one owner change places after so long a wait, large requests after this.
_TURN_S: Final = 120.0
_SIZE_S: Final = 1800.0
#: Slots of a node that is kept for a large request may be empty for so long, as trials end.
_EMPTY_S: Final = 900.0
#: What had no place is looked at again after this, though no room came free.
_RETRY_S: Final = 1.0
#: At most so many slots are cleared at once: nobody waits for this decision longer than that takes.
_AT_ONCE: Final = 256


class Clearing:
    """Makes claims, and has others let go of what is in their way."""

    def __init__(
        self,
        settings: AllotterSettings,
        ledger: Ledger,
        members: Members,
        claims: Claims,
        granting: Granting,
    ) -> None:
        self._grace_s = settings.preempt_grace_s if settings.preempts else None
        self._ledger = ledger
        self._members = members
        self._claims = claims
        self._granting = granting
        self._now = 0.0
        self._reviewed_at = -REVIEW_S
        #: There was nothing to clear for these, when.
        self._hopeless: dict[tuple[int, Request], float] = {}
        self._grown = 0
        self._left = 0

    def run(self, now: float) -> None:
        """Clear what has to be cleared."""
        if self._members.expected:
            return
        self._now, self._left = now, _AT_ONCE
        if self._ledger.grown != self._grown:
            self._grown = self._ledger.grown
            self._hopeless.clear()
        self._for_priorities()
        if now >= self._reviewed_at + REVIEW_S:
            self._reviewed_at = now
            self._hurry()
            self._for_shares()
            self._for_turns()
            self._for_sizes()

    # --- priorities -------------------------------------------------------------------------------

    def _for_priorities(self) -> None:
        lowest = min(
            (key[0] for key, book in self._members.books.items() if book.held), default=None
        )
        highest = max(
            (key[0] for key, book in self._members.books.items() if book.open), default=None
        )
        if lowest is None or highest is None or highest <= lowest:
            return
        for level, queues in self._levels().items():
            if level.priority > lowest:
                serve = functools.partial(self._outrank, {})
                take_turns(self._members, level, queues, serve)

    def _outrank(
        self, planners: dict[tuple[str, Request], Planner], member: Member, request: Request
    ) -> bool:
        key = (member.priority, request)
        if self._left <= 0 or self._now < self._hopeless.get(key, -_RETRY_S) + _RETRY_S:
            return False
        if (member.name, request) not in planners:
            own_only = self._is_over_quota(member, request)

            def may_take(grant: Grant, _before: list[Grant]) -> bool:
                is_theirs = own_only and self._owner_of(grant) != member.owner
                return self._priority_of(grant) < member.priority and not is_theirs

            planners[member.name, request] = self._planner(
                member, request, may_take, lambda grant: float(self._priority_of(grant))
            )
        plan = planners[member.name, request].next()
        if plan is None or self._breaks_quota(member, plan):
            self._hopeless[key] = self._now
            return False
        self._claim(member, request, plan, PRIORITY, self._grace_s)
        return True

    # --- shares -----------------------------------------------------------------------------------

    def _for_shares(self) -> None:
        for level, queues in self._levels().items():
            accounts = {
                owner: self._members.account(level.priority, owner, level.pool)
                for (priority, owner) in self._members.books
                if priority == level.priority
            }
            if len(accounts) > 1:
                for owner in sorted(queues, key=lambda one: -accounts[one].behind_s):
                    self._for_share_of(level, owner, accounts)

    def _for_share_of(self, level: Level, owner: str, accounts: dict[str, Account]) -> None:
        own = accounts[owner]
        furthest = min(
            (one.behind_s for one in accounts.values() if one.coming > one.entitled + TOLERANCE),
            default=own.behind_s,
        )
        gap = own.behind_s - furthest
        if gap < _SOFT_S:
            return
        is_hard = gap >= _HARD_S
        for member, request in list(self._waiting(level, owner)):
            cost = self._cost_of(request, level.pool)
            planner = self._planner(
                member,
                request,
                self._may_share(level, owner, accounts, cost, is_hard=is_hard),
                lambda grant: (
                    accounts[self._owner_of(grant)].behind_s
                    if self._owner_of(grant) in accounts
                    else 0.0
                ),
                at_most=math.inf if self._grace_s is not None else 1,
            )
            while member.missing(request) and own.coming + TOLERANCE < own.entitled:
                if self._left <= 0 or self._is_over_quota(member, request):
                    return
                plan = planner.next()
                if plan is None:
                    break
                self._claim(member, request, plan, SHARE, self._grace_s if is_hard else None)
                for other in accounts:
                    self._members.account(level.priority, other, level.pool)

    def _may_share(
        self,
        level: Level,
        owner: str,
        accounts: dict[str, Account],
        cost: float,
        *,
        is_hard: bool,
    ) -> MayTake:
        least = _HARD_S if is_hard else _SOFT_S

        def may_take(grant: Grant, before: list[Grant]) -> bool:
            giver = self._members[grant.part.experiment]
            if giver.owner == owner or giver.priority != level.priority:
                return False
            if pool_of(grant.amounts) != level.pool:
                return False
            if is_hard and grant.is_held and self._now < grant.at + _UNDISTURBED_S:
                return False
            if not is_hard and grant.part.grace_s is not None:
                return False  # the others would have to give way, too
            theirs = accounts[giver.owner]
            gone = sum(
                self._cost(one, level.pool) for one in before if self._owner_of(one) == giver.owner
            )
            above = theirs.coming - theirs.entitled
            # A slot that is given away in pieces is given away as a whole.
            is_above = above > TOLERANCE and gone < max(above, cost) - TOLERANCE
            return is_above and accounts[owner].behind_s - theirs.behind_s >= least

        return may_take

    def _hurry(self) -> None:
        """Where trials were to end by themselves, and did not, they have to give way."""
        if self._grace_s is None:
            return
        patience = {SHARE: _HARD_S - _SOFT_S, SIZE: _EMPTY_S}
        for claim in self._claims:
            if self._now >= claim.at + patience.get(claim.kind, math.inf):
                for part in claim.givers:
                    self._ledger.hurry(part, self._grace_s)

    # --- turns and sizes --------------------------------------------------------------------------

    def _for_turns(self) -> None:
        """Experiments of one owner have as much as each other, as far as slots can be divided."""
        for level, queues in self._levels().items():
            for owner in queues:
                for member, request in list(self._waiting(level, owner)):
                    if self._now < member.since.get(request, self._now) + _TURN_S:
                        continue
                    if not self._for_turn(level, member, request):
                        break

    def _for_turn(self, level: Level, member: Member, request: Request) -> bool:
        if self._left <= 0:
            return False
        cost = self._cost_of(request, level.pool)
        after = self._members.coming(member, level.pool) + cost
        others = [one for one in self._members if one.owner == member.owner]
        most = max(self._members.coming(one, level.pool) for one in others)
        if most - cost < after - TOLERANCE:
            return False

        def may_take(grant: Grant, before: list[Grant]) -> bool:
            giver = self._members[grant.part.experiment]
            if (giver.owner, giver.priority) != (member.owner, level.priority):
                return False
            if giver is member or grant.part.grace_s is not None:
                return False
            gone = sum(
                self._cost(one, level.pool)
                for one in (*before, grant)
                if one.part.experiment == giver.name
            )
            return self._members.coming(giver, level.pool) - gone >= after - TOLERANCE

        planner = self._planner(
            member,
            request,
            may_take,
            lambda grant: -self._members.coming(self._members[grant.part.experiment], level.pool),
            at_most=1,  # where several had to end, the first would be empty for long
        )
        plan = planner.next()
        if plan is None or self._breaks_quota(member, plan):
            return False
        self._claim(member, request, plan, TURN, None)
        return True

    def _for_sizes(self) -> None:
        """A request that others' smaller ones never leave room for gets a node to itself."""
        claimed = {claim.request for claim in self._claims}
        for request in list(self._members.waiting):
            if request in claimed:
                continue
            is_passed = self._granting.passed[request] >= PATIENCE
            for level, queues in self._levels([request]).items():
                owner = min(
                    queues,
                    key=lambda one: self._members.account(level.priority, one, level.pool).standing,
                )
                member = next((one for one, _ in self._waiting(level, owner, request)), None)
                if member and (is_passed or self._starves(member, request)):
                    self._for_size(level, member, request)
                break

    def _starves(self, member: Member, request: Request) -> bool:
        waits = self._now - member.since.get(request, self._now)
        return waits >= _SIZE_S and not member.slots[request]

    def _for_size(self, level: Level, member: Member, request: Request) -> None:
        if self._left <= 0:
            return
        cost = self._cost_of(request, level.pool)
        own = self._members.account(level.priority, member.owner, level.pool)
        is_below = own.coming + TOLERANCE < own.entitled
        is_below &= not self._is_over_quota(member, request)

        def may_take(grant: Grant, _before: list[Grant]) -> bool:
            giver = self._members[grant.part.experiment]
            if giver.priority > level.priority or grant.part.grace_s is not None:
                return False
            is_smaller = self._cost(grant, level.pool) < cost - TOLERANCE
            return is_smaller and (is_below or giver.owner == member.owner)

        planner = self._planner(
            member, request, may_take, lambda grant: float(self._priority_of(grant))
        )
        plan = planner.next()
        if plan is not None and not self._breaks_quota(member, plan):
            self._claim(member, request, plan, SIZE, None)

    # --- small things -----------------------------------------------------------------------------

    def _levels(self, requests: list[Request] | None = None) -> dict[Level, Queues]:
        waiting = list(self._members.waiting) if requests is None else requests
        return levels_of(self._members, waiting, self._ledger.room.estimate)

    def _planner(
        self,
        member: Member,
        request: Request,
        may_take: MayTake,
        rank: Rank,
        at_most: float = math.inf,
    ) -> Planner:
        return Planner(
            self._ledger, self._claims, member, request, self._now, may_take, rank, at_most
        )

    def _claim(
        self, member: Member, request: Request, plan: Plan, kind: str, grace_s: float | None
    ) -> None:
        claim = Claim(member, request, plan.incarnation, plan.amounts, kind, self._now)
        for grant in plan.victims:
            claim.givers[grant.part] = None
            self._ledger.remove(grant, grace_s)
            giver = self._members[grant.part.experiment]
            self._members.book_part(grant.part, counts=True)
            self._members.review(giver, self._now)
        self._claims.add(claim, self._now)
        self._left -= 1

    def _waiting(
        self, level: Level, owner: str, only: Request | None = None
    ) -> Iterator[tuple[Member, Request]]:
        found: list[tuple[float, float, int, Member, Request]] = []
        for request in self._members.waiting if only is None else [only]:
            amounts = self._ledger.room.estimate(request)
            if amounts is None or pool_of(amounts) != level.pool:
                continue
            for name in self._members.waiting.get(request, ()):
                member = self._members[name]
                if (member.priority, member.owner) == (level.priority, owner):
                    has = self._members.coming(member, level.pool)
                    place = list(member.wants).index(request)
                    found.append((has, member.order, place, member, request))
        found.sort(key=lambda one: one[:3])
        for *_, member, request in found:
            yield member, request

    def _is_over_quota(self, member: Member, request: Request) -> bool:
        amounts = self._ledger.room.estimate(request)
        return amounts is None or bool(self._members.quotas.hit_later(member.owner, amounts))

    def _breaks_quota(self, member: Member, plan: Plan) -> bool:
        own = [one.amounts for one in plan.victims if self._owner_of(one) == member.owner]
        return bool(self._members.quotas.hit_later(member.owner, plan.amounts, own))

    def _cost_of(self, request: Request, pool: str) -> float:
        amounts = self._ledger.room.estimate(request) or NOTHING
        return load_of(amounts).cost(pool, self._members.totals)

    def _cost(self, grant: Grant, pool: str) -> float:
        return load_of(grant.amounts).cost(pool, self._members.totals)

    def _priority_of(self, grant: Grant) -> int:
        return self._members[grant.part.experiment].priority

    def _owner_of(self, grant: Grant) -> str:
        return self._members[grant.part.experiment].owner
