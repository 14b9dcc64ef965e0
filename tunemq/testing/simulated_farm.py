"""`SimulatedFarm`: nodes, their trial processes, the store and Redis, with their faults.

It runs in its virtual time whether or not a scheduler exists. Batches from nodes stay in the Redis
stream until they are journalled, or Redis is wiped.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterator, Sequence
from typing import Final

from tunemq.testing.simulated_executor import SimulationSettings
from tunemq.testing.simulated_faults import FaultSettings, SimulatedFaults
from tunemq.testing.simulated_node import SimulatedNode
from tunemq.testing.simulated_store import SimulatedStore
from tunemq.testing.simulated_trial_processes import Metrics, SimulatedTrialProcesses, StepTime
from tunemq.testing.virtual_time import VirtualTime
from tunemq_scheduler.base.experiment_plan import ExperimentPlan
from tunemq_scheduler.core.commands import StartTrial
from tunemq_shared.protocol import messages as m

#: Seconds until a node notices a new Redis generation.
_HEARS_S: Final = 0.5

#: A batch in the stream.
StreamItem = tuple[m.BatchRead, Sequence[m.NodeEvent]]


class SimulatedFarm:
    """Everything outside the scheduler.

    Args:
        on_start: called for each trial process that is about to start, with the orders of all that
            still hold a slot of that node.

    Attributes:
        nodes: every node instance that ever existed.
        current: the newest instance of each node.
        generation: the Redis generation; it grows with each wipe.
        is_open: whether Redis accepts batches: after a wipe it has no stream until a scheduler
            creates one.
    """

    def __init__(
        self,
        settings: SimulationSettings,
        faults: FaultSettings,
        metrics: Metrics,
        step_time: StepTime,
        *,
        on_start: Callable[[StartTrial, list[StartTrial]], None] = lambda _order, _held: None,
    ) -> None:
        self.settings = settings
        self.faults = SimulatedFaults(faults, settings.seed)
        self.time = VirtualTime()
        self.store = SimulatedStore()
        self.nodes: dict[str, SimulatedNode] = {}
        self.current: dict[str, str] = {}
        self.generation = 0
        self.is_open = True
        self._on_start = on_start
        self._stream: deque[tuple[int, StreamItem]] = deque()
        self._entries = 0
        self._lives: dict[str, int] = {}
        self._queued: dict[str, list[m.Assignment]] = {}
        self._processes = SimulatedTrialProcesses(
            self.time,
            metrics,
            step_time,
            self._state,
            uploads=settings.uploads,
            seed=settings.seed,
            store=self.store,
            cleanup_s=faults.cleanup_s,
            linger_s=faults.linger_s,
            skew=lambda instance_id: self.nodes[instance_id].skew,
        )

    def open(self, plan: ExperimentPlan) -> None:
        """Start all nodes, and schedule the faults."""
        self._processes.open(plan)
        names = self.settings.names()
        for name in names:
            self._boot(name)
        faults, rng = self.faults.settings, self.faults.rng
        for count, happens in (
            (faults.node_deaths, self._a_node_dies),
            (faults.process_deaths, self._a_process_dies),
            (faults.cut_offs, lambda: self._cut_off([rng.choice(names)], faults.cut_off_s)),
            (faults.outages, lambda: self._cut_off(names, faults.outage_s)),
            (faults.wipes, self.wipe),
            (faults.bad_devices, self._a_device_goes_bad),
        ):
            for moment in self.faults.moments(count):
                self.time.after(moment, happens)
        self.time.after(faults.until_s, self.calm)

    def calm(self) -> None:
        """Stop all further faults."""
        self.faults.are_on = False

    # --- Redis ------------------------------------------------------------------------------------

    def read(self, after: int) -> Iterator[tuple[int, StreamItem]]:
        """Yield the stream's entries after an entry."""
        if self._stream and self._stream[-1][0] > after:
            for number, entry in list(self._stream):
                if number > after:
                    yield number, entry

    def trim(self, until: int) -> None:
        """Remove the stream's entries up to this one."""
        while self._stream and self._stream[0][0] <= until:
            self._stream.popleft()

    def send_assignment(self, assignment: m.Assignment) -> None:
        """Send a node its assignment, which may be lost, late, or arrive twice."""
        faults = self.faults
        if not faults.is_lost():
            self.time.after(faults.delay(), self._deliver, self.generation, assignment)
        again = faults.doubled_after()
        if again is not None:
            self.time.after(again, self._deliver, self.generation, assignment)

    def wipe(self) -> None:
        """Wipe Redis and drop all messages in transit."""
        self.generation += 1
        self.is_open = False
        self._stream.clear()
        self._queued.clear()

    def open_anew(self) -> None:
        """Create a new stream for a scheduler; nodes notice it and resend unacknowledged events."""
        self.is_open = True
        for node in self.nodes.values():
            if node.is_alive:
                delay = _HEARS_S * self.faults.rng.random()
                self.time.after(delay, node.enter, self.generation)

    def _append(self, generation: int, batch: m.BatchRead, events: Sequence[m.NodeEvent]) -> bool:
        if generation != self.generation or not self.is_open:
            return False
        self._entries += 1
        self._stream.append((self._entries, (batch, events)))
        return True

    def _deliver(self, generation: int, assignment: m.Assignment) -> None:
        node = self.nodes[assignment.instance_id]
        if generation != self.generation or not node.is_alive:
            return
        if node.is_reachable:
            node.obey(assignment)
        else:
            self._queued.setdefault(node.instance_id, []).append(assignment)

    # --- nodes ------------------------------------------------------------------------------------

    def _boot(self, name: str) -> None:
        life = self._lives[name] = self._lives.get(name, 0) + 1
        instance_id = f"{name}.{life}"
        self.nodes[instance_id] = SimulatedNode(
            instance_id,
            name,
            time=self.time,
            faults=self.faults,
            processes=self._processes,
            append=self._append,
            generation=self.generation,
            on_start=self._started,
        )
        self.current[name] = instance_id

    def _started(self, order: StartTrial) -> None:
        self._on_start(order, self._processes.held(order.instance_id))

    def _state(self, instance_id: str, *events: m.NodeEvent) -> None:
        if events:
            self.nodes[instance_id].state(*events)

    def _a_node_dies(self) -> None:
        living = [one for one in self.current.values() if self.nodes[one].is_alive]
        if living:
            self.kill(self.faults.rng.choice(living))

    def kill(self, instance_id: str) -> None:
        """Kill a node with all its trial processes; it restarts after a while."""
        node = self.nodes[instance_id]
        node.is_alive = False
        self._processes.node_died(instance_id)
        downtime = self.faults.settings.downtime_s * self.faults.rng.random()
        self.time.after(downtime, self._boot, node.node)

    def _a_device_goes_bad(self) -> None:
        instance_id = self.faults.rng.choice(list(self.current.values()))
        node = self.nodes[instance_id]
        gpus = self.settings.joined(instance_id, node.node).gpus
        if gpus:
            uuid = self.faults.rng.choice(gpus).uuid
            node.withheld = {**node.withheld, uuid: "XID 79"}
            seconds = self.faults.settings.bad_device_s * self.faults.rng.random()
            self.time.after(seconds, node.use_again, uuid)

    def _a_process_dies(self) -> None:
        processes = self._processes.all()
        if processes:
            process = self.faults.rng.choice(processes)
            self._processes.die(process.order.trial, process.attempt)

    def _cut_off(self, names: Sequence[str], longest_s: float) -> None:
        seconds = longest_s * self.faults.rng.random()
        for name in names:
            instance_id = self.current[name]
            self.nodes[instance_id].cuts += 1
            self.time.after(seconds, self._reach_again, instance_id)

    def _reach_again(self, instance_id: str) -> None:
        node = self.nodes[instance_id]
        node.cuts -= 1
        if node.is_reachable:
            for assignment in self._queued.pop(instance_id, ()):
                node.obey(assignment)
            node.send()
