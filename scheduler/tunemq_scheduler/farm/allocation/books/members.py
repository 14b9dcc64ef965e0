"""`ShareMembers`: all experiments, and the accounts of their owners.

A report changes a few parts of one experiment. The sums over thousands of slots are updated by
differences: each part's old entry is subtracted and its new one added.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator, Mapping
from typing import Final

from tunemq_scheduler.core.allotments import ResourceAmounts
from tunemq_scheduler.farm.allocation.books.accounts import ShareAccount, share_out
from tunemq_scheduler.farm.allocation.books.amounts import plus, total
from tunemq_scheduler.farm.allocation.books.loads import GPUS, POOLS, ResourceLoad
from tunemq_scheduler.farm.allocation.books.member import ShareMember
from tunemq_scheduler.farm.allocation.books.node_parts import NodePart
from tunemq_scheduler.farm.allocation.books.quotas import OwnerQuotas
from tunemq_scheduler.farm.allocation.books.slot_requests import SlotRequest
from tunemq_scheduler.farm.allocation.share_settings import FairShareSettings
from tunemq_shared.trainable.resource_names import GPU

#: The most slots that count as one request's demand.
_MANY: Final = 10_000


class _Booking:
    """What one part adds to the sums."""

    __slots__ = ("held", "idle", "leaving", "leaving_resources", "resources", "slots")

    def __init__(self, part: NodePart) -> None:
        self.held = ResourceLoad()
        self.leaving = ResourceLoad()
        self.idle: Counter[SlotRequest] = Counter()
        for grant in (*part.grants, *part.leaving):
            self.held.add(grant.amounts)
        leaving = total(grant.amounts for grant in part.leaving)
        self.leaving_resources = leaving.resources
        self.resources = plus(part.offer, leaving).resources
        for grant in part.leaving:
            self.leaving.add(grant.amounts)
        self.slots = Counter(grant.request for grant in part.grants)
        for grant in part.grants:
            if not grant.is_held:
                self.idle[grant.request] += 1


class OwnerBook:
    """An owner's sums over its experiments in one priority, with an account for each pool.

    Attributes:
        open: demand that is neither held nor being cleared.
    """

    def __init__(self, owner: str, weight: float) -> None:
        self.owner = owner
        self.held = ResourceLoad()
        self.leaving = ResourceLoad()
        self.claimed = ResourceLoad()
        self.open = ResourceLoad()
        self.accounts = {pool: ShareAccount(weight) for pool in POOLS}


class ShareMembers:
    """All experiments.

    Args:
        settings: how the farm is shared.
        estimate: returns what a slot for a request takes; None if no node could ever hold it.

    Attributes:
        waiting: by request, the experiments that would use more slots.
        expected: experiments that ran before this supervisor started and have not reported yet.
    """

    def __init__(
        self, settings: FairShareSettings, estimate: Callable[[SlotRequest], ResourceAmounts | None]
    ) -> None:
        self._settings = settings
        self._estimate = estimate
        self._members: dict[str, ShareMember] = {}
        self._bookings: dict[NodePart, _Booking] = {}
        self._open: dict[str, dict[SlotRequest, ResourceLoad]] = {}
        self.books: dict[tuple[int, str], OwnerBook] = {}
        self.quotas = OwnerQuotas(settings.quotas)
        self.waiting: dict[SlotRequest, dict[str, None]] = {}
        self.expected: dict[str, None] = {}
        #: The farm's total resources.
        self.totals: Mapping[str, float] = {}

    def __contains__(self, name: str) -> bool:
        return name in self._members

    def __getitem__(self, name: str) -> ShareMember:
        return self._members[name]

    def get(self, name: str) -> ShareMember | None:
        """Return an experiment; None if it is gone."""
        return self._members.get(name)

    def __iter__(self) -> Iterator[ShareMember]:
        return iter(self._members.values())

    def add(self, member: ShareMember) -> None:
        """Add an experiment."""
        self._members[member.name] = member
        key = (member.priority, member.owner)
        if key not in self.books:
            self.books[key] = OwnerBook(member.owner, self._settings.shares.get(member.owner, 1.0))

    def remove(self, name: str) -> ShareMember:
        """Remove an ended experiment, whose parts are removed already."""
        member = self._members.pop(name)
        member.wants.clear()
        self.review(member)
        self.expected.pop(name, None)
        return member

    def book(self, member: ShareMember) -> OwnerBook:
        """Return the owner's sums that contain this experiment."""
        return self.books[member.priority, member.owner]

    # --- changes ----------------------------------------------------------------------------------

    def book_part(self, part: NodePart, *, counts: bool) -> None:
        """Update the sums after a change of a part; a part of a lost node does not count."""
        member = self._members[part.experiment]
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
        self.book(member).claimed.add(amounts, times)
        self.quotas.add(self.quotas.claimed, member.owner, amounts.resources, times)

    def review(self, member: ShareMember, now: float = 0.0) -> None:
        """Update who waits for what, after an experiment's demands or slots changed."""
        book, before = self.book(member), self._open.pop(member.name, {})
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
        member.since = {request: member.since.get(request, now) for request in after}
        if after:
            self._open[member.name] = after

    def settle(self) -> None:
        """Update all accounts to the current holdings and demands."""
        levels: dict[tuple[int, str], list[ShareAccount]] = {}
        for (priority, _), book in self.books.items():
            for pool, account in book.accounts.items():
                self._write_up(book, pool, account)
                levels.setdefault((priority, pool), []).append(account)
        for accounts in levels.values():
            share_out(accounts)

    def account(self, priority: int, owner: str, pool: str) -> ShareAccount:
        """Return an owner's updated account; its entitlement is as last settled."""
        book = self.books[priority, owner]
        account = book.accounts[pool]
        self._write_up(book, pool, account)
        return account

    def coming(self, member: ShareMember, pool: str) -> float:
        """Return what an experiment will have once its claimed slots are clear."""
        held = member.held.cost(pool, self.totals) - member.leaving.cost(pool, self.totals)
        return held + member.claimed.cost(pool, self.totals)

    def advance(self, seconds: float) -> None:
        """Advance all accounts by this many seconds, with their last settled values."""
        for book in self.books.values():
            for account in book.accounts.values():
                account.advance(seconds)

    # --- helpers ----------------------------------------------------------------------------------

    def _write_up(self, book: OwnerBook, pool: str, account: ShareAccount) -> None:
        account.held = book.held.cost(pool, self.totals)
        account.leaving = book.leaving.cost(pool, self.totals)
        account.claimed = book.claimed.cost(pool, self.totals)
        waiting = book.open.cost(pool, self.totals)
        account.demand = account.held + account.claimed + waiting
        quota = self.quotas.of(book.owner)
        if pool == GPUS and GPU in quota:
            account.demand = max(account.held, min(account.demand, quota[GPU]))
        account.has_waiting = waiting > 0 or account.claimed > 0

    def _enter(self, member: ShareMember, booking: _Booking, sign: int) -> None:
        book = self.book(member)
        for to in (member, book):
            to.held.merge(booking.held, sign)
            to.leaving.merge(booking.leaving, sign)
        for request, count in booking.slots.items():
            member.slots[request] += sign * count
        for request, count in booking.idle.items():
            member.idle[request] += sign * count
        self.quotas.add(self.quotas.held, member.owner, booking.resources, sign)
        self.quotas.add(self.quotas.leaving, member.owner, booking.leaving_resources, sign)
