"""`ShareMembers`: all experiments, and the accounts and quotas of their owners.

A report changes a few parts of one experiment. The sums over thousands of slots are updated by
differences: each part's old entry is subtracted and its new one added.

Within one priority, owners share what they hold together by weight. No owner gets more than it can
use, and the rest goes to the others (max-min fairness; for slots without GPUs an owner's *dominant
share* counts: Ghodsi et al., "Dominant Resource Fairness: Fair Allocation of Multiple Resource
Types", NSDI 2011). GPUs are whole and trials long, so at most moments no owner holds exactly its
share. Therefore each account has a *lag*: the GPU seconds that it was entitled to and did not have,
minus those that it had in excess (as in the service curves of fair queueing: Parekh and Gallager,
1993). The scheduler keeps the lag within some minutes of the owner's share, which bounds the
deviation over any window of hours.

An owner without waiting trials accumulates no lag; and a lag decays slowly, over hours.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import Final

import msgspec

from tunemq_scheduler.core.shared_amounts import OfferUsage, ResourceAmounts, SlotDemand
from tunemq_scheduler.farm.allocation.amounts import (
    ALONE,
    GPUS,
    OTHER,
    POOLS,
    TOLERANCE,
    ResourceLoad,
    SlotRequest,
    plus,
    request_of,
    total,
)
from tunemq_scheduler.farm.allocation.node_grants import NodePart, SlotGrant
from tunemq_shared.trainable.resource_names import GPU

#: A lag decays to a third in this time.
_FADES_S: Final = 6 * 3600.0

#: A lag of this many seconds of an owner's share counts as much as the share itself.
_WEIGHS_S: Final = 600.0

#: The most slots that count as one request's demand.
_MANY: Final = 10_000
#: The most kinds of resources of one experiment that metrics name.
_MOST_KINDS: Final = 16

_QUOTA_TOLERANCE: Final = 1e-6

_Sums = dict[str, dict[str, float]]


class FairShareSettings(msgspec.Struct, frozen=True, kw_only=True):
    """How a farm is shared.

    Attributes:
        shares: weights of owners; the default is 1.
        quotas: the most that an owner's experiments hold together: resource to amount, by owner.
        preempts: whether trials are paused for higher priorities, and for owners that are behind
            their share. Otherwise slots change hands as trials end.
        preempt_grace_s: how long a paused trial gets to save; seconds.
    """

    shares: dict[str, float] = {}
    quotas: dict[str, dict[str, float]] = {}
    preempts: bool = True
    preempt_grace_s: float = 60.0

    @property
    def grace_s(self) -> float | None:
        """How long preempted trials get to save; None if the farm does not preempt."""
        return self.preempt_grace_s if self.preempts else None


# --- experiments ----------------------------------------------------------------------------------


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
        hurried: how often its trials were preempted for shares or sizes; ``hurried_at`` is the last
            time.
        is_inherited: whether it ran before this supervisor started, and has offers that this one
            does not know; ``is_expected``: it has not reported them yet. ``known_to`` are the node
            instances for which these offers are accounted for, and ``was_alone``, those that its
            suspect trials had then and still have.
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
        self.held, self.leaving, self.claimed = ResourceLoad(), ResourceLoad(), ResourceLoad()
        self.hurried, self.hurried_at = 0, -math.inf
        self.is_inherited = self.is_expected = self.is_paused = False
        self.known_to: set[str] = set()
        self.was_alone: frozenset[str] = frozenset()
        self._kinds: set[str] = set()

    def hear(self, usage: OfferUsage) -> None:
        """Take over the demands of a report."""
        for known in (self.wants, self.preferred, self.excluded, self.shunned):
            known.clear()
        self.suspect, self.alone = None, frozenset(usage.alone)
        self.was_alone &= self.alone
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

    def named_kind(self, kind: str) -> str:
        """Return the name of a kind of resource in metrics: `OTHER` after the first ones.

        Each name is one more time series in the database that keeps the metrics.
        """
        if len(self._kinds) < _MOST_KINDS:
            self._kinds.add(kind)
        return kind if kind in self._kinds else OTHER

    def comes_behind(self, request: SlotRequest) -> bool:
        """Return whether its other requests are served before this one."""
        others = self.wants.keys() - self.behind.keys() - {ALONE}
        return request in self.behind and any(map(self.missing, others))

    def idle_grants(self) -> list[SlotGrant]:
        """Return its empty slots."""
        parts = self.parts.values()
        return [grant for part in parts for grant in part.grants if not grant.is_held]


# --- owners ---------------------------------------------------------------------------------------


class ShareAccount:
    """An owner's account, within one priority and one pool (`amounts.POOLS`).

    Attributes:
        held: what it has, including ``leaving``, which it will lose soon.
        claimed: the amount being cleared for it.
        demand: what it would have if there were enough.
        entitled: its share of what all hold.
        lag: seconds times amount.
    """

    def __init__(self, weight: float) -> None:
        self.weight = weight
        self.held = self.leaving = self.claimed = self.demand = self.entitled = self.lag = 0.0
        self.has_waiting = False

    @property
    def coming(self) -> float:
        """What it will have once leaving slots are gone and its claimed slots are clear."""
        return self.held - self.leaving + self.claimed

    @property
    def behind_s(self) -> float:
        """How many seconds of its share it has missed; negative if it had more than its share."""
        return self.lag / self.entitled if self.entitled > TOLERANCE else 0.0

    @property
    def standing(self) -> float:
        """The sort key; the lowest is served next."""
        return (self.coming - self.lag / _WEIGHS_S) / self.weight

    def advance(self, seconds: float) -> None:
        """Update the lag after this many seconds."""
        self.lag *= math.exp(-seconds / _FADES_S)
        self.lag += (self.entitled - self.held) * seconds
        if not self.has_waiting:
            self.lag = min(self.lag, 0.0)


def share_out(accounts: Iterable[ShareAccount]) -> None:
    """Set each owner's entitlement to what all hold together."""
    open_ones = sorted(accounts, key=lambda one: one.demand / one.weight)
    left = sum(one.held for one in open_ones)
    weights = sum(one.weight for one in open_ones)
    for one in open_ones:
        one.entitled = min(one.demand, left * one.weight / weights)
        left -= one.entitled
        weights -= one.weight


