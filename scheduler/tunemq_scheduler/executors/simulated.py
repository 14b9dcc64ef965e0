"""`SimulatedTrialExecutor`: a backend in virtual time, with latency and dying nodes.

It is a real backend, not a mock: the same loop, runner and algorithms run on it, thousands of nodes
wide. Nothing waits: the clock jumps to the next thing that happens.
"""

from __future__ import annotations

import heapq
import random
from collections.abc import Callable
from typing import Any

import msgspec

from tunemq_scheduler.core.commands import (
    ContinueTrial,
    DropNode,
    PauseTrial,
    ReleaseTrial,
    StartTrial,
    StopTrial,
)
from tunemq_scheduler.executors.executor import TrialExecutor
from tunemq_scheduler.executors.simulated_uploads import SimulatedUploads, UploadSettings
from tunemq_scheduler.plan import ExperimentPlan
from tunemq_shared import messages as m
from tunemq_shared.conditions import Condition, Horizon, first_that_holds
from tunemq_shared.packing import unpack_config

#: (config, step) -> the metrics that the simulated trainable reports.
Metrics = Callable[[dict[str, Any], int], dict[str, Any]]
#: (config, step) -> seconds that this step takes.
StepTime = Callable[[dict[str, Any], int], float]


class SimulationSettings(msgspec.Struct, frozen=True, kw_only=True):
    """The simulated farm.

    Attributes:
        nodes: how many there are at the start.
        resources: what each offers.
        latency_s: from a host to the scheduler, and from the scheduler to a host.
        deaths: the share of nodes that die once, at a random time in ``death_window_s``; each comes
            back as a new incarnation after ``downtime_s``.
        lease_s: how long it takes until a death is noticed.
        uploads: how checkpoints come to the store.
        horizon_error: run on so many steps past each horizon; only to show that tests would notice.
    """

    nodes: int = 1
    resources: dict[str, float] = msgspec.field(default_factory=lambda: {"cpu": 1.0})
    latency_s: float = 0.0
    seed: int = 0
    deaths: float = 0.0
    death_window_s: float = 100.0
    downtime_s: float = 10.0
    lease_s: float = 6.0
    uploads: UploadSettings = UploadSettings()
    horizon_error: int = 0


class _Host:
    """A simulated trial host: steps in virtual time until told otherwise."""

    __slots__ = (
        "alive",
        "config",
        "elapsed",
        "epoch",
        "is_pausing",
        "node",
        "order",
        "run_until",
        "saved",
        "shown",
        "step",
        "unsaved",
        "waits",
    )

    def __init__(self, order: StartTrial, config: dict[str, Any], step: int) -> None:
        self.order = order
        self.config = config
        self.node = order.incarnation
        self.epoch = order.epoch
        self.step = self.saved = step
        self.run_until: Horizon = order.run_until
        self.elapsed = 0.0
        self.alive = True
        self.shown: dict[str, Any] = {}
        self.waits = False
        self.is_pausing = False
        #: Whether the trial is done after the save for which there is no room yet; None without.
        self.unsaved: bool | None = None


