"""`Accounts`: what each owner holds, what it is entitled to, and how far it is behind that.

Within one priority the owners share what they hold together: by weight, and no one gets more than
it can use, so that what one leaves goes to the others (max-min fairness; of things without GPUs
what counts is an owner's *dominant share*: Ghodsi et al., "Dominant Resource Fairness: Fair
Allocation of Multiple Resource Types", NSDI 2011). GPUs are whole and trials long, so at most
moments nobody holds just that. Therefore each account carries its *lag*: GPU seconds that it was
entitled to and did not have, less those that it had beyond (as in the service curves of fair
queueing: Parekh and Gallager, 1993). Held within some minutes of the owner's share, the lag bounds
how far any window of hours is from it.

Who has nothing waiting saves nothing up; and a lag fades, slowly against the hours that count.
"""

from __future__ import annotations

import math
from collections.abc import Iterable
from typing import Final

from tunemq_scheduler.farm.allocation.books.amounts import TOLERANCE

#: A lag fades to a third in this time.
_FADES_S: Final = 6 * 3600.0
#: A lag of so many seconds of one's own share is worth as much as that share itself.
_WEIGHS_S: Final = 600.0


class ShareAccount:
    """An owner's, within one priority and one pool (`loads`).

    Attributes:
        held: what it has; ``leaving`` is what it will soon not have any more, of that.
        claimed: what is being cleared for it.
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
        """What it has, less what is leaving."""
        return self.held - self.leaving

    @property
    def coming(self) -> float:
        """What it will have once what is being cleared is."""
        return self.staying + self.claimed

    @property
    def behind_s(self) -> float:
        """So many seconds of its share it has missed; below 0 had beyond it."""
        return self.lag / self.entitled if self.entitled > TOLERANCE else 0.0

    @property
    def standing(self) -> float:
        """The lowest is the next to get something."""
        return (self.coming - self.lag / _WEIGHS_S) / self.weight

    def advance(self, seconds: float) -> None:
        """Time went on."""
        self.lag *= math.exp(-seconds / _FADES_S)
        self.lag += (self.entitled - self.held) * seconds
        if not self.has_waiting:
            self.lag = min(self.lag, 0.0)


def share_out(accounts: Iterable[ShareAccount]) -> None:
    """Say what each is entitled to of what they hold together."""
    open_ones = sorted(accounts, key=lambda one: one.demand / one.weight)
    left = sum(one.held for one in open_ones)
    weights = sum(one.weight for one in open_ones)
    for one in open_ones:
        one.entitled = min(one.demand, left * one.weight / weights)
        left -= one.entitled
        weights -= one.weight
