"""A farm that several experiments share, in virtual time, with its `FairShareAllocator`.

Messages have a latency each way. The experiments place trials as the real ones do: each has a
`Placement`, follows the newest offer that has reached it, and preempts its youngest trials when it
must free slots.
"""

from __future__ import annotations

import heapq
import itertools
import operator
import random
from collections import Counter
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field

from msgspec.structs import replace

from tests.simulation.allocator_books import check_books
from tunemq_scheduler.core.placement.placement import Placement
from tunemq_scheduler.core.shared_amounts import OfferUsage, ResourceAmounts, SlotDemand
from tunemq_scheduler.farm.allocation.fair_share_allocator import FairShareAllocator
from tunemq_scheduler.farm.allocation.members import FairShareSettings
from tunemq_shared.protocol.messages import Gpu, NodeJoined, NodeOffered

#: A request, and how long a trial of it takes.
Job = tuple[dict[str, float], float]


def node(name: str, gpus: int = 0, cpus: float = 8.0, **more: float) -> NodeJoined:
    """A node with GPUs that have a name each."""
    devices = tuple(Gpu(f"{name}-{place}", "A100", 80e9) for place in range(gpus))
    resources = {"cpu": cpus, "gpu": float(gpus), **more}
    return NodeJoined(name, name, name, "10.0.0.1", resources, devices, is_shared=True)


@dataclass(eq=False)
class Running:
    """A trial on a node."""

    node: str
    request: dict[str, float]
    devices: dict[str, float]
    since: float
    length: float
    is_saving: bool = False
    is_killed: bool = False


@dataclass(eq=False)
class SharingExperiment:
    """An experiment's side of the offers."""

    name: str
    owner: str
    jobs: Iterator[Job]
    priority: int = 0
    at_most: int = 1_000_000
    #: Whether its trials have checkpoints; others run until the grace has passed, and begin again.
    saves: bool = True
    placement: Placement = field(default_factory=Placement)
    running: dict[Running, None] = field(default_factory=dict)
    back: list[Job] = field(default_factory=list)
    seen: dict[str, int] = field(default_factory=dict)
    numbers: dict[str, int] = field(default_factory=dict)
    away: dict[str, list[Running]] = field(default_factory=dict)
    preempted: int = 0
    is_over: bool = False

    def __post_init__(self) -> None:
        self.grace: dict[str, float | None] = {}
        self.at_most = min(self.at_most, operator.length_hint(self.jobs, self.at_most))
        self._next: Job | None = next(self.jobs, None)

    @property
    def waits(self) -> bool:
        """Whether it would start another trial if it had a slot."""
        more = self._next is not None and len(self.running) < self.at_most
        return not self.is_over and (bool(self.back) or more)

    def join(self, joined: NodeJoined) -> None:
        self.placement.add_node(joined.instance_id, joined.resources, joined.gpus)
        self.placement.withhold(joined.instance_id, joined.withheld)
        self.placement.offer(joined.instance_id, ResourceAmounts())
        self.seen[joined.instance_id] = self.numbers.get(joined.instance_id, 0)

    def lose(self, instance_id: str) -> list[Running]:
        """Restart its trials there on other nodes; return them."""
        if instance_id not in self.seen:
            return []
        lost = [one for one in self.running if one.node == instance_id]
        for trial in lost:
            del self.running[trial]
            if not trial.is_killed:
                self.back.append((trial.request, trial.length))
        self.placement.remove_node(instance_id)
        self.numbers[instance_id] = self.seen.pop(instance_id)
        return lost

    def hold(self, trial: Running) -> None:
        """A trial that was taken over is still there, and is to be killed."""
        trial.is_saving = trial.is_killed = True
        self.placement.hold(trial.node, trial.request, trial.devices)
        self.running[trial] = None

    def hear(self, offer: NodeOffered) -> None:
        if offer.instance_id in self.seen:
            assert offer.n > self.seen[offer.instance_id]
            self.seen[offer.instance_id] = offer.n
            self.grace[offer.instance_id] = offer.preempt_grace_s
            amounts = ResourceAmounts(offer.resources, offer.devices)
            self.placement.offer(offer.instance_id, amounts)

    def turn(self, now: float) -> tuple[list[Running], list[Running]]:
        """Place all jobs that fit; return the started trials, and those to preempt."""
        began: list[Running] = []
        while not self.is_over:
            job = self.back[0] if self.back else self._next
            if job is None or (not self.back and len(self.running) >= self.at_most):
                break
            request, length = job
            place = self.placement.fit(request)
            if place is None:
                break
            devices = self.placement.take(place, request)
            trial = Running(place, request, devices, now, length)
            self.running[trial] = None
            began.append(trial)
            if self.back:
                self.back.pop(0)
            else:
                self._next = next(self.jobs, None)
        return began, [one for node in self.seen for one in self._to_give_way(node)]

    def end(self, trial: Running, left: float = 0.0) -> None:
        """End a trial; queue its remaining work (`left`) for later."""
        if trial in self.running:
            del self.running[trial]
            self.placement.give_back(trial.node, trial.request, trial.devices)
            if left > 0:
                self.back.append((trial.request, left))

    def withhold(self, instance_id: str, devices: Mapping[str, str]) -> None:
        if instance_id in self.seen:
            self.placement.withhold(instance_id, devices)

    def usage(self) -> OfferUsage:
        held = {one: self.placement.held(one) for one in self.seen}
        wants = Counter(_key(request) for request, _ in self.back)
        if self._next is not None:
            wants[_key(self._next[0])] += max(0, self.at_most - len(self.running))
        return OfferUsage(
            dict(self.seen),
            {one: amounts for one, amounts in held.items() if amounts != ResourceAmounts()},
            tuple(SlotDemand(dict(one), count) for one, count in wants.items() if count > 0)
            if not self.is_over
            else (),
        )

    def gpus(self) -> float:
        return sum(sum(trial.devices.values()) for trial in self.running)

    def _to_give_way(self, instance_id: str) -> list[Running]:
        if self.grace.get(instance_id) is None:
            return []
        here = [one for one in self.running if one.node == instance_id]
        excess = self.placement.excess(instance_id)
        resources = Counter(excess.resources)
        devices = Counter(excess.devices)
        for trial in here:
            if trial.is_saving:
                resources.subtract(trial.request)
                devices.subtract(trial.devices)
        chosen: list[Running] = []
        for trial in sorted(here, key=lambda one: -one.since):
            helps = any(devices[one] > 1e-6 for one in trial.devices) or any(
                resources[one] > 1e-6 for one in trial.request if one != "gpu"
            )
            if helps and not trial.is_saving:
                resources.subtract(trial.request)
                devices.subtract(trial.devices)
                chosen.append(trial)
        return chosen