class OwnerQuotas:
    """What the experiments of owners with a quota hold together, over all priorities.

    Attributes:
        held: including ``leaving``, which is the part to release.
        claimed: the amount being cleared.
    """

    def __init__(self, quotas: Mapping[str, Mapping[str, float]]) -> None:
        self._quotas = quotas
        self.held: _Sums = {}
        self.leaving: _Sums = {}
        self.claimed: _Sums = {}

    def of(self, owner: str) -> Mapping[str, float]:
        """Return the most that an owner may have."""
        return self._quotas.get(owner, {})

    def add(self, sums: _Sums, owner: str, resources: Mapping[str, float], sign: int) -> None:
        """Add or subtract resources of an owner; only owners with a quota are counted."""
        if owner in self._quotas:
            mine = sums.setdefault(owner, {})
            for name, amount in resources.items():
                mine[name] = round(mine.get(name, 0.0) + sign * amount, 6)

    def hit(self, owner: str, amounts: ResourceAmounts) -> str:
        """Return the resource whose quota these amounts would exceed; empty if there is none."""
        return self._hit(owner, amounts, (self.held, self.claimed))

    def hit_when_clear(self, owner: str, amounts: ResourceAmounts) -> str:
        """Do the same for amounts that were being cleared for it."""
        return self._hit(owner, amounts, (self.held,))

    def hit_later(
        self, owner: str, amounts: ResourceAmounts, given: Iterable[ResourceAmounts] = ()
    ) -> str:
        """Do the same for the time after leaving slots are gone, and these were released, too."""
        return self._hit(owner, amounts, (self.held, self.claimed), (self.leaving,), given)

    def left(self, owner: str) -> dict[str, float]:
        """Return what an owner may still have of each resource with a quota."""
        used = self.held.get(owner, {}), self.claimed.get(owner, {})
        return {
            name: most - sum(one.get(name, 0.0) for one in used)
            for name, most in self.of(owner).items()
        }

    def _hit(
        self,
        owner: str,
        amounts: ResourceAmounts,
        used: Iterable[_Sums],
        freed: Iterable[_Sums] = (),
        given: Iterable[ResourceAmounts] = (),
    ) -> str:
        for name, most in self.of(owner).items():
            asked = amounts.resources.get(name, 0.0)
            sums = asked + sum(one.get(owner, {}).get(name, 0.0) for one in used)
            less = sum(one.get(owner, {}).get(name, 0.0) for one in freed)
            less += sum(one.resources.get(name, 0.0) for one in given)
            if asked and sums - less > most + _QUOTA_TOLERANCE:
                return name
        return ""


