"""`SimulatedTrialExecutor`: an executor in virtual time, with latency and dying nodes.

It is a real executor, not a mock: the real loop, runner and algorithms run on it, with thousands of
nodes. Nothing waits: the clock jumps to the next event.
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
    """Settings of the simulated farm.

    Attributes:
        nodes: the number of nodes at the start.
        resources: the resources of each node.
        gpus: the GPUs of each node, one node's after the other's.
        latency_s: seconds from a trial process to the scheduler, and back.
        deaths: the fraction of nodes that die once, at a random time in ``death_window_s``; each
            comes back as a new node instance after ``downtime_s``.
        lease_s: seconds until a death is noticed.
        uploads: how checkpoints reach the store.
        horizon_error: steps to run past each horizon; only to show that tests detect this error.
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
        """The names of the nodes."""
        return [f"node-{number:05d}" for number in range(self.nodes)]

    def joined(
        self, instance_id: str, node: str, withheld: Mapping[str, str] | None = None
    ) -> m.NodeJoined:
        """Return the registration of a node instance."""
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
    """Run trials in virtual time; pass its `clock` to the loop."""

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
        """Register all nodes at time 0, and schedule the deaths."""
        self._processes.open(plan)
        rng = random.Random(f"{self.settings.seed}/deaths")
        for number, node in enumerate(self.settings.names()):
            self._join(node, 1)
            if rng.random() < self.settings.deaths:
                self._time.after(rng.uniform(0, self.settings.death_window_s), self._die, number)

    def clock(self) -> float:
        """Return the virtual time in seconds."""
        return self._time.now

    # --- orders: they arrive one latency later ----------------------------------------------------

    def start_trial(self, order: StartTrial) -> None:
        """Start the trial when the order arrives."""
        self._order(self._start, order)

    def continue_training(self, order: ContinueTrial) -> None:
        """Let the trial continue when the order arrives."""
        self._order(self._processes.run_on, order.trial, order.attempt, order.run_until)

    def stop_trial(self, order: StopTrial) -> None:
        """End the trial when the order arrives."""
        self._order(self._processes.end, order.trial, order.attempt)

    def pause_trial(self, order: PauseTrial) -> None:
        """Save and end the trial when the order arrives."""
        self._order(self._processes.pause, order.trial, order.attempt)

    def release_trial(self, order: ReleaseTrial) -> None:
        """Do nothing: this executor keeps nothing of the trial."""

    def drop_node(self, order: DropNode) -> None:
        """Do nothing: the node is already dead."""

    def _order(self, action: Callable[..., None], *arguments: Any) -> None:
        self._time.after(self.settings.latency_s, action, *arguments)

    def _start(self, order: StartTrial) -> None:
        if order.instance_id in self._numbers:
            self._processes.start(order)

    # --- events -----------------------------------------------------------------------------------

    def poll(self, timeout: float) -> list[m.Event]:
        """Return the next events, all of one moment; none after ``timeout`` virtual seconds."""
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
        """Number a node's events now; they arrive one latency later."""
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
