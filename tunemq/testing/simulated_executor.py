"""`SimulatedTrialExecutor`: a backend in virtual time, with latency and dying nodes.

It is a real backend, not a mock: the same loop, runner and algorithms run on it, thousands of nodes
wide. Nothing waits: the clock jumps to the next thing that happens.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Mapping
from typing import Any

import msgspec

from tunemq.testing.simulated_trial_processes import Metrics, SimulatedTrialProcesses, StepTime
from tunemq.testing.simulated_uploads import UploadSettings
from tunemq.testing.virtual_time import VirtualTime
from tunemq_scheduler.base.experiment_plan import ExperimentPlan
from tunemq_scheduler.core.commands import (
    ContinueTrial,
    DropNode,
    PauseTrial,
    ReleaseTrial,
    StartTrial,
    StopTrial,
)
from tunemq_scheduler.transport.trial_executor import TrialExecutor
from tunemq_shared.protocol import messages as m


class SimulationSettings(msgspec.Struct, frozen=True, kw_only=True):
    """The simulated farm.

    Attributes:
        nodes: how many there are at the start.
        resources: what each offers.
        gpus: the GPUs of each, one node's after the other's.
        latency_s: from a host to the scheduler, and from the scheduler to a host.
        deaths: the share of nodes that die once, at a random time in ``death_window_s``; each comes
            back as a new attempt after ``downtime_s``.
        lease_s: how long it takes until a death is noticed.
        uploads: how checkpoints come to the store.
        horizon_error: run on so many steps past each horizon; only to show that tests would notice.
    """

    nodes: int = 1
    resources: dict[str, float] = msgspec.field(default_factory=lambda: {"cpu": 1.0})
    gpus: tuple[tuple[m.Gpu, ...], ...] = ()
    latency_s: float = 0.0
    seed: int = 0
    deaths: float = 0.0
    death_window_s: float = 100.0
    downtime_s: float = 10.0
    lease_s: float = 6.0
    uploads: UploadSettings = UploadSettings()
    horizon_error: int = 0

    def names(self) -> list[str]:
        """Of the nodes."""
        return [f"node-{number:05d}" for number in range(self.nodes)]

    def joined(
        self, instance_id: str, node: str, withheld: Mapping[str, str] | None = None
    ) -> m.NodeJoined:
        """What an instance of a node says of itself."""
        gpus = dict(zip(self.names(), self.gpus, strict=True)) if self.gpus else {}
        return m.NodeJoined(
            instance_id,
            node,
            node,
            "127.0.0.1",
            self.resources,
            gpus.get(node, ()),
            withheld=dict(withheld or {}),
        )


class SimulatedTrialExecutor(TrialExecutor):
    """Runs trials in virtual time; `clock` is the one to give to the loop."""

    def __init__(self, settings: SimulationSettings, metrics: Metrics, step_time: StepTime) -> None:
        self.settings = settings
        self._time = VirtualTime()
        self._numbers: dict[str, int] = {}
        self._arrived: list[m.Event] = []
        self._processes = SimulatedTrialProcesses(
            self._time,
            metrics,
            step_time,
            self._report,
            uploads=settings.uploads,
            seed=settings.seed,
            horizon_error=settings.horizon_error,
        )

    def open(self, plan: ExperimentPlan) -> None:
        """Let all nodes join at time 0, and plan the deaths."""
        self._processes.open(plan)
        rng = random.Random(f"{self.settings.seed}/deaths")
        for number, node in enumerate(self.settings.names()):
            self._join(node, 1)
            if rng.random() < self.settings.deaths:
                self._time.after(rng.uniform(0, self.settings.death_window_s), self._die, number)

    def clock(self) -> float:
        """The virtual time in seconds."""
        return self._time.now

    # --- orders: they arrive one latency later ----------------------------------------------------

    def start_trial(self, order: StartTrial) -> None:
        """Host the trial when the order arrives."""
        self._order(self._start, order)

    def continue_training(self, order: ContinueTrial) -> None:
        """Let it run on when the order arrives."""
        self._order(self._processes.run_on, order.trial, order.attempt, order.run_until)

    def stop_trial(self, order: StopTrial) -> None:
        """End it when the order arrives."""
        self._order(self._processes.end, order.trial, order.attempt)

    def pause_trial(self, order: PauseTrial) -> None:
        """Save and end it when the order arrives."""
        self._order(self._processes.pause, order.trial, order.attempt)

    def release_trial(self, order: ReleaseTrial) -> None:
        """Nothing is kept of it here."""

    def drop_node(self, order: DropNode) -> None:
        """The node is dead already."""

    def _order(self, action: Callable[..., None], *arguments: Any) -> None:
        self._time.after(self.settings.latency_s, action, *arguments)

    def _start(self, order: StartTrial) -> None:
        if order.instance_id in self._numbers:
            self._processes.start(order)

    # --- facts ------------------------------------------------------------------------------------

    def poll(self, timeout: float) -> list[m.Event]:
        """What happens next, at one moment; nothing after ``timeout`` virtual seconds of quiet."""
        time = self._time
        limit = time.now + timeout
        while not self._arrived:
            if not time.has_due(limit):
                time.pass_to(limit)
                return []
            time.happen()
        time.pass_to(time.now)
        events, self._arrived = self._arrived, []
        return events

    def _report(self, node: str, *events: m.NodeEvent) -> None:
        """A node's events, numbered when they are made, arrive one latency later."""
        first = self._numbers[node] + 1
        self._numbers[node] += len(events)
        batch = m.BatchRead(node, first, self._numbers[node], f"{self._time.asked}-0")
        if self.settings.latency_s:
            self._time.after(self.settings.latency_s, self._arrive, batch, *events)
        else:
            self._arrive(batch, *events)

    def _arrive(self, *events: m.Event) -> None:
        self._arrived.extend(events)

    # --- nodes ------------------------------------------------------------------------------------

    def _join(self, node: str, life: int) -> None:
        instance_id = f"{node}.{life}"
        self._numbers[instance_id] = 0
        if life > 1:
            dead = m.NodeLost(f"{node}.{life - 1}", "its node was started again", is_dead=True)
            self._arrived.append(dead)
        self._arrived.append(self.settings.joined(instance_id, node))

    def _die(self, number: int) -> None:
        node = f"node-{number:05d}"
        instance_id = f"{node}.1"
        del self._numbers[instance_id]
        self._processes.node_died(instance_id)
        lost = m.NodeLost(instance_id, "its lease ran out")
        self._time.after(self.settings.lease_s, self._arrive, lost)
        back = self.settings.lease_s + self.settings.downtime_s
        self._time.after(back, self._join, node, 2)