def take(left: dict[str, float], amounts: ResourceAmounts, times: int) -> int:
    """Subtract the amounts up to this many times, as often as they fit; return how often."""
    asked = {name: amounts.resources[name] for name in left if amounts.resources.get(name)}
    for name, amount in asked.items():
        times = max(0, min(times, int((left[name] + _QUOTA_TOLERANCE) / amount)))
    for name, amount in asked.items():
        left[name] -= times * amount
    return times


# --- all of them ----------------------------------------------------------------------------------


class _Booking:
    """What one part adds to the sums."""

    __slots__ = ("held", "idle", "leaving", "leaving_resources", "resources", "slots")

    def __init__(self, part: NodePart) -> None:
        self.held, self.leaving = ResourceLoad(), ResourceLoad()
        for grant in (*part.grants, *part.leaving):
            self.held.add(grant.amounts)
        for grant in part.leaving:
            self.leaving.add(grant.amounts)
        leaving = total(grant.amounts for grant in part.leaving)
        self.leaving_resources = leaving.resources
        self.resources = plus(part.offer, leaving).resources
        self.slots = Counter(grant.request for grant in part.grants)
        self.idle = Counter(grant.request for grant in part.grants if not grant.is_held)


class OwnerBook:
    """An owner's sums over its experiments in one priority, with an account for each pool.

    Attributes:
        open: demand that is neither held nor being cleared.
    """

    def __init__(self, weight: float) -> None:
        self.held, self.leaving, self.claimed = ResourceLoad(), ResourceLoad(), ResourceLoad()
        self.open = ResourceLoad()
        self.accounts = {pool: ShareAccount(weight) for pool in POOLS}


