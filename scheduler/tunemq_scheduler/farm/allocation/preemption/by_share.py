"""`PreemptionByShare`: gives one owner's slots to another that is behind its share."""

from __future__ import annotations

import math
from typing import Final

from tunemq_scheduler.farm.allocation.books.accounts import ShareAccount
from tunemq_scheduler.farm.allocation.books.amounts import TOLERANCE
from tunemq_scheduler.farm.allocation.books.claims import SHARE
from tunemq_scheduler.farm.allocation.books.loads import pool_of
from tunemq_scheduler.farm.allocation.books.node_parts import SlotGrant
from tunemq_scheduler.farm.allocation.preemption.plans import MayTake
from tunemq_scheduler.farm.allocation.preemption.preemption_planner import PreemptionPlanner
from tunemq_scheduler.farm.allocation.turns import OwnerQueue, ShareLevel

#: By how much more of its share one owner must be behind than another, in seconds of it, to get the
#: other's slots: first as trials end, then by preemption.
_SOFT_S: Final = 240.0
_HARD_S: Final = 480.0
#: A trial that has just started is not preempted for shares, which would cause oscillation.
_UNDISTURBED_S: Final = 180.0


class PreemptionByShare:
    """Clears slots of owners above their share, for those below theirs."""

    def __init__(self, planner: PreemptionPlanner) -> None:
        self._planner = planner

    def run(self) -> None:
        """Clear the slots that are needed."""
        for level, queues in self._planner.levels().items():
            accounts = {
                owner: self._planner.members.account(level.priority, owner, level.pool)
                for (priority, owner) in self._planner.members.books
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
        for member, request in queue.in_order():
            cost = self._planner.cost_of(request, level.pool)
            finder = self._planner.finder(
                member,
                request,
                self._may_share(level, owner, accounts, cost, is_hard=is_hard),
                lambda grant: (
                    accounts[self._planner.owner_of(grant)].behind_s
                    if self._planner.owner_of(grant) in accounts
                    else 0.0
                ),
                at_most=math.inf if self._planner.grace_s is not None else 1,
            )
            while member.missing(request) and own.coming + TOLERANCE < own.entitled:
                if self._planner.is_full or self._planner.is_over_quota(member, request):
                    return
                plan = finder.next()
                if plan is None:
                    break
                self._planner.claim(
                    member, request, plan, SHARE, self._planner.grace_s if is_hard else None
                )
                for other in accounts:
                    self._planner.members.account(level.priority, other, level.pool)

    def _may_share(
        self,
        level: ShareLevel,
        owner: str,
        accounts: dict[str, ShareAccount],
        cost: float,
        *,
        is_hard: bool,
    ) -> MayTake:
        least = _HARD_S if is_hard else _SOFT_S

        def may_take(grant: SlotGrant, before: list[SlotGrant]) -> bool:
            giver = self._planner.members[grant.part.experiment]
            if giver.owner == owner or giver.priority != level.priority:
                return False
            if pool_of(grant.amounts) != level.pool:
                return False
            if is_hard and grant.is_held and self._planner.now < grant.at + _UNDISTURBED_S:
                return False
            if not is_hard and grant.part.grace_s is not None:
                return False  # the others would be preempted, too
            theirs = accounts[giver.owner]
            gone = sum(
                self._planner.cost(one, level.pool)
                for one in before
                if self._planner.owner_of(one) == giver.owner
            )
            above = theirs.coming - theirs.entitled
            # A slot counts as a whole even if only a piece of it is given away.
            is_above = above > TOLERANCE and gone < max(above, cost) - TOLERANCE
            return is_above and accounts[owner].behind_s - theirs.behind_s >= least

        return may_take
