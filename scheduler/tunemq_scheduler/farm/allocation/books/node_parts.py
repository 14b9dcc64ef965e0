"""`NodePart`: what an experiment may have of a node, slot by slot, and what it may hold at worst.

An offer is absolute and a message takes its time. So what counts as taken is, of each thing, the
most that any offer allows by which the experiment may still go, and what it said that it holds.
"""

from __future__ import annotations

from collections.abc import Callable

from tunemq_scheduler.core.allotments import ResourceAmounts
from tunemq_scheduler.farm.allocation.books.amounts import (
    NOTHING,
    covers,
    is_nothing,
    least,
    minus,
    most,
    total,
)
from tunemq_scheduler.farm.allocation.books.slot_requests import SlotRequest
from tunemq_shared.protocol.messages import NodeOffered


class SlotGrant:
    """Room for one trial.

    Attributes:
        request: for which it was given; empty where it was made of others.
        amounts: with the devices, where they are known one by one.
        at: when it was given.
        n: the first offer that it stands in; 0 while there is none.
        is_held: a trial is in it, as far as is known.
        idle_since: since when the experiment knows of it and has nothing in it.
    """

    __slots__ = ("amounts", "at", "idle_since", "is_held", "n", "part", "request")

    def __init__(
        self, part: NodePart, request: SlotRequest, amounts: ResourceAmounts, at: float
    ) -> None:
        self.part = part
        self.request = request
        self.amounts = amounts
        self.at = at
        self.n = 0
        self.is_held = False
        self.idle_since: float | None = None


