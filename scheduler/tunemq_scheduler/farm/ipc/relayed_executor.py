"""`RelayedExecutor`: the trial executor of an experiment process; works through the supervisor."""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Iterable, Mapping
from typing import Final

import msgspec

from tunemq_scheduler.base.experiment_plan import ExperimentPlan
from tunemq_scheduler.core.shared_amounts import OfferUsage
from tunemq_scheduler.experiment.experiment_view import ExperimentView
from tunemq_scheduler.experiment.search_run import SearchRun
from tunemq_scheduler.farm.ipc import ipc_messages as r
from tunemq_scheduler.farm.ipc.experiment_side import SupervisorConnection
from tunemq_scheduler.farm.ipc.status_reporter import SearchStatusReporter
from tunemq_scheduler.journal.journal_copy import JournalCopy
from tunemq_scheduler.journal.journal_writer import Journal
from tunemq_scheduler.transport.desired_state_executor import DesiredStateExecutor
from tunemq_scheduler.transport.event_batches import EventBatch, events_of
from tunemq_shared.base.failure_text import shortened
from tunemq_shared.objects.store_traffic import TRAFFIC, StoreTraffic
from tunemq_shared.protocol import messages as m
from tunemq_shared.protocol.message_limits import LINE_CHARACTERS, STARTS_BYTES

#: How often changes of the status are reported to the supervisor.
_STATUS_EVERY_S: Final = 0.5