class SimulatedTrialExecutor(TrialExecutor):
    """Runs trials in virtual time; `now` is the clock to give to the loop."""

    def __init__(self, settings: SimulationSettings, metrics: Metrics, step_time: StepTime) -> None:
        self.settings = settings
        self.now = 0.0
        self._metrics = metrics
        self._step_time = step_time
        self._happenings: list[tuple[float, int, Callable[..., None], tuple[Any, ...]]] = []
        self._order = 0
        self._hosts: dict[tuple[str, int], _Host] = {}
        self._numbers: dict[str, int] = {}
        self._arrived: list[m.Event] = []
        self._stop: tuple[Condition, ...] = ()
        self._checkpoint_frequency = 0
        self._checkpoint_at_end = False
        self._uploads_waiting = 1
        self._uploads = SimulatedUploads(
            settings.uploads,
            settings.seed,
            at=self._at,
            report=self._report,
            on_room=self._go_on_saving,
            on_given_up=self._fail,
        )

    def open(self, plan: ExperimentPlan) -> None:
        """Let all nodes join at time 0, and plan the deaths."""
        self._stop = plan.stop
        self._checkpoint_frequency = plan.checkpoint_frequency
        self._checkpoint_at_end = plan.checkpoint_at_end
        self._uploads_waiting = plan.uploads_waiting
        rng = random.Random(f"{self.settings.seed}/deaths")
        for number in range(self.settings.nodes):
            self._join(f"node-{number:05d}", 1)
            if rng.random() < self.settings.deaths:
                self._at(rng.uniform(0, self.settings.death_window_s), self._die, number)

    def clock(self) -> float:
        """The virtual time in seconds."""
        return self.now

    # --- orders: they arrive one latency later ----------------------------------------------------

    def start_trial(self, order: StartTrial) -> None:
        """Host the trial when the order arrives."""
        self._at(self.settings.latency_s, self._start, order)

    def continue_training(self, order: ContinueTrial) -> None:
        """Let it run on when the order arrives."""
        self._at(self.settings.latency_s, self._continue, order)

    def stop_trial(self, order: StopTrial) -> None:
        """End it when the order arrives."""
        self._at(self.settings.latency_s, self._end_on_order, order)

    def pause_trial(self, order: PauseTrial) -> None:
        """Save and end it when the order arrives."""
        self._at(self.settings.latency_s, self._pause_on_order, order)

    def release_trial(self, order: ReleaseTrial) -> None:
        """Nothing is kept of it here."""

    def drop_node(self, order: DropNode) -> None:
        """The node is dead already."""

    # --- facts ------------------------------------------------------------------------------------

    def poll(self, timeout: float) -> list[m.Event]:
        """What happens next, at one moment; nothing after ``timeout`` virtual seconds of quiet."""
        limit = self.now + timeout
        while not self._arrived:
            if not self._happenings or self._happenings[0][0] > limit:
                self.now = limit
                return []
            self._happen()
        while self._happenings and self._happenings[0][0] <= self.now:
            self._happen()
        events, self._arrived = self._arrived, []
        return events

    def _happen(self) -> None:
        self.now, _, action, arguments = heapq.heappop(self._happenings)
        action(*arguments)

    def _at(self, delay: float, action: Callable[..., None], *arguments: Any) -> None:
        self._order += 1
        heapq.heappush(self._happenings, (self.now + delay, self._order, action, arguments))

    def _report(self, node: str, *events: m.NodeEvent) -> None:
        """A node's events, numbered when they are made, arrive one latency later."""
        first = self._numbers[node] + 1
        self._numbers[node] += len(events)
        batch = m.BatchRead(node, first, self._numbers[node], f"{self._order}-0")
        if self.settings.latency_s:
            self._at(self.settings.latency_s, self._arrive, batch, *events)
        else:
            self._arrive(batch, *events)

    def _arrive(self, *events: m.Event) -> None:
        self._arrived.extend(events)

    # --- hosts ------------------------------------------------------------------------------------

    def _start(self, order: StartTrial) -> None:
        if order.incarnation not in self._numbers:
            return
        ref, damaged = self._uploads.usable(order)
        started = m.TrialStarted(
            order.trial, order.epoch, 1, order.incarnation, "127.0.0.1", self.now
        )
        self._report(order.incarnation, started, *damaged)
        host = _Host(order, unpack_config(order.config), 0 if ref is None else ref.step)
        self._hosts[order.trial, order.epoch] = host
        if ref is None and order.restore:
            self._report(host.node, *self._failed(host, "restore", "no checkpoint is usable"))
        else:
            self._next_step(host)

    def _next_step(self, host: _Host) -> None:
        seconds = self._step_time(host.config, host.step + 1)
        self._at(seconds, self._step, host, seconds)

    def _step(self, host: _Host, seconds: float) -> None:
        if not host.alive:
            return
        host.step += 1
        host.elapsed += seconds
        metrics = self._metrics(host.config, host.step)
        host.shown = {**metrics, "training_iteration": host.step, "time_total_s": host.elapsed}
        done = first_that_holds(self._stop, host.shown) is not None
        events: list[m.NodeEvent] = [self._result(host, metrics, seconds, done=done)]
        frequency = self._checkpoint_frequency
        if (frequency and host.step % frequency == 0) or (done and self._checkpoint_at_end):
            if self._uploads.waiting(host.order.trial, host.node) > self._uploads_waiting:
                host.unsaved = done
                events.append(m.TrialWaits(host.order.trial, host.epoch, "save", "simulated"))
                self._report(host.node, *events)
                return
            events.append(self._checkpoint(host))
        self._finish_step(host, done, events)

    def _go_on_saving(self, trial: str, node: str) -> None:
        """There is room for one checkpoint more of this trial on this node."""
        for host in list(self._hosts.values()):
            if (host.order.trial, host.node) == (trial, node) and host.unsaved is not None:
                done = host.unsaved
                self._finish_step(host, done, self._saved_at_last(host))

    def _saved_at_last(self, host: _Host) -> list[m.NodeEvent]:
        """What is stated when a host gets the room that it waited for."""
        if host.unsaved is None:
            return []
        host.unsaved = None
        return [m.TrialWaits(host.order.trial, host.epoch, "", ""), self._checkpoint(host)]

    def _finish_step(self, host: _Host, done: bool, events: list[m.NodeEvent]) -> None:
        if done:
            events.append(m.TrialFinished(host.order.trial, host.epoch))
            events.append(self._gone(host))
        elif host.is_pausing:
            events += self._paused(host)
        self._report(host.node, *events)
        if host.alive:
            host.shown["training_iteration"] -= self.settings.horizon_error
            is_new = host.step > host.order.last_step  # nobody decides about a repeated step
            if is_new and first_that_holds(host.run_until, host.shown) is not None:
                host.waits = True
            else:
                self._next_step(host)

    def _result(
        self, host: _Host, metrics: dict[str, Any], seconds: float, *, done: bool
    ) -> m.ResultReported:
        return m.ResultReported(
            trial=host.order.trial,
            epoch=host.epoch,
            step=host.step,
            metrics=metrics,
            timestamp=self.now,
            time_this_iter_s=seconds,
            time_total_s=host.elapsed,
            time_since_restore=host.elapsed,
            iterations_since_restore=host.step,
            done=done,
        )

    def _checkpoint(self, host: _Host) -> m.CheckpointWritten | m.CheckpointCommitted:
        host.saved = host.step
        return self._uploads.save(host.order.trial, host.epoch, host.step, host.node)

    def _fail(self, trial: str, node: str, reason: str) -> None:
        """The host of this trial on this node cannot keep its checkpoints."""
        for host in list(self._hosts.values()):
            if (host.order.trial, host.node) == (trial, node):
                self._report(host.node, *self._failed(host, "storage", reason))

    def _failed(self, host: _Host, kind: str, reason: str) -> list[m.NodeEvent]:
        failed = m.TrialFailed(host.order.trial, host.epoch, kind, reason, "", self.now)
        return [failed, self._gone(host)]

    def _continue(self, order: ContinueTrial) -> None:
        host = self._hosts.get((order.trial, order.epoch))
        if host is not None:
            host.run_until = order.run_until
            if host.waits:
                host.waits = False
                self._next_step(host)

    def _end_on_order(self, order: StopTrial) -> None:
        host = self._hosts.get((order.trial, order.epoch))
        if host is not None:
            self._report(host.node, *self._saved_at_last(host), self._gone(host))

    def _pause_on_order(self, order: PauseTrial) -> None:
        """A host that is within a step ends it first, and states its result."""
        host = self._hosts.get((order.trial, order.epoch))
        if host is None:
            return
        if host.waits or host.unsaved is not None:
            self._report(host.node, *self._saved_at_last(host), *self._paused(host))
        else:
            host.is_pausing = True

    def _paused(self, host: _Host) -> list[m.NodeEvent]:
        events: list[m.NodeEvent] = [self._checkpoint(host)] if host.step > host.saved else []
        return [*events, m.TrialPaused(host.order.trial, host.epoch), self._gone(host)]

    def _gone(self, host: _Host) -> m.HostFreed:
        host.alive = False
        del self._hosts[host.order.trial, host.epoch]
        return m.HostFreed(host.order.trial, host.epoch)

    # --- nodes ------------------------------------------------------------------------------------

    def _join(self, node: str, life: int) -> None:
        incarnation = f"{node}.{life}"
        self._numbers[incarnation] = 0
        joined = m.NodeJoined(incarnation, node, node, "127.0.0.1", self.settings.resources)
        self._arrived.append(joined)

    def _die(self, number: int) -> None:
        node = f"node-{number:05d}"
        incarnation = f"{node}.1"
        del self._numbers[incarnation]
        for key, host in list(self._hosts.items()):
            if host.node == incarnation:
                host.alive = False
                del self._hosts[key]
        self._uploads.node_died(incarnation)
        lost = m.NodeLost(incarnation, "its lease ran out")
        self._at(self.settings.lease_s, self._arrive, lost)
        self._at(self.settings.lease_s + self.settings.downtime_s, self._join, node, 2)