class NodePart:
    """An experiment's part of a node.

    Attributes:
        grants: what it is offered, in the order in which it was given.
        leaving: what it is offered no longer, and may still hold.
        grace_s: trials have to give way for what is leaving, within this time; None: they need not.
        is_stale: there is an offer to be sent.
        held: what it said that it holds.
        n: the number of the last offer.
    """

    def __init__(self, experiment: str, instance_id: str, n: int = 0) -> None:
        self.experiment = experiment
        self.instance_id = instance_id
        self.grants: list[SlotGrant] = []
        self.leaving: list[SlotGrant] = []
        self.grace_s: float | None = None
        self.is_stale = False
        self.held = NOTHING
        self._offer = NOTHING
        #: Those by which the experiment may go: the newest that it confirmed, and all after it.
        self._sent: list[tuple[int, ResourceAmounts]] = []
        #: Up to this offer nobody knows what was promised: another supervisor did it.
        self._unknown_until = 0
        self._reported = (-1, NOTHING)
        self.n = n

    # --- state ------------------------------------------------------------------------------------

    @property
    def offer(self) -> ResourceAmounts:
        """What it may hold from now on."""
        return self._offer

    @property
    def taken(self) -> ResourceAmounts:
        """What it may hold at worst."""
        worst = most(self._offer, self.held)
        for _, sent in self._sent:
            worst = most(worst, sent)
        return worst

    @property
    def is_unknown(self) -> bool:
        """Whether it may hold anything at all."""
        return bool(self._unknown_until)

    @property
    def may_grow(self) -> bool:
        """Whether more may be offered: not while it is to let go of something."""
        return not self.leaving and not self._unknown_until

    @property
    def is_over(self) -> bool:
        """Whether nothing of it is left, and the experiment knows that."""
        is_told = not self.is_stale and len(self._sent) <= 1 and not self._unknown_until
        return is_told and not self.grants and not self.leaving and is_nothing(self.taken)

    # --- changes ----------------------------------------------------------------------------------

    def add(self, request: SlotRequest, amounts: ResourceAmounts, at: float) -> SlotGrant:
        """Offer room for one trial more."""
        grant = SlotGrant(self, request, amounts, at)
        self.grants.append(grant)
        self._changed()
        return grant

    def remove(self, grant: SlotGrant, grace_s: float | None) -> None:
        """Offer this no longer; who is in it may stay to the end, or has to give way."""
        self.grants.remove(grant)
        self.leaving.append(grant)
        self._changed()
        if grace_s is not None:
            self.hurry(grace_s)

    def hurry(self, grace_s: float) -> None:
        """Whoever is to leave has to give way."""
        if self.leaving and self.grace_s is None:
            self.grace_s = grace_s
            self.is_stale = True

    def restore(self) -> bool:
        """Offer again what is still held and nobody waits for any more."""
        back = [grant for grant in self.leaving if grant.is_held and self.grace_s is None]
        if back:
            self.leaving = [grant for grant in self.leaving if grant not in back]
            self.grants += back
            self._changed()
        return bool(back)

    def swap(
        self, are_alike: Callable[[ResourceAmounts, ResourceAmounts], bool]
    ) -> list[tuple[SlotGrant, SlotGrant]]:
        """Let go of what is empty, in place of as much that is to leave and is still held.

        So of several slots that would do it is the one that is empty first. Returns the pairs: what
        stays, and what leaves in its place.
        """
        if self.grace_s is not None:
            return []
        pairs: list[tuple[SlotGrant, SlotGrant]] = []
        empty = [grant for grant in self.grants if grant.idle_since is not None]
        for kept in [grant for grant in self.leaving if grant.is_held]:
            like = (one for one in empty if are_alike(one.amounts, kept.amounts))
            gone = next(like, None)
            if gone is not None:
                empty.remove(gone)
                self.grants[self.grants.index(gone)] = kept
                self.leaving[self.leaving.index(kept)] = gone
                pairs.append((kept, gone))
        if pairs:
            self._changed()
        return pairs

    def say_again(self) -> None:
        """The last offer may have been lost on its way."""
        self.is_stale = True

    def next_offer(self) -> NodeOffered:
        """The offer to be sent."""
        self.n += 1
        for grant in self.grants:
            grant.n = grant.n or self.n
        self._sent.append((self.n, self._offer))
        if self._unknown_until:
            self._unknown_until = self.n
        self.is_stale = False
        return NodeOffered(
            self.instance_id,
            self.n,
            dict(self._offer.resources),
            dict(self._offer.devices),
            self.grace_s,
        )

    def adopt(self, seen: int, held: ResourceAmounts, at: float) -> None:
        """It has what another supervisor offered, of which only this is known."""
        self.count_from(seen)
        self.held = held
        if not is_nothing(held):
            self.add((), held, at).n = seen

    def count_from(self, seen: int) -> None:
        """It goes by an offer of another supervisor, and passes over those with lower numbers."""
        self.n = seen
        self._unknown_until = seen + 1
        self.is_stale = True

    def report(self, seen: int, held: ResourceAmounts, at: float) -> bool:
        """What the experiment said of it; returns whether that is news."""
        if (seen, held) == self._reported:
            return False
        self._reported = seen, held
        self.held = held
        while len(self._sent) > 1 and self._sent[1][0] <= seen:
            self._sent.pop(0)
        if self._unknown_until and seen >= self._unknown_until:
            self._unknown_until = 0
        self._match(seen, at)
        return True

    # --- small things -----------------------------------------------------------------------------

    def _changed(self) -> None:
        self._offer = total(grant.amounts for grant in self.grants)
        self.is_stale = True

    def _split(self, grant: SlotGrant, used: ResourceAmounts) -> None:
        """A trial is in this much of it; the rest is for nobody in particular."""
        among = self.grants if grant in self.grants else self.leaving
        spare = SlotGrant(self, (), minus(grant.amounts, used), grant.at)
        spare.n = grant.n
        grant.request, grant.amounts, grant.is_held = (), used, True
        among.append(spare)

    def _match(self, seen: int, at: float) -> None:
        """Find out in which grants trials are; what is not held any more has left."""
        rest = self.held
        loose: list[SlotGrant] = []
        for grant in (*self.grants, *self.leaving):
            grant.is_held = covers(rest, grant.amounts)
            if grant.is_held:
                rest = minus(rest, grant.amounts)
            else:
                loose.append(grant)
        for grant in sorted(loose, key=lambda one: not rest.devices.keys() & one.amounts.devices):
            used = least(rest, grant.amounts)
            if not is_nothing(used):  # by a trial other than that for which it was given
                rest = minus(rest, used)
                self._split(grant, used)
        for grant in self.grants:
            is_idle = not grant.is_held and 0 < grant.n <= seen
            grant.idle_since = (grant.idle_since or at) if is_idle else None
        is_confirmed = bool(self._sent) and not self.is_stale and seen >= self._sent[-1][0]
        if self.leaving and is_confirmed:
            self.leaving = [grant for grant in self.leaving if grant.is_held]
            if not self.leaving:
                self.grace_s = None