class RelayedExecutor(DesiredStateExecutor):
    """Sends orders to the supervisor, which is connected to Redis, and gets events from it.

    If nodes are to keep their events until the journal's copy in a store has them, acknowledgements
    wait for that.

    Args:
        connection: to the supervisor; closed by its owner.
    """

    def __init__(self, connection: SupervisorConnection) -> None:
        super().__init__()
        self._connection = connection
        self._is_attached = False
        self._turn: list[r.IpcOrder] = []
        self._starts_bytes = 0
        #: How many events the loop has received, and how many of them the supervisor knows as
        #: handled.
        self._given, self._handled = 0, -1
        #: The last event read from each node that was not acknowledged yet.
        self._read: dict[str, int] = {}
        self._is_anything_acknowledged = False
        self._results = 0
        self._asked: deque[r.IpcRequest] = deque()
        self._notes = r.TransportNotices()
        self._notices: list[str] = []
        #: Answers the supervisor; None until the search is known.
        self._status_reporter: SearchStatusReporter | None = None
        self._usage: OfferUsage | None = None
        self._status: r.SearchStatus | None = None
        self._status_due = 0.0
        self._store_use = r.StoreUse()
        #: Whether nodes keep their trials for another run.
        self.is_left = False
        self._journal: Journal | None = None
        self._copy: JournalCopy | None = None
        self._releases_copied = False
        #: Acknowledgements that wait until the copy has this turn: the next one, and the newest.
        #: More than these two would add nothing.
        self._acknowledgements: deque[tuple[int, dict[str, int]]] = deque()

    def watch(self, search: SearchRun, view: ExperimentView) -> None:
        """Report this search to the supervisor, and answer its requests."""
        self._status_reporter = SearchStatusReporter(search, view)
        search.dispatcher.also_notify = self._send_notices

    # --- orders -----------------------------------------------------------------------------------

    def open(self, plan: ExperimentPlan) -> None:
        """Store the plan; the first turn, or `reattach`, announces it to the supervisor."""
        self._plan = plan

    def reattach(
        self,
        nodes: Iterable[m.NodeJoined],
        away: Iterable[m.NodeJoined],
        acknowledged: Mapping[str, int],
    ) -> None:
        """Continue with the nodes of the previous run."""
        self._is_attached = True
        key = self._opened_plan.events_key
        self._connection.send(
            r.ExperimentAttached(key, tuple(nodes), tuple(away), dict(acknowledged))
        )

    def on_step_end(self) -> None:
        """Send the turn's orders."""
        # Before it is attached there are no nodes for orders.
        if self._turn and self._is_attached:
            self._connection.send(r.TurnOrders(tuple(self._turn)))
        self._turn.clear()
        self._starts_bytes = 0

    def _put(self, instance_id: str, order: m.TrialOrder) -> None:
        if order.start is not None:
            size = len(m.encode(order.start))
            if self._starts_bytes + size > STARTS_BYTES:  # else the frame could be too long
                self.on_step_end()
            self._starts_bytes += size
        self._turn.append(r.PutTrialOrder(instance_id, order))

    def _release(self, instance_id: str, trial: str, attempt: int) -> None:
        self._turn.append(r.ReleaseOrder(instance_id, trial, attempt))

    def _acknowledge_now(self, acknowledged: dict[str, int]) -> None:
        """Let the supervisor acknowledge events to the nodes."""
        if self._is_attached:
            self._handled = self._given
            self._connection.send(r.EventsAcknowledged(self._given, self._notices_of(acknowledged)))

    def _notices_of(self, acknowledged: dict[str, int]) -> dict[str, int]:
        """Return only new acknowledgements, so that a large farm does not slow down each turn."""
        if not self._is_anything_acknowledged:  # the previous run may not have informed nodes
            self._is_anything_acknowledged = True
            return dict(acknowledged)
        known = {node: acknowledged[node] for node in self._read if node in acknowledged}
        for node in [
            one for one, last in self._read.items() if acknowledged.get(one, last) >= last
        ]:
            del self._read[node]
        return known

    # --- the journal's copy -----------------------------------------------------------------------

    def follow(self, journal: Journal, copy: JournalCopy | None, *, releases: bool) -> None:
        """Let acknowledgements follow the journal, or its copy.

        Args:
            journal: the experiment's journal.
            copy: its copy in the store, if there is one.
            releases: whether acknowledgements wait for the copy.
        """
        self._journal, self._copy, self._releases_copied = journal, copy, releases

    def acknowledge(self, acknowledged: dict[str, int]) -> None:
        """Tell nodes how far their events are journalled, or copied."""
        if self._journal is None or self._copy is None or not self._releases_copied:
            self._acknowledge_now(acknowledged)
            return
        if len(self._acknowledgements) > 1:
            self._acknowledgements.pop()
        self._acknowledgements.append((self._journal.turn, dict(acknowledged)))
        self.do_copied()

    def do_copied(self) -> None:
        """Send the acknowledgements whose turns are in the copy."""
        if self._copy is None:
            return
        while self._acknowledgements and self._acknowledgements[0][0] <= self._copy.turn:
            self._acknowledge_now(self._acknowledgements.popleft()[1])

    # --- events -----------------------------------------------------------------------------------

    def poll(self, timeout: float) -> list[m.Event]:
        """Return the events of nodes, and answer requests to this search meanwhile.

        Raises:
            SchedulerSuperseded: the supervisor has ended.
            TransportError: an event of a node cannot be decoded.
        """
        if not self._is_attached:
            self.reattach((), (), {})
        if self._handled != self._given:
            self._handled = self._given
            self._connection.send(r.EventsAcknowledged(self._given))
        deadline = time.monotonic() + timeout
        self._tell()
        while True:
            # Not while there are events: an answer may have effects, which come after them.
            is_asked = self._answer()
            is_woken = self._connection.wait(0.0 if is_asked else deadline - time.monotonic())
            self._connection.check_known()
            self.do_copied()
            read_events, num_events = self._take()
            if read_events or is_woken or is_asked or time.monotonic() >= deadline:
                self._given += num_events
                return read_events

    def pause(self, seconds: float) -> None:
        """Wait for this many seconds, while reporting that this process does not hang."""
        self._connection.pause(seconds)

    def wake(self) -> None:
        """Make a waiting `poll` return at once; for any thread or signal handler."""
        self._connection.wake()

    def _take(self) -> tuple[list[m.Event], int]:
        """Return the events that arrived, and how many of them came from the transport.

        Raises:
            TransportError: an event of a node cannot be decoded.
        """
        read_events: list[m.Event] = []
        num_events = 0
        for message in self._connection.take():
            match message:
                case r.NewEvents():
                    num_events += len(message.read_events)
                    for read_event in message.read_events:
                        if isinstance(read_event, EventBatch):
                            self._read[read_event.read.instance_id] = read_event.read.last
                    events = events_of(message.read_events)
                    self._results += sum(type(event) is m.ResultReported for event in events)
                    read_events += events
                case r.NewOffers():
                    read_events += message.offers
                case r.TransportNotices():
                    self._notes = message
                    self._notices += message.notices
                case r.IpcRequest():
                    self._asked.append(message)
                case _:
                    pass  # there is one job, and the connection handles lease proofs
        return read_events, num_events

    def _answer(self) -> bool:
        """Answer the requests; return whether there were any."""
        is_asked = bool(self._asked) and self._status_reporter is not None
        while self._asked and self._status_reporter is not None:
            self._connection.send(self._status_reporter.answer(self._asked.popleft()))
        return is_asked

    # --- reports to the supervisor ----------------------------------------------------------------

    def _tell(self, *, is_last: bool = False) -> None:
        """Report the use of offers and the progress of the search, as far as they changed."""
        if self._status_reporter is None:
            return
        usage = self._status_reporter.usage()
        if usage != self._usage:
            self._usage = usage
            self._connection.send(r.OfferUsageUpdate(usage))
        now = time.monotonic()
        if now < self._status_due and not is_last:
            return
        self._status_due = now + _STATUS_EVERY_S
        status = msgspec.structs.replace(self._status_reporter.status(), results=self._results)
        if status != self._status:
            self._status = status
            self._connection.send(status)
        seconds, size = 0.0, 0
        if self._copy is not None:
            seconds, size = self._copy.behind_s, self._copy.behind_bytes
        traffic = TRAFFIC.so_far().plus(StoreTraffic(queue_bytes=size))
        use = r.StoreUse(traffic, self._status_reporter.waiting_for_store(), seconds)
        if use != self._store_use:
            self._store_use = use
            self._connection.send(use)

    def _send_notices(self, text: str) -> None:
        self._connection.send(r.ExperimentNotices((shortened(text, LINE_CHARACTERS),)))

    # --- for people -------------------------------------------------------------------------------

    def notes(self) -> list[str]:
        """Return current conditions of the transport."""
        return list(self._notes.notes)

    def notices(self) -> list[str]:
        """Return recent incidents of the transport."""
        notices, self._notices = self._notices, []
        return notices

    # --- the end ----------------------------------------------------------------------------------

    def close(self, *, now: bool = False) -> None:
        """End the search's running trials, once the journal's copy is complete."""
        if self.is_left:
            return
        if not now and self._copy is not None:
            self._copy.close()
            self.do_copied()
        self._tell(is_last=True)  # frees its slots at once
        self._connection.send(
            self._status_reporter.search_ended()
            if self._status_reporter is not None
            else r.SearchEnded()
        )
        self.is_left = True

    def report_over(self) -> None:
        """Report a search that was over before this run."""
        self._tell(is_last=True)
        if self._status_reporter is not None:
            said = self._status_reporter.search_ended()
            self._connection.send(msgspec.structs.replace(said, is_interrupted=False))

    def leave(self) -> None:
        """Detach silently: nodes keep the trials for the next run."""
        self.is_left = True
