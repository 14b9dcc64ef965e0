"""`DesiredState`: the trials that one node should run, and the version it confirmed. Pure."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from operator import attrgetter
from typing import Final

import msgspec

from tunemq_shared.base.errors import ConfigError
from tunemq_shared.protocol.message_limits import (
    NAME_CHARACTERS,
    ORDERS_BYTES,
    START_BYTES,
    STARTS_BYTES,
)
from tunemq_shared.protocol.messages import (
    PROTOCOL_VERSION,
    Assignment,
    TrialOrder,
    TrialSpec,
    encode,
)

#: The most start data of an experiment to keep for a node.
_KEPT_BYTES: Final = 512 * 2**20
#: This much start data may be sent again with each change until the node confirms it.
_LITTLE_BYTES: Final = 2**18
#: After these lease renewals without a confirmation an assignment is sent again: it may be lost
#: with the consumer that had read it, and a repeated one is harmless. One with more start data may
#: still be on its way.
_RENEWALS_UNTIL_LOST: Final = 1
_RENEWALS_UNTIL_LARGE_LOST: Final = 3

_by_size: Final = attrgetter("size")
_by_age: Final = attrgetter("since")


@dataclass(slots=True)
class _Known:
    """A trial order and its start data.

    ``order_size`` is the encoded length of the order without ``start``, ``size`` that of ``start``,
    ``since`` the last version before this order, and ``start_version`` the first version that
    contained ``start``.
    """

    order: TrialOrder
    order_size: int
    start: TrialSpec
    size: int
    since: int
    start_version: int | None = None

    def is_sent(self, confirmed: int) -> bool:
        """Whether the start data were sent and not confirmed: they are sent with each version."""
        return self.start_version is not None and confirmed < self.start_version

    def told(self, confirmed: int) -> TrialOrder:
        """Return the order for an assignment."""
        start = self.start if self.is_sent(confirmed) else None
        return msgspec.structs.replace(self.order, start=start)


class DesiredState:
    """Collects a node's orders until they are sent as one assignment.

    Every assignment is complete. For each experiment it either lists all orders or tells the node
    to leave that experiment's trial processes unchanged. Two assignments differ only in start data:
    an order contains it until the node has confirmed a version that did. Start data that does not
    fit into one assignment waits until earlier start data is confirmed.

    Args:
        instance_id: the node instance.
        term: the scheduler's term; a node ignores lower ones.
        confirmed: the version that the node took last, from any scheduler. New versions continue
            from it, so that a node can compare versions across experiments.
        absent: event keys of experiments that may have trials on the node but have not sent their
            orders yet.
        store: the farm's store, which the node should try.
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
        #: Whether the node needs a new assignment now, and whether it has a change that can wait
        #: for the next one.
        self.is_changed = False
        self.is_outdated = False
        #: Whether start data waits until the node confirms other start data.
        self._has_waiting = False
        #: Lease renewals seen since the last assignment was sent.
        self.renewals_unconfirmed = 0
        for events_key in absent:
            self.orders(events_key).start_over()

    @property
    def stamp(self) -> str:
        """The newest version, in the format of the reply to the node."""
        return f"{self.term}:{self.version}"

    @property
    def is_confirmed(self) -> bool:
        """Whether the node has taken the newest version."""
        return self._confirmed >= self.version

    @property
    def is_due(self) -> bool:
        """Whether a new assignment is to be sent now.

        If much start data is on its way, that waits until the node confirms it: the node could not
        take the same large data as fast as changes follow each other.
        """
        return self.is_changed and (not self._is_large or self.is_lost)

    @property
    def is_lost(self) -> bool:
        """Whether the newest assignment may not have reached the node."""
        renewals = _RENEWALS_UNTIL_LARGE_LOST if self._is_large else _RENEWALS_UNTIL_LOST
        return not self.is_confirmed and self.renewals_unconfirmed >= renewals

    @property
    def _is_large(self) -> bool:
        return self._bytes_on_their_way(self._known()) > _LITTLE_BYTES

    @property
    def is_empty(self) -> bool:
        """Whether there are no orders."""
        return all(orders.is_empty for orders in self._orders.values())

    @property
    def trial_count(self) -> int:
        """How many trials the node should run."""
        return sum(orders.trial_count for orders in self._orders.values())

    def is_shared(self, events_key: str) -> bool:
        """Whether another experiment has trials on the node, or has not sent its orders yet."""
        others = (one for key, one in self._orders.items() if key != events_key)
        return any(one.waits or not one.is_empty for one in others)

    @property
    def says_nothing(self) -> bool:
        """Whether no known experiment has sent its orders yet."""
        orders = self._orders
        return bool(orders) and all(one.waits for one in orders.values())

    def orders(self, events_key: str) -> DesiredTrials:
        """Return the orders of one experiment."""
        orders = self._orders.get(events_key)
        if orders is None:
            orders = self._orders[events_key] = DesiredTrials(self)
        return orders

    def drop(self, events_key: str) -> bool:
        """Remove an experiment's orders; return whether the node may run some of its trials."""
        orders = self._orders.pop(events_key, None)
        is_used = orders is not None and (orders.waits or not orders.is_empty)
        if is_used or self.is_outdated:
            self.is_changed = True
        return is_used

    def start_over(self) -> None:
        """Discard all orders and confirmations; every experiment sends its orders again."""
        for orders in self._orders.values():
            orders.start_over()
        self._confirmed = 0

    def confirm(self, term: int, version: int) -> None:
        """Record that the node has taken this version; one that was never sent is ignored."""
        if term == self.term and self._confirmed < version <= self.version:
            self._confirmed = version
            self.is_changed |= self._has_waiting

    def lose_confirmation(self) -> None:
        """Forget what the node confirmed, so that it gets everything again after a reset."""
        self._confirmed = 0
        self.is_changed = True
        for known in self._known():
            known.start_version = None

    def next_assignment(self) -> Assignment:
        """Return a new version with all orders."""
        self.version += 1
        self.is_changed = self.is_outdated = False
        self._add_starts()
        return self.same_assignment()

    def same_assignment(self) -> Assignment:
        """Return the current version again, for a node that has not confirmed it."""
        self.renewals_unconfirmed = 0
        listed: list[TrialOrder] = []
        untouched: list[str] = []
        for events_key, orders in self._orders.items():
            if orders.waits:
                untouched.append(events_key)
            else:
                listed += (known.told(self._confirmed) for known in orders.known())
        return Assignment(
            PROTOCOL_VERSION,
            self.instance_id,
            self.term,
            self.version,
            tuple(listed),
            tuple(untouched),
            self._store,
        )

    def _known(self) -> list[_Known]:
        return [known for orders in self._orders.values() for known in orders.known()]

    def _bytes_on_their_way(self, known: Iterable[_Known]) -> int:
        return sum(one.size for one in known if one.is_sent(self._confirmed))

    def _add_starts(self) -> None:
        """Add the start data that fits to the newest version.

        First the oldest, so that it does not wait for ever; then the smallest, so that large
        configurations of one search delay no others.
        """
        known = self._known()
        room = STARTS_BYTES - self._bytes_on_their_way(known)
        waiting = sorted((one for one in known if one.start_version is None), key=_by_size)
        for one in (*sorted(waiting, key=_by_age)[:1], *waiting):
            if one.start_version is None and one.size <= room:
                one.start_version = self.version
                room -= one.size
        self._has_waiting = any(one.start_version is None for one in waiting)


