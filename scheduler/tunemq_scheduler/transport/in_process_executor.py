"""`InProcessExecutor`: runs trials in the script's own process, for ``fit(debug=True)``.

The experiment's loop runs in another thread. The trial runs in the thread that called `serve`,
which is the main one, so that pdb and breakpoints can use the terminal. There is no node and no
Redis, and a trial cannot be killed: a step that hangs blocks the script.
"""

from __future__ import annotations

import os
import queue
import socket
import time
from collections import deque
from contextlib import closing

from tunemq_scheduler.base.experiment_plan import ExperimentPlan
from tunemq_scheduler.core.commands import ContinueTrial, PauseTrial, StartTrial, StopTrial
from tunemq_scheduler.transport.trial_executor import TrialExecutor
from tunemq_shared.checkpoints.open_store import open_store
from tunemq_shared.checkpoints.store_sink import StoreSink
from tunemq_shared.code.config_packing import unpack_config
from tunemq_shared.protocol import messages as m
from tunemq_shared.trainable.run_trial import run_trial
from tunemq_shared.trainable.trainable_blobs import load
from tunemq_shared.trial.session import TrialSession
from tunemq_shared.trial.trial_channel import TrialChannel

_INSTANCE_ID = "this-process"


class InProcessExecutor(TrialExecutor):
    """An executor with one slot: this process.

    Args:
        resources: what the slot offers.
    """

    def __init__(self, resources: dict[str, float]) -> None:
        self._resources = resources
        self._event_queue: queue.SimpleQueue[m.NodeEvent | None] = queue.SimpleQueue()
        self._starts: queue.SimpleQueue[m.TrialOrder | None] = queue.SimpleQueue()
        self._notices: queue.SimpleQueue[m.TrialOrder] = queue.SimpleQueue()
        self._plan: ExperimentPlan | None = None
        self._joined = False
        self._said = 0
        #: The trial and attempt that were started last.
        self._newest: tuple[str, int] | None = None

    def open(self, plan: ExperimentPlan) -> None:
        """Store the experiment's plan."""
        self._plan = plan

    def serve(self) -> None:
        """Run the trials that the loop starts, one after the other, until `close`."""
        while (order := self._starts.get()) is not None:
            self._host(order)

    # --- the loop's side --------------------------------------------------------------------------

    def start_trial(self, order: StartTrial) -> None:
        """Pass the trial to `serve`."""
        if self._plan is not None:
            self._newest = order.trial, order.attempt
            start = self._plan.trial_spec(order)
            self._starts.put(m.TrialOrder(order.trial, order.attempt, order.run_until, start=start))

    def continue_training(self, order: ContinueTrial) -> None:
        """Let the trial continue to a new horizon."""
        self._notices.put(m.TrialOrder(order.trial, order.attempt, order.run_until))

    def stop_trial(self, order: StopTrial) -> None:
        """Ask the trial to end at its next report."""
        self._notices.put(m.TrialOrder(order.trial, order.attempt, (), stop=True))

    def pause_trial(self, order: PauseTrial) -> None:
        """Ask the trial to save and end at its next report."""
        self._notices.put(m.TrialOrder(order.trial, order.attempt, (), pause=True))

    def poll(self, timeout: float) -> list[m.Event]:
        """Return the trial's events since the last call."""
        events: deque[m.Event] = deque()
        if not self._joined:
            self._joined = True
            host = socket.gethostname()
            return [m.NodeJoined(_INSTANCE_ID, host, host, "127.0.0.1", self._resources)]
        try:
            while True:
                read_event = self._event_queue.get(timeout=0.0 if events else timeout)
                if read_event is None:
                    break
                events.append(read_event)
        except queue.Empty:
            pass
        if not events:
            return []
        first, self._said = self._said + 1, self._said + len(events)
        return [m.BatchRead(_INSTANCE_ID, first, self._said, "0-0"), *events]

    def wake(self) -> None:
        """Make `poll` return."""
        self._event_queue.put(None)

    def close(self, *, now: bool = False) -> None:
        """Let `serve` return when the running trial ends, at its next report at the latest."""
        del now  # a thread cannot be killed
        if self._newest is not None:
            self._notices.put(m.TrialOrder(*self._newest, (), stop=True))
        self._starts.put(None)

    # --- the trial's side -------------------------------------------------------------------------

    def _host(self, order: m.TrialOrder) -> None:
        start = order.start
        if start is None:
            return
        host = socket.gethostname()
        started = m.TrialStarted(
            order.trial, order.attempt, os.getpid(), host, "127.0.0.1", time.time()
        )
        self._event_queue.put(started)
        channel = _Queues(self._event_queue, self._notices)
        with closing(open_store(start.store)) as store:
            sink = StoreSink(store, os.path.basename(start.folder))
            sink.make_folder(start.folder)
            session = TrialSession(order, unpack_config(start.config), channel, sink)
            run_trial(load(start.code), session)
        self._event_queue.put(m.SlotFreed(order.trial, order.attempt))


class _Queues(TrialChannel):
    """The trial's channel to the loop's thread."""

    def __init__(
        self,
        read_events: queue.SimpleQueue[m.NodeEvent | None],
        notices: queue.SimpleQueue[m.TrialOrder],
    ) -> None:
        self._event_queue = read_events
        self._notices = notices

    def send(self, event: m.NodeEvent) -> None:
        self._event_queue.put(event)

    def saves(self, *, is_saving: bool) -> None:
        """Say nothing: the loop waits for the trial's end in any case."""

    def poll(self) -> m.TrialOrder | None:
        newest = None
        try:
            while True:
                newest = self._notices.get_nowait()
        except queue.Empty:
            return newest

    def wait(self) -> m.TrialOrder:
        order = self._notices.get()
        return self.poll() or order
