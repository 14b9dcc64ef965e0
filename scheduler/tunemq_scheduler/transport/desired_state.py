"""`DesiredState`: what one node instance is to host, and what of that it has confirmed. Pure."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass

import msgspec

from tunemq_shared.protocol.messages import PROTOCOL_VERSION, Assignment, TrialOrder, TrialSpec


@dataclass(slots=True)
class _Known:
    """An order about one trial, and how to start that; ``start_version`` first told it the node."""

    order: TrialOrder
    start: TrialSpec
    start_version: int | None = None

    def told(self, version: int, confirmed: int) -> TrialOrder:
        """It as part of an assignment: says how to start until the node has confirmed that."""
        if self.start_version is None:
            self.start_version = version
        start = None if confirmed >= self.start_version else self.start
        return msgspec.structs.replace(self.order, start=start)


class DesiredState:
    """Collects a node's orders until they are sent as one assignment.

    Every assignment is whole: of each experiment it has all orders, or it says that the hosts of
    that one are to be left as they are. All that differs between two of them is whether an order
    still says how to start its trial: it does until the node has confirmed a version that said so.

    Args:
        term: the scheduler's; a node ignores lower ones.
        confirmed: the version that the node took last, whoever sent it: ours go on from there, so
            that a node can compare versions across experiments.
        absent: the experiments, by the keys of their events, of which the node may host something
            that we have not said.
        store: the farm's, which the node is to try.
    """

    def __init__(
        self,
        instance_id: str,
        term: int,
        confirmed: int = 0,
        absent: Iterable[str] = (),
        store: str = "",
    ) -> None:
        self.instance_id = instance_id
        self.term = term
        self.version = confirmed
        self._store = store
        self._confirmed = confirmed
        self._orders: dict[str, DesiredTrials] = {}
        #: Whether the node must hear of a change now, and whether something may wait for the next
        #: change.
        self.is_changed = False
        self.is_outdated = False
        #: Renewals of the node's lease that were seen since the last assignment was sent.
        self.renewals_unconfirmed = 0
        for events_key in absent:
            self.orders(events_key).start_over()

    @property
    def stamp(self) -> str:
        """The newest version as the reply to the node says it."""
        return f"{self.term}:{self.version}"

    @property
    def is_confirmed(self) -> bool:
        """Whether the node has taken the newest version."""
        return self._confirmed >= self.version

    @property
    def is_empty(self) -> bool:
        """Whether there are no orders."""
        return all(orders.is_empty for orders in self._orders.values())

    @property
    def trial_count(self) -> int:
        """How many trials the node is to host."""
        return sum(orders.trial_count for orders in self._orders.values())

    def is_shared(self, events_key: str) -> bool:
        """Whether another experiment has trials on the node, or has still to say that."""
        others = (one for key, one in self._orders.items() if key != events_key)
        return any(one.waits or not one.is_empty for one in others)

    @property
    def says_nothing(self) -> bool:
        """Whether every experiment that is known has still to say what it wants."""
        orders = self._orders
        return bool(orders) and all(one.waits for one in orders.values())

    def orders(self, events_key: str) -> DesiredTrials:
        """Those of one experiment."""
        orders = self._orders.get(events_key)
        if orders is None:
            orders = self._orders[events_key] = DesiredTrials(self)
        return orders

    def drop(self, events_key: str) -> bool:
        """Want nothing of an experiment any more; returns whether the node may host some of it."""
        orders = self._orders.pop(events_key, None)
        is_used = orders is not None and (orders.waits or not orders.is_empty)
        if is_used or self.is_outdated:
            self.is_changed = True
        return is_used

    def start_over(self) -> None:
        """Whatever was wanted and confirmed is void; orders that follow say all that is wanted."""
        for orders in self._orders.values():
            orders.start_over()
        self._confirmed = 0

    def confirm(self, term: int, version: int) -> None:
        """The node has taken this version."""
        if term == self.term and version > self._confirmed:
            self._confirmed = version

    def lose_confirmation(self) -> None:
        """What the node took last is unknown (the wire was reset): tell it everything again."""
        self._confirmed = 0
        self.is_changed = True

    def next_assignment(self) -> Assignment:
        """A new version with all orders."""
        self.version += 1
        self.is_changed = self.is_outdated = False
        return self.same_assignment()

    def same_assignment(self) -> Assignment:
        """The current version once more, for a node that has not confirmed it."""
        self.renewals_unconfirmed = 0
        listed: list[TrialOrder] = []
        untouched: list[str] = []
        for events_key, orders in self._orders.items():
            if orders.waits:
                untouched.append(events_key)
            else:
                listed += orders.listed(self.version, self._confirmed)
        return Assignment(
            PROTOCOL_VERSION,
            self.instance_id,
            self.term,
            self.version,
            tuple(listed),
            tuple(untouched),
            self._store,
        )


class DesiredTrials:
    """What one experiment wants a node to host."""

    def __init__(self, desired_state: DesiredState) -> None:
        self._desired_state = desired_state
        self._wanted: dict[str, _Known] = {}
        #: What it may host of which nothing is to be left, by trial and epoch.
        self._unwanted: dict[tuple[str, int], _Known] = {}
        #: Whether the node may host what we have not said, until the experiment has said all.
        self.waits = False

    @property
    def trial_count(self) -> int:
        """How many trials the node is to host."""
        return len(self._wanted)

    @property
    def is_empty(self) -> bool:
        """Whether the node is to host nothing."""
        return not (self._wanted or self._unwanted)

    def put(self, order: TrialOrder) -> None:
        """Have the node do this about a trial; with ``start``, whatever it was told before.

        Without it the order changes one that is known; about another attempt it is ignored.
        What is to be killed stands beside the trial's next attempt.
        """
        if order.start is not None:
            if order.kill:
                self._unwanted[order.trial, order.attempt] = _Known(order, order.start)
            else:
                self._wanted[order.trial] = _Known(order, order.start)
        elif (known := self._find(order.trial, order.attempt)) is not None:
            known.order = order
        else:
            return
        self._desired_state.is_changed = True

    def release(self, trial: str, attempt: int) -> None:
        """Forget a trial that is over; the node may hear of it with the next change."""
        if self._unwanted.pop((trial, attempt), None) is not None:
            self._desired_state.is_outdated = True
        if self._find(trial, attempt) is not None:
            del self._wanted[trial]
            self._desired_state.is_outdated = True

    def start_over(self) -> None:
        """What was wanted is void; until `settle` the node's hosts stay as they are."""
        self._wanted.clear()
        self._unwanted.clear()
        self.waits = True

    def settle(self) -> None:
        """All that is wanted has been said."""
        if self.waits:
            self.waits = False
            self._desired_state.is_changed = True

    def listed(self, version: int, confirmed: int) -> Iterator[TrialOrder]:
        """All of them, for an assignment; ``confirmed`` is the version that the node has."""
        for known in (*self._wanted.values(), *self._unwanted.values()):
            yield known.told(version, confirmed)

    def _find(self, trial: str, attempt: int) -> _Known | None:
        known = self._wanted.get(trial)
        return known if known is not None and known.order.attempt == attempt else None
