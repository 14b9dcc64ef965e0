"""`RelayedExecutor`: the backend of an experiment whose farm belongs to a supervisor."""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Iterable, Mapping
from typing import Final

import msgspec

from tunemq_scheduler.base.experiment_plan import ExperimentPlan
from tunemq_scheduler.core.allotments import OfferUsage
from tunemq_scheduler.experiment.experiment_view import ExperimentView
from tunemq_scheduler.experiment.search_run import SearchRun
from tunemq_scheduler.farm.common.copy_wait import CopyWaitingExecutor
from tunemq_scheduler.farm.ipc import ipc_messages as r
from tunemq_scheduler.farm.ipc.status_reporter import SearchStatusReporter
from tunemq_scheduler.farm.ipc.supervisor_connection import SupervisorConnection
from tunemq_scheduler.transport.desired_state_orders import DesiredStateExecutor
from tunemq_scheduler.transport.node_batches import EventBatch, events_of
from tunemq_shared.objects.store_traffic import TRAFFIC, StoreTraffic
from tunemq_shared.protocol import messages as m

#: How often the supervisor is told how far the search is, where that changed.
_STATUS_EVERY_S: Final = 0.5


class RelayedExecutor(CopyWaitingExecutor, DesiredStateExecutor):
    """Sends orders to the supervisor, which has the wire, and gets facts from there.

    Args:
        line: to the supervisor; closed by its owner.
    """

    def __init__(self, line: SupervisorConnection) -> None:
        CopyWaitingExecutor.__init__(self)
        DesiredStateExecutor.__init__(self)
        self._line = line
        self._is_attached = False
        self._turn: list[r.IpcOrder] = []
        #: How many facts of the wire the loop was given, and how many of those are handled as far
        #: as the supervisor knows.
        self._given, self._handled = 0, -1
        #: The last event that was read of nodes that were not told yet how far theirs are kept.
        self._read: dict[str, int] = {}
        self._is_anything_released = False
        self._results = 0
        self._asked: deque[r.IpcRequest] = deque()
        self._notes = r.TransportNotices()
        self._news: list[str] = []
        #: Answers the supervisor; once the search is known.
        self._teller: SearchStatusReporter | None = None
        self._usage: OfferUsage | None = None
        self._status: r.SearchStatus | None = None
        self._status_due = 0.0
        self._store_use = r.StoreUse()
        #: Whether nodes were left to themselves, for another run.
        self.is_left = False

    def watch(self, search: SearchRun, view: ExperimentView) -> None:
        """Tell the supervisor of this search, and answer for it."""
        self._teller = SearchStatusReporter(search, view)
        search.records.also_tell = self._tell_news

    # --- orders -----------------------------------------------------------------------------------

    def open(self, plan: ExperimentPlan) -> None:
        """Know the experiment; the supervisor does with the first turn, or `reattach`."""
        self._plan = plan

    def reattach(
        self,
        nodes: Iterable[m.NodeJoined],
        away: Iterable[m.NodeJoined],
        accepted: Mapping[str, int],
    ) -> None:
        """Go on with the nodes of the run before."""
        self._is_attached = True
        key = self._opened_plan.events_key
        self._line.send(r.ExperimentAttached(key, tuple(nodes), tuple(away), dict(accepted)))

    def on_step_end(self) -> None:
        """Send the turn's orders."""
        # Before it is attached there is nobody whom an order could be about.
        if self._turn and self._is_attached:
            self._line.send(r.TurnOrders(tuple(self._turn)))
        self._turn.clear()

    def _put(self, incarnation: str, order: m.TrialOrder) -> None:
        self._turn.append(r.PutTrialOrder(incarnation, order))

    def _release(self, incarnation: str, trial: str, epoch: int) -> None:
        self._turn.append(r.ReleaseOrder(incarnation, trial, epoch))

    def release_now(self, accepted: dict[str, int]) -> None:
        """Have nodes told how far their events are kept."""
        if self._is_attached:
            self._handled = self._given
            self._line.send(r.EventsAcknowledged(self._given, self._news_of(accepted)))

    def _news_of(self, accepted: dict[str, int]) -> dict[str, int]:
        """Only what the supervisor was not told: a turn costs what it had to do, on any farm."""
        if not self._is_anything_released:  # the run before may not have told nodes
            self._is_anything_released = True
            return dict(accepted)
        known = {node: accepted[node] for node in self._read if node in accepted}
        for node in [one for one, last in self._read.items() if accepted.get(one, last) >= last]:
            del self._read[node]
        return known

    # --- facts ------------------------------------------------------------------------------------

    def poll(self, timeout: float) -> list[m.Event]:
        """What nodes stated, and what was asked of this search meanwhile.

        Raises:
            SchedulerSuperseded: the supervisor has ended.
            WireError: an event of a node cannot be read.
        """
        if not self._is_attached:
            self.reattach((), (), {})
        if self._handled != self._given:
            self._handled = self._given
            self._line.send(r.EventsAcknowledged(self._given))
        deadline = time.monotonic() + timeout
        self._tell()
        while True:
            # Not while there are facts: an answer may have consequences, which come behind them.
            is_asked = self._answer()
            is_woken = self._line.wait(0.0 if is_asked else deadline - time.monotonic())
            self._line.check_known()
            self.do_copied()
            facts, stated = self._take()
            if facts or is_woken or is_asked or time.monotonic() >= deadline:
                self._given += stated
                return facts

    def pause(self, seconds: float) -> None:
        """Let time pass, and have the supervisor know that this process does not hang."""
        self._line.pause(seconds)

    def wake(self) -> None:
        """Make a waiting `poll` return at once; for any thread or signal handler."""
        self._line.wake()

    def _take(self) -> tuple[list[m.Event], int]:
        """What has come for the loop, and how many facts of the wire that was.

        Raises:
            WireError: an event of a node cannot be read.
        """
        facts: list[m.Event] = []
        stated = 0
        for message in self._line.take():
            match message:
                case r.NewEvents():
                    stated += len(message.facts)
                    for fact in message.facts:
                        if isinstance(fact, EventBatch):
                            self._read[fact.read.incarnation] = fact.read.last
                    events = events_of(message.facts)
                    self._results += sum(type(event) is m.ResultReported for event in events)
                    facts += events
                case r.NewOffers():
                    facts += message.offers
                case r.TransportNotices():
                    self._notes = message
                    self._news += message.news
                case r.IpcRequest():
                    self._asked.append(message)
                case _:
                    pass  # there is one job, and the line itself notes signs of life
        return facts, stated

    def _answer(self) -> bool:
        """Do what was asked for; whether anything was."""
        is_asked = bool(self._asked) and self._teller is not None
        while self._asked and self._teller is not None:
            self._line.send(self._teller.answer(self._asked.popleft()))
        return is_asked

    # --- what the supervisor is told --------------------------------------------------------------

    def _tell(self) -> None:
        if self._teller is None:
            return
        usage = self._teller.usage()
        if usage != self._usage:
            self._usage = usage
            self._line.send(r.OfferUsageUpdate(usage))
        now = time.monotonic()
        if now >= self._status_due:
            self._status_due = now + _STATUS_EVERY_S
            self._tell_status()

    def _tell_status(self) -> None:
        """Say how far the search is, unless that was said already."""
        if self._teller is None:
            return
        status = msgspec.structs.replace(self._teller.status(), results=self._results)
        timeless = msgspec.structs.replace(status, elapsed_s=0.0)
        if timeless != self._status:
            self._status = timeless
            self._line.send(status)
        seconds, size = self.copy_lag()
        traffic = TRAFFIC.so_far().plus(StoreTraffic(queue_bytes=size))
        use = r.StoreUse(traffic, self._teller.waiting_for_store(), seconds)
        if use != self._store_use:
            self._store_use = use
            self._line.send(use)

    def _tell_news(self, text: str) -> None:
        self._line.send(r.ExperimentNotices((text,)))

    # --- for people -------------------------------------------------------------------------------

    def notes(self) -> list[str]:
        """What holds on the wire."""
        return list(self._notes.notes)

    def news(self) -> list[str]:
        """What happened on the wire, and to the journal's copy."""
        news, self._news = self._news + self.copy_news(), []
        return news

    # --- the end ----------------------------------------------------------------------------------

    def close(self, *, now: bool = False) -> None:
        """Have all that still runs end, once the journal's copy has all."""
        if self.is_left:
            return
        if not now:
            self.end_copy()
        self._tell()  # what it holds no longer is free at once
        self._tell_status()
        self._line.send(self._teller.goodbye() if self._teller is not None else r.SearchEnded())
        self.is_left = True

    def leave(self) -> None:
        """Tell nobody: nodes go on, for whoever comes next."""
        self.is_left = True