class ShareMembers:
    """All experiments.

    Args:
        settings: how the farm is shared.
        estimate: returns what a slot for a request takes; None if no node could ever hold it.

    Attributes:
        now: the time, in seconds of a clock that never goes back.
        waiting: by request, the experiments that would use more slots.
        expected: experiments that ran before this supervisor started and have not reported yet,
            each with a hint for people, or an empty one.
        totals: the farm's total resources.
    """

    def __init__(
        self, settings: FairShareSettings, estimate: Callable[[SlotRequest], ResourceAmounts | None]
    ) -> None:
        self._settings = settings
        self._estimate = estimate
        self._members: dict[str, ShareMember] = {}
        self._bookings: dict[NodePart, _Booking] = {}
        self._open: dict[str, dict[SlotRequest, ResourceLoad]] = {}
        self.now = 0.0
        self.books: dict[tuple[int, str], OwnerBook] = {}
        self.quotas = OwnerQuotas(settings.quotas)
        self.waiting: dict[SlotRequest, dict[str, None]] = {}
        self.expected: dict[str, str] = {}
        self.totals: Mapping[str, float] = {}

    def __contains__(self, name: str) -> bool:
        return name in self._members

    def __getitem__(self, name: str) -> ShareMember:
        return self._members[name]

    def __len__(self) -> int:
        return len(self._members)

    def __iter__(self) -> Iterator[ShareMember]:
        return iter(self._members.values())

    def add(self, member: ShareMember) -> None:
        """Add an experiment."""
        self._members[member.name] = member
        key = (member.priority, member.owner)
        if key not in self.books:
            self.books[key] = OwnerBook(self._settings.shares.get(member.owner, 1.0))

    def remove(self, name: str) -> None:
        """Remove an ended experiment, whose parts are removed already."""
        member = self._members.pop(name)
        member.wants.clear()
        self.review(member)
        self.expected.pop(name, None)

    def of(self, part: NodePart) -> ShareMember:
        """Return the experiment that has this part."""
        return self._members[part.experiment]

    # --- changes ----------------------------------------------------------------------------------

    def book_part(self, part: NodePart, *, counts: bool) -> None:
        """Update the sums after a change of a part; a part of a lost node does not count."""
        member = self.of(part)
        before = self._bookings.pop(part, None)
        if before is not None:
            self._enter(member, before, -1)
        if counts:
            self._bookings[part] = now = _Booking(part)
            self._enter(member, now, +1)

    def claim(
        self, member: ShareMember, request: SlotRequest, amounts: ResourceAmounts, times: int
    ) -> None:
        """Add slots that are being cleared for an experiment, or subtract them."""
        member.claims[request] += times
        member.claimed.add(amounts, times)
        self._book(member).claimed.add(amounts, times)
        self.quotas.add(self.quotas.claimed, member.owner, amounts.resources, times)

    def review(self, member: ShareMember) -> None:
        """Update who waits for what, after an experiment's demands or slots changed."""
        book, before = self._book(member), self._open.pop(member.name, {})
        for load in before.values():
            book.open.merge(load, -1)
        after: dict[SlotRequest, ResourceLoad] = {}
        for request in member.wants:
            missing = member.missing(request)
            amounts = self._estimate(request) if missing else None
            if amounts is not None:
                load = after[request] = ResourceLoad()
                load.add(amounts, min(missing, _MANY))
                book.open.merge(load, +1)
        for request in before.keys() - after.keys():
            del self.waiting[request][member.name]
            if not self.waiting[request]:
                del self.waiting[request]
        for request in [one for one in after if one not in before]:  # not a set, which has no order
            self.waiting.setdefault(request, {})[member.name] = None
        member.since = {request: member.since.get(request, self.now) for request in after}
        if after:
            self._open[member.name] = after

    def settle(self) -> None:
        """Update all accounts to the current holdings and demands."""
        levels: dict[tuple[int, str], list[ShareAccount]] = {}
        for priority, owner in self.books:
            for pool in POOLS:
                account = self.account(priority, owner, pool)
                levels.setdefault((priority, pool), []).append(account)
        for accounts in levels.values():
            share_out(accounts)

    def account(self, priority: int, owner: str, pool: str) -> ShareAccount:
        """Return an owner's updated account; its entitlement is as last settled."""
        book = self.books[priority, owner]
        account = book.accounts[pool]
        account.held = book.held.cost(pool, self.totals)
        account.leaving = book.leaving.cost(pool, self.totals)
        account.claimed = book.claimed.cost(pool, self.totals)
        waiting = book.open.cost(pool, self.totals)
        account.demand = account.held + account.claimed + waiting
        quota = self.quotas.of(owner)
        if pool == GPUS and GPU in quota:
            account.demand = max(account.held, min(account.demand, quota[GPU]))
        account.has_waiting = waiting > 0 or account.claimed > 0
        return account

    def coming(self, member: ShareMember, pool: str) -> float:
        """Return what an experiment will have once its claimed slots are clear."""
        held = member.held.cost(pool, self.totals) - member.leaving.cost(pool, self.totals)
        return held + member.claimed.cost(pool, self.totals)

    def advance(self, now: float) -> None:
        """Set the time, and advance all accounts with their last settled values."""
        if self.now:
            for book in self.books.values():
                for account in book.accounts.values():
                    account.advance(now - self.now)
        self.now = now

    # --- helpers ----------------------------------------------------------------------------------

    def _book(self, member: ShareMember) -> OwnerBook:
        """Return the owner's sums that contain this experiment."""
        return self.books[member.priority, member.owner]

    def _enter(self, member: ShareMember, booking: _Booking, sign: int) -> None:
        for to in (member, self._book(member)):
            to.held.merge(booking.held, sign)
            to.leaving.merge(booking.leaving, sign)
        for request, count in booking.slots.items():
            member.slots[request] += sign * count
        for request, count in booking.idle.items():
            member.idle[request] += sign * count
        self.quotas.add(self.quotas.held, member.owner, booking.resources, sign)
        self.quotas.add(self.quotas.leaving, member.owner, booking.leaving_resources, sign)
