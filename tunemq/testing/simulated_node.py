"""`SimulatedNode`: a node that keeps the rules of real ones.

It obeys the newest assignment and no older one, starts no epoch a second time while it is listed,
numbers what it states, and keeps every event until it is told that it stands in the journal.
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

#: A trial's id and an epoch of it.
AttemptId = tuple[str, int]
#: How long a node waits for the answer to a batch before it sends that again.
_ANSWER_S: Final = 0.5


class SimulatedNode:
    """One instance of a node.

    Args:
        append: takes a batch that has come through, and the generation of the wire that the node
            knows; says whether there is still that one.
        generation: of the wire when it began.
        on_start: told of each host that is about to start.

    Attributes:
        is_alive: False once it has died.
        cuts: how many things keep it from the wire; none while it is reachable.
        taken: the newest assignment that it has obeyed, (term, version).
        withheld: the devices on which it begins nothing, and why.
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
        #: What is not known to be journalled, and the number of the first of it.
        self._outbox: deque[m.NodeEvent] = deque()
        self._first = 1
        #: The number of the next event to send, and whether a batch is under way.
        self._next = 1
        self._is_sending = False

    @property
    def is_reachable(self) -> bool:
        """Whether it can be heard, and hears."""
        return self.is_alive and not self.cuts

    def use_again(self, uuid: str) -> None:
        """A device is not withheld any more."""
        self.withheld = {one: why for one, why in self.withheld.items() if one != uuid}

    def said(self, number: int) -> m.NodeEvent | None:
        """An event that it stated; None if it has forgotten that, or not stated so many."""
        place = number - self._first
        return self._outbox[place] if 0 <= place < len(self._outbox) else None

    # --- orders -----------------------------------------------------------------------------------

    def obey(self, assignment: m.Assignment) -> None:
        """Make what is what the assignment says, if it is newer than the last."""
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
            elif order.kill and key not in self._over:  # it never was there
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
        if order.stop:  # it is over before it began
            self._over.add((order.trial, order.attempt))
            self.state(m.SlotFreed(order.trial, order.attempt))
            return
        if start.devices.keys() & self.withheld:  # the order crossed the news on its way
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

    # --- facts ------------------------------------------------------------------------------------

    def state(self, *events: m.NodeEvent) -> None:
        """State what happened; it is sent as soon as no batch is under way."""
        for event in events:
            if type(event) is m.SlotFreed:
                self._running.discard((event.trial, event.attempt))
                self._over.add((event.trial, event.attempt))
        self._outbox.extend(events)
        self.send()

    def send(self) -> None:
        """Send what has not been sent, if nothing is under way and the wire is there."""
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
        """The wire is a new one: whatever was sent into the old may have gone with it."""
        self._generation = generation
        self.rewind()

    def rewind(self, number: int = 1) -> None:
        """Send this event, and all behind it, again."""
        self._next = min(self._next, max(number, self._first))
        self.send()

    def forget(self, last: int) -> None:
        """All events up to this one are journalled."""
        while self._outbox and self._first <= last:
            self._outbox.popleft()
            self._first += 1
        self._next = max(self._next, self._first)
