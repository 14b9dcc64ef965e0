"""`SimulatedNode`: a node that follows the rules of real nodes.

It obeys only the newest assignment, starts an attempt only once while the assignment lists it,
numbers its events, and keeps every event until the scheduler acknowledges it.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Mapping, Sequence
from itertools import islice
from typing import Final

from tunemq.testing.simulated_faults import SimulatedFaults
from tunemq.testing.simulated_trial_processes import SimulatedTrialProcesses
from tunemq.testing.virtual_time import VirtualTime
from tunemq_scheduler.core.commands import StartTrial
from tunemq_shared.protocol import messages as m

#: A trial's ID and the number of an attempt.
AttemptId = tuple[str, int]
#: Seconds that a node waits for the answer to a batch before it resends it.
_ANSWER_S: Final = 0.5


class SimulatedNode:
    """One node instance.

    Args:
        append: receives a batch that arrived, and the Redis generation that the node knows; returns
            whether that is the current one.
        generation: the Redis generation at the start.
        on_start: called for each trial process that is about to start.

    Attributes:
        is_alive: False once it has died.
        cuts: the number of faults that separate it from Redis; 0 while it is reachable.
        taken: the newest assignment that it obeyed, (term, version).
        withheld: the devices on which it starts nothing, and why.
    """

    def __init__(
        self,
        instance_id: str,
        node: str,
        *,
        time: VirtualTime,
        faults: SimulatedFaults,
        processes: SimulatedTrialProcesses,
        append: Callable[[int, m.BatchRead, Sequence[m.NodeEvent]], bool],
        generation: int,
        on_start: Callable[[StartTrial], None],
    ) -> None:
        self.instance_id, self.node = instance_id, node
        self.is_alive = True
        self.cuts = 0
        self.skew = faults.skew()
        self.confirmed = (0, 0)
        self.withheld: Mapping[str, str] = {}
        self._time, self._faults, self._processes = time, faults, processes
        self._append, self._on_start = append, on_start
        self._generation = generation
        self._running: set[AttemptId] = set()
        self._over: set[AttemptId] = set()
        self._starts: dict[AttemptId, m.TrialSpec] = {}
        #: The unacknowledged events, and the number of the first.
        self._outbox: deque[m.NodeEvent] = deque()
        self._first = 1
        #: The number of the next event to send, and whether a batch is in transit.
        self._next = 1
        self._is_sending = False

    @property
    def is_reachable(self) -> bool:
        """Whether it can exchange messages with Redis."""
        return self.is_alive and not self.cuts

    def use_again(self, uuid: str) -> None:
        """Stop withholding a device."""
        self.withheld = {one: why for one, why in self.withheld.items() if one != uuid}

    def said(self, number: int) -> m.NodeEvent | None:
        """Return a reported event; None if it was forgotten or never reported."""
        place = number - self._first
        return self._outbox[place] if 0 <= place < len(self._outbox) else None

    # --- orders -----------------------------------------------------------------------------------

    def obey(self, assignment: m.Assignment) -> None:
        """Carry out an assignment if it is newer than the last."""
        version = (assignment.term, assignment.version)
        if version <= self.confirmed:
            return
        self.confirmed = version
        wanted = {(order.trial, order.attempt): order for order in assignment.orders}
        self._over &= wanted.keys()
        self._starts = {key: start for key, start in self._starts.items() if key in wanted}
        for key in self._running - wanted.keys():
            self._processes.kill(*key)
        for key, order in wanted.items():
            if order.start is not None:
                self._starts[key] = order.start
            if key in self._running:
                self._tell(order)
            elif order.kill and key not in self._over:  # it never started
                self.state(m.SlotFreed(*key))
            elif key not in self._over and key in self._starts:
                self._begin(order, self._starts[key])

    def _tell(self, order: m.TrialOrder) -> None:
        if order.kill:
            self._processes.kill(order.trial, order.attempt)
        elif order.stop:
            self._processes.end(order.trial, order.attempt)
        elif order.pause:
            self._processes.pause(order.trial, order.attempt)
        else:
            self._processes.run_on(order.trial, order.attempt, order.run_until)

    def _begin(self, order: m.TrialOrder, start: m.TrialSpec) -> None:
        if order.stop:  # it ends before it starts
            self._over.add((order.trial, order.attempt))
            self.state(m.SlotFreed(order.trial, order.attempt))
            return
        if start.devices.keys() & self.withheld:  # the order crossed that report
            freed = m.SlotFreed(order.trial, order.attempt)
            self.state(m.TrialPaused(order.trial, order.attempt), freed)
            return
        begun = StartTrial(
            trial=order.trial,
            attempt=order.attempt,
            instance_id=self.instance_id,
            number=start.trial_number,
            config=start.config,
            resources=start.resources,
            run_until=order.run_until,
            last_step=start.last_step,
            restore=start.restore,
            devices=start.devices,
        )
        self._on_start(begun)
        self._running.add((order.trial, order.attempt))
        self._processes.start(begun)
        if order.pause:
            self._processes.pause(order.trial, order.attempt)

    # --- events -----------------------------------------------------------------------------------

    def state(self, *events: m.NodeEvent) -> None:
        """Report events; they are sent as soon as no batch is in transit."""
        for event in events:
            if type(event) is m.SlotFreed:
                self._running.discard((event.trial, event.attempt))
                self._over.add((event.trial, event.attempt))
        self._outbox.extend(events)
        self.send()

    def send(self) -> None:
        """Send unsent events if no batch is in transit and Redis is reachable."""
        last = self._first + len(self._outbox) - 1
        if self._is_sending or self._next > last or not self.is_reachable:
            return
        events = tuple(islice(self._outbox, self._next - self._first, None))
        batch = m.BatchRead(self.instance_id, self._next, last, "")
        self._next = last + 1
        self._is_sending = True
        delay = self._faults.delay()
        if self._faults.is_lost():
            self._time.after(delay + _ANSWER_S, self._not_appended, batch.first)
            return
        self._time.after(delay, self._arrive, self._generation, batch, events)
        again = self._faults.doubled_after()
        if again is not None:
            self._time.after(delay + again, self._append, self._generation, batch, events)

    def _arrive(self, generation: int, batch: m.BatchRead, events: Sequence[m.NodeEvent]) -> None:
        if self._append(generation, batch, events):
            self._is_sending = False
            self.send()
        else:
            self._time.after(_ANSWER_S, self._not_appended, batch.first)

    def _not_appended(self, first: int) -> None:
        self._is_sending = False
        self.rewind(first)

    def enter(self, generation: int) -> None:
        """Handle a new Redis generation: everything sent to the old one may be lost."""
        self._generation = generation
        self.rewind()

    def rewind(self, number: int = 1) -> None:
        """Resend this event and all later ones."""
        self._next = min(self._next, max(number, self._first))
        self.send()

    def forget(self, last: int) -> None:
        """Drop all events up to this one: they are journalled."""
        while self._outbox and self._first <= last:
            self._outbox.popleft()
            self._first += 1
        self._next = max(self._next, self._first)
