"""`ShareAccount`: what an owner holds, what it is entitled to, and how far behind it is.

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
from collections.abc import Iterable
from typing import Final

from tunemq_scheduler.farm.allocation.books.amounts import TOLERANCE

#: A lag decays to a third in this time.
_FADES_S: Final = 6 * 3600.0
#: A lag of this many seconds of an owner's share counts as much as the share itself.
_WEIGHS_S: Final = 600.0


class ShareAccount:
    """An owner's account, within one priority and one pool (`loads`).

    Attributes:
        held: what it has, including ``leaving``, which it will lose soon.
        claimed: the amount being cleared for it.
        demand: what it would have if there were enough.
        entitled: its share of what all hold.
        lag: seconds times amount.
    """

    __slots__ = (
        "claimed",
        "demand",
        "entitled",
        "has_waiting",
        "held",
        "lag",
        "leaving",
        "weight",
    )

    def __init__(self, weight: float) -> None:
        self.weight = weight
        self.held = self.leaving = self.claimed = self.demand = self.entitled = self.lag = 0.0
        self.has_waiting = False

    @property
    def staying(self) -> float:
        """What it has, without the leaving part."""
        return self.held - self.leaving

    @property
    def coming(self) -> float:
        """What it will have once its claimed slots are clear."""
        return self.staying + self.claimed

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