class DesiredTrials:
    """The orders of one experiment for a node."""

    def __init__(self, desired_state: DesiredState) -> None:
        self._desired_state = desired_state
        self._wanted: dict[str, _Known] = {}
        #: Trial processes that the node may have and should end, by trial and attempt.
        self._unwanted: dict[tuple[str, int], _Known] = {}
        #: The encoded length of all orders, without their start data.
        self._bytes = 0
        #: The encoded length of their start data.
        self._starts_bytes = 0
        #: Whether the node may run trials that this experiment has not listed yet.
        self.waits = False

    @property
    def trial_count(self) -> int:
        """How many trials the node should run."""
        return len(self._wanted)

    @property
    def is_empty(self) -> bool:
        """Whether there are no orders."""
        return not (self._wanted or self._unwanted)

    def put(self, order: TrialOrder) -> None:
        """Add an order about a trial; with ``start``, it replaces all earlier ones.

        Without ``start``, it changes a known order; an order about another attempt is ignored. A
        kill order is kept beside the trial's next attempt.

        Raises:
            ConfigError: The order, or all of them together, are too long for an assignment.
        """
        bare = order if order.start is None else msgspec.structs.replace(order, start=None)
        order_size = len(encode(bare))
        if order.start is not None:
            self._add(order, order_size, order.start)
        elif (known := self._find(order.trial, order.attempt)) is not None:
            self._count(order_size, known)
            known.order, known.order_size = order, order_size
        else:
            return
        self._desired_state.is_changed = True

    def release(self, trial: str, attempt: int) -> None:
        """Forget a finished trial; the node learns of it with its next assignment."""
        for known in (self._unwanted.pop((trial, attempt), None), self._find(trial, attempt)):
            if known is not None:
                self._bytes -= known.order_size
                self._starts_bytes -= known.size
                self._desired_state.is_outdated = True
        if self._find(trial, attempt) is not None:
            del self._wanted[trial]

    def start_over(self) -> None:
        """Discard all orders; until `settle` the node's trial processes stay unchanged."""
        self._wanted.clear()
        self._unwanted.clear()
        self._bytes = self._starts_bytes = 0
        self.waits = True

    def settle(self) -> None:
        """Mark the orders as complete."""
        if self.waits:
            self.waits = False
            self._desired_state.is_changed = True

    def known(self) -> tuple[_Known, ...]:
        """Return all orders."""
        return (*self._wanted.values(), *self._unwanted.values())

    def _add(self, order: TrialOrder, order_size: int, start: TrialSpec) -> None:
        size, since = len(encode(start)), self._desired_state.version
        if size > START_BYTES:
            raise ConfigError(
                f"the start of trial {order.trial[:NAME_CHARACTERS]} has {size:,} bytes, and"
                f" {START_BYTES:,} are possible."
            )
        added = _Known(order, order_size, start, size, since)
        key = order.trial, order.attempt
        replaced = self._unwanted.get(key) if order.kill else self._wanted.get(order.trial)
        starts_bytes = self._starts_bytes + size - (replaced.size if replaced is not None else 0)
        if starts_bytes > _KEPT_BYTES:
            raise ConfigError(
                f"the configurations of this search's trials on one node have {starts_bytes:,}"
                f" bytes, and {_KEPT_BYTES:,} are possible: pass large values with"
                " tune.with_parameters(), or let fewer trials run at once."
            )
        self._count(order_size, replaced)
        self._starts_bytes = starts_bytes
        if order.kill:
            self._unwanted[key] = added
        else:
            self._wanted[order.trial] = added

    def _count(self, order_size: int, replaced: _Known | None) -> None:
        """Count an order that replaces another one, or none."""
        size = self._bytes + order_size - (replaced.order_size if replaced is not None else 0)
        if size > ORDERS_BYTES:
            raise ConfigError(
                f"the orders of this search to one node have {size:,} bytes, and {ORDERS_BYTES:,}"
                " are possible: fewer of its trials may run there at once."
            )
        self._bytes = size

    def _find(self, trial: str, attempt: int) -> _Known | None:
        known = self._wanted.get(trial)
        return known if known is not None and known.order.attempt == attempt else None
