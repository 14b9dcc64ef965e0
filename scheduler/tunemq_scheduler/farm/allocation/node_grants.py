"""`NodePart`: an experiment's part of a node, slot by slot, and the most that it may hold.

An offer is absolute, and a message takes time. So the amount that counts as taken is, for each
resource, the maximum of the experiment's report and all offers that it may still follow.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Final

from tunemq_scheduler.core.shared_amounts import ResourceAmounts
from tunemq_scheduler.farm.allocation.amounts import (
    NOTHING,
    SlotRequest,
    covers,
    is_nothing,
    least,
    minus,
    most,
    total,
)
from tunemq_shared.protocol.messages import NodeOffered

#: The most slots of a node for one experiment: each costs time, however little its trial requests.
MOST_SLOTS: Final = 1024


@dataclass(eq=False, slots=True)
class SlotGrant:
    """A slot for one trial.

    Attributes:
        request: the request for which it was given; empty if it was formed from other slots.
        amounts: the resources, with the devices if they are known individually.
        at: when it was given.
        n: the number of the first offer that contains it; 0 if none does.
        is_held: whether a trial runs in it, as far as known.
        idle_since: since when the experiment knows it but has no trial in it.
    """

    part: NodePart
    request: SlotRequest
    amounts: ResourceAmounts
    at: float
    n: int = 0
    is_held: bool = False
    idle_since: float | None = None


class NodePart:
    """An experiment's part of a node.

    Attributes:
        grants: the offered slots, in the order in which they were given.
        leaving: slots that are no longer offered but may still be held.
        grace_s: how long trials in leaving slots get to save before preemption; None if they may
            run to their end.
        is_stale: whether there is an offer to send.
        held: what the experiment reported that it holds; ``offer`` is what it may hold from now on.
        unknown_until: up to this offer number, an earlier supervisor made unknown promises, so that
            it may hold anything; 0 if none did.
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
        self.offer = NOTHING
        #: Offers that the experiment may follow: the newest that it confirmed, and all later ones.
        self._sent: list[tuple[int, ResourceAmounts]] = []
        self.unknown_until = 0
        self._reported = (-1, NOTHING)
        self.n = n

    # --- state ------------------------------------------------------------------------------------

    @property
    def taken(self) -> ResourceAmounts:
        """The most that it may hold now."""
        worst = most(self.offer, self.held)
        for _, sent in self._sent:
            worst = most(worst, sent)
        return worst

    @property
    def may_grow(self) -> bool:
        """Whether more may be offered; not while it has to release something."""
        return not self.leaving and not self.unknown_until and len(self.grants) < MOST_SLOTS

    @property
    def unconfirmed_since(self) -> int | None:
        """The offer that the experiment confirmed last, if later ones were sent; else None."""
        if self.unknown_until:
            return 0 if self._sent else None
        return self._sent[0][0] if len(self._sent) > 1 else None

    @property
    def is_over(self) -> bool:
        """Whether it is empty and the experiment knows that."""
        is_told = not self.is_stale and len(self._sent) <= 1 and not self.unknown_until
        return is_told and not self.grants and not self.leaving and is_nothing(self.taken)

    # --- changes ----------------------------------------------------------------------------------

    def add(self, request: SlotRequest, amounts: ResourceAmounts, at: float) -> SlotGrant:
        """Offer one more slot."""
        grant = SlotGrant(self, request, amounts, at)
        self.grants.append(grant)
        self._changed()
        return grant

    def remove(self, grant: SlotGrant, grace_s: float | None) -> None:
        """Withdraw a slot; its trial may run to its end, or is preempted with a grace."""
        self.grants.remove(grant)
        self.leaving.append(grant)
        self._changed()
        if grace_s is not None:
            self.hurry(grace_s)

    def hurry(self, grace_s: float) -> None:
        """Preempt the trials in withdrawn slots; a shorter grace replaces a longer one."""
        if self.leaving and (self.grace_s is None or grace_s < self.grace_s):
            self.grace_s = grace_s
            self.is_stale = True

    def restore(self) -> bool:
        """Offer withdrawn slots again that are still held and no longer needed by others."""
        back = [grant for grant in self.leaving if grant.is_held and self.grace_s is None]
        if back:
            self.leaving = [grant for grant in self.leaving if grant not in back]
            self.grants += back
            self._changed()
        return bool(back)

    def swap(
        self, are_alike: Callable[[ResourceAmounts, ResourceAmounts], bool]
    ) -> list[tuple[SlotGrant, SlotGrant]]:
        """Withdraw empty slots instead of equal ones that should leave but are still held.

        So of several suitable slots, the one that is empty first leaves. Returns pairs of the slot
        that stays and the slot that leaves instead.
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

    def next_offer(self) -> NodeOffered:
        """Return the next offer to send."""
        self.n += 1
        for grant in self.grants:
            grant.n = grant.n or self.n
        self._sent.append((self.n, self.offer))
        if self.unknown_until:
            self.unknown_until = self.n
        self.is_stale = False
        return NodeOffered(
            self.instance_id,
            self.n,
            dict(self.offer.resources),
            dict(self.offer.devices),
            self.grace_s,
        )

    def adopt(self, seen: int, held: ResourceAmounts, at: float) -> None:
        """Take over what an earlier supervisor offered, of which only this is known."""
        self.count_from(seen, knows_all=False)
        self.held = held
        if not is_nothing(held):
            self.add((), held, at).n = seen

    def count_from(self, seen: int, *, knows_all: bool) -> None:
        """Continue at a number, because the experiment ignores lower ones.

        Without ``knows_all``, an earlier supervisor made offers up to that number.
        """
        self.n = seen
        self.unknown_until = 0 if knows_all else seen + 1
        self.is_stale = True

    def report(self, seen: int, held: ResourceAmounts, at: float) -> bool:
        """Process the experiment's report; return whether it is new."""
        if (seen, held) == self._reported:
            return False
        self._reported = seen, held
        self.held = held
        while len(self._sent) > 1 and self._sent[1][0] <= seen:
            self._sent.pop(0)
        if self.unknown_until and seen >= self.unknown_until:
            self.unknown_until = 0
            more = minus(held, total(grant.amounts for grant in (*self.grants, *self.leaving)))
            if not is_nothing(more):  # begun meanwhile, by an offer of the earlier supervisor
                self.add((), more, at).n = seen
        self._match(seen, at)
        return True

    # --- small things -----------------------------------------------------------------------------

    def _changed(self) -> None:
        self.offer = total(grant.amounts for grant in self.grants)
        self.is_stale = True

    def _split(self, grant: SlotGrant, used: ResourceAmounts) -> None:
        """Split a slot into the part that a trial uses and an unassigned rest."""
        among = self.grants if grant in self.grants else self.leaving
        spare = SlotGrant(self, (), minus(grant.amounts, used), grant.at)
        spare.n = grant.n
        grant.request, grant.amounts, grant.is_held = (), used, True
        among.append(spare)

    def _match(self, seen: int, at: float) -> None:
        """Find out which slots have trials; leaving slots without one are removed."""
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
            if not is_nothing(used):  # used by a trial other than the intended one
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