def _key(request: Mapping[str, float]) -> tuple[tuple[str, float], ...]:
    return tuple(sorted(request.items()))


class SharedFarm:
    """The allocator, the experiments, and the messages between them."""

    def __init__(self, seed: int, settings: FairShareSettings | None = None) -> None:
        self.random = random.Random(seed)
        self.now = 1.0
        self.allocator = FairShareAllocator(settings)
        self.allocator.advance(self.now)
        self.nodes: dict[str, NodeJoined] = {}
        self.experiments: dict[str, SharingExperiment] = {}
        self.preempted: Counter[str] = Counter()
        self._settings = settings
        self.silent: dict[str, NodeJoined] = {}
        self.was_silent = False
        self._generation = 0
        self._events: list[tuple[float, int, Callable[[], None]]] = []
        self._numbers = itertools.count()
        self._arrivals: dict[tuple[str, str], float] = {}
        self._last_usage: dict[str, OfferUsage] = {}
        self._orders = itertools.count()

    # --- control ----------------------------------------------------------------------------------

    def at(self, when: float, what: Callable[[], None]) -> None:
        heapq.heappush(self._events, (when, next(self._numbers), what))

    def run(self, until: float, every: float = 10.0) -> None:
        """Run until then; ask the allocator at least every `every` seconds."""
        while True:
            due = self._events[0][0] if self._events else float("inf")
            self.now = min(due, self.now + every, until)
            while self._events and self._events[0][0] <= self.now:
                heapq.heappop(self._events)[2]()
            self.step()
            if self.now >= until:
                return

    def step(self) -> None:
        """Advance the allocator's clock, and send its offers."""
        self.allocator.advance(self.now)
        for name, offer in self.allocator.offers():
            self._send("offer", name, lambda name=name, offer=offer: self._offer(name, offer))

    def join(self, joined: NodeJoined) -> None:
        self.nodes[joined.instance_id] = joined
        self.allocator.advance(self.now)
        self.allocator.node_joined(joined)
        for name in self.experiments:
            self._send("offer", name, lambda name=name: self._joined(name, joined))

    def lose(self, instance_id: str) -> None:
        """A machine is gone for good."""
        self.nodes.pop(instance_id, None)
        self.silent.pop(instance_id, None)
        self.allocator.advance(self.now)
        self.allocator.node_lost(instance_id, is_dead=True)
        for experiment in self.experiments.values():
            experiment.lose(instance_id)
            experiment.away.pop(instance_id, None)
            self._turn(experiment)

    def silence(self, instance_id: str) -> None:
        """Cut a machine off; its trials keep running there, and start again elsewhere."""
        self.was_silent = True
        self.silent[instance_id] = self.nodes.pop(instance_id)
        self.allocator.advance(self.now)
        self.allocator.node_lost(instance_id)
        for experiment in self.experiments.values():
            experiment.away[instance_id] = experiment.lose(instance_id)
            self._turn(experiment)

    def hear_again(self, instance_id: str) -> None:
        """Reconnect a node; its trials run elsewhere by now, so they are killed."""
        joined = self.nodes[instance_id] = self.silent.pop(instance_id)
        self.allocator.advance(self.now)
        self.allocator.node_returned(instance_id)
        for name in self.experiments:
            self._send("offer", name, lambda name=name: self._joined(name, joined))

    def withhold(self, instance_id: str, devices: Mapping[str, str]) -> None:
        """A machine withholds these of its GPUs from now on, and no others."""
        self.nodes[instance_id] = replace(self.nodes[instance_id], withheld=dict(devices))
        self.allocator.advance(self.now)
        self.allocator.devices_withheld(instance_id, devices)
        for name in self.experiments:
            self._send("offer", name, lambda name=name: self._withheld(name, instance_id, devices))

    def restart(self) -> None:
        """Another supervisor takes over; messages in flight are lost."""
        self._generation += 1
        self._last_usage.clear()
        self.allocator = FairShareAllocator(self._settings)
        self.allocator.advance(self.now)
        for order, one in enumerate(self.experiments.values()):
            self.allocator.experiment_added(one.name, one.owner, one.priority, order)
            self.allocator.expect(one.name)
        for joined in self.nodes.values():
            self.allocator.node_joined(joined)
            for name in self.experiments:
                self._send("offer", name, lambda name=name, it=joined: self._joined(name, it))
        for one in self.experiments.values():
            for instance_id in one.seen.keys() - self.nodes.keys():
                one.lose(instance_id)
            self._turn(one)

    def submit(self, experiment: SharingExperiment) -> SharingExperiment:
        self.experiments[experiment.name] = experiment
        self.allocator.advance(self.now)
        self.allocator.experiment_added(
            experiment.name, experiment.owner, experiment.priority, next(self._orders)
        )
        for joined in self.nodes.values():
            experiment.join(joined)
        self._turn(experiment)
        return experiment

    def remove(self, name: str) -> None:
        """An experiment ends at once: it was removed, or its trials have ended with it."""
        experiment = self.experiments.pop(name)
        experiment.is_over = True
        experiment.running.clear()
        self._last_usage.pop(name, None)
        self.allocator.experiment_gone(name)

    # --- observations -----------------------------------------------------------------------------

    def gpus(self) -> float:
        return sum(len(joined.gpus) for joined in self.nodes.values())

    def held(self, owner: str, priority: int = 0) -> float:
        return sum(
            one.gpus()
            for one in self.experiments.values()
            if (one.owner, one.priority) == (owner, priority)
        )

    def check(self) -> None:
        """Check that no GPU is used twice, no node is overcommitted, and the books agree."""
        devices: Counter[str] = Counter()
        amounts: Counter[tuple[str, str]] = Counter()
        for experiment in self.experiments.values():
            for trial in experiment.running:
                for uuid, share in trial.devices.items():
                    devices[trial.node + uuid] += share  # type: ignore[assignment]
                for name, amount in trial.request.items():
                    if name == "gpu_memory":
                        continue
                    amounts[trial.node, name] += amount  # type: ignore[assignment]
        assert all(share <= 1 + 1e-6 for share in devices.values()), devices
        for (name, resource), amount in amounts.items():
            assert amount <= self.nodes[name].resources[resource] + 1e-6, (name, resource, amount)
        check_books(self.allocator)

    # --- messages ---------------------------------------------------------------------------------

    def _send(self, kind: str, name: str, what: Callable[[], None]) -> None:
        """In order, and after a while, unless the experiment has ended by then."""
        experiment = self.experiments.get(name)
        when = self.now + self.random.choice((0.01, 0.1, 0.1, 2.0))
        when = max(when, self._arrivals.get((kind, name), 0.0))
        self._arrivals[kind, name] = when
        generation = self._generation

        def arrive() -> None:
            if generation == self._generation and self.experiments.get(name) is experiment:
                what()

        self.at(when, arrive)

    def _offer(self, name: str, offer: NodeOffered) -> None:
        if name in self.experiments:
            self.experiments[name].hear(offer)
            self._turn(self.experiments[name])

    def _joined(self, name: str, joined: NodeJoined) -> None:
        if name in self.experiments and joined.instance_id in self.nodes:
            experiment = self.experiments[name]
            if joined.instance_id not in experiment.seen:
                experiment.join(joined)
                for trial in experiment.away.pop(joined.instance_id, []):
                    experiment.hold(trial)
                    killed = self.now + self.random.uniform(0.1, 5.0)
                    self.at(killed, lambda trial=trial: self._killed(experiment, trial))
            self._turn(experiment)

    def _withheld(self, name: str, instance_id: str, devices: Mapping[str, str]) -> None:
        if name in self.experiments:
            self.experiments[name].withhold(instance_id, devices)
            self._turn(self.experiments[name])

    def _killed(self, experiment: SharingExperiment, trial: Running) -> None:
        if trial in experiment.running:
            experiment.end(trial)
            self._turn(experiment)

    def _turn(self, experiment: SharingExperiment) -> None:
        began, giving_way = experiment.turn(self.now)
        for trial in began:
            self.at(self.now + trial.length, lambda trial=trial: self._end(experiment, trial))
        for trial in giving_way:
            trial.is_saving = True
            self.preempted[experiment.owner] += 1
            experiment.preempted += 1
            if experiment.saves:
                saved = self.now + self.random.uniform(1.0, 30.0)
                self.at(saved, lambda trial=trial: self._save(experiment, trial))
        for trial in experiment.running:
            grace_s = experiment.grace.get(trial.node)
            if trial.is_saving and not experiment.saves and grace_s is not None:
                due = self.now + grace_s  # an earlier one, if there is one, ends it
                self.at(due, lambda trial=trial: self._cut_off(experiment, trial))
        usage = experiment.usage()
        if usage != self._last_usage.get(experiment.name):
            self._last_usage[experiment.name] = usage
            self._send("usage", experiment.name, lambda: self._report(experiment.name, usage))

    def _report(self, name: str, usage: OfferUsage) -> None:
        self.allocator.advance(self.now)
        self.allocator.usage(name, usage)
        experiment = self.experiments.get(name)
        if experiment is not None and not experiment.waits and not experiment.running:
            self.allocator.experiment_gone(name)
            del self.experiments[name]

    def _end(self, experiment: SharingExperiment, trial: Running) -> None:
        if trial in experiment.running and not (trial.is_saving and experiment.saves):
            experiment.end(trial)
            self._turn(experiment)

    def _save(self, experiment: SharingExperiment, trial: Running) -> None:
        """A preempted trial has saved its checkpoint."""
        if trial in experiment.running:
            experiment.end(trial, max(1.0, trial.length - (self.now - trial.since)))
            self._turn(experiment)

    def _cut_off(self, experiment: SharingExperiment, trial: Running) -> None:
        """A preempted trial without checkpoints begins again later."""
        if trial in experiment.running:
            experiment.end(trial, trial.length)
            self._turn(experiment)
