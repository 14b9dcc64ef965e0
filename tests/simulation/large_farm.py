"""A large farm in virtual time: all of its scheduler but Redis and processes is the real one.

One supervisor's `Roster` and `Allotter`; of each experiment the supervisor's `ExperimentLink`, a
socket, and behind it the `RelayedExecutor`, `ExperimentLoop` and `TrialRunner` of its process. Nodes
are simulated. What each part takes is added up by a `Meter`.
"""

from __future__ import annotations

import itertools
import math
import select
import selectors
import socket
import sys
from collections import Counter
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any, Final

import cloudpickle
import msgspec

from tests.plans import PLAN
from tests.simulation.farm import CountedRecords
from tests.simulation.metering import Meter
from tests.simulation.problem import Problem, noise
from tunemq_scheduler.core.commands import StartTrial
from tunemq_scheduler.core.runner import TrialRunner
from tunemq_scheduler.core.settings import RunnerSettings
from tunemq_scheduler.executors.roster import Roster
from tunemq_scheduler.executors.simulated_hosts import SimulatedHosts
from tunemq_scheduler.executors.simulated_uploads import UploadSettings
from tunemq_scheduler.executors.tenant import Tenant
from tunemq_scheduler.executors.virtual_time import VirtualTime
from tunemq_scheduler.executors.wire_client import WireClient
from tunemq_scheduler.farm.allotting.allotter import Allotter
from tunemq_scheduler.farm.relay import messages as r
from tunemq_scheduler.farm.relay.executor import RelayedExecutor
from tunemq_scheduler.farm.relay.line import SupervisorLine
from tunemq_scheduler.farm.relay.link import ExperimentLink
from tunemq_scheduler.loop import ExperimentLoop
from tunemq_scheduler.plan import ExperimentPlan
from tunemq_scheduler.schedulers import FIFOScheduler
from tunemq_shared import messages as m
from tunemq_shared import wire
from tunemq_shared.allotments import Usage
from tunemq_shared.conditions import Condition
from tunemq_shared.introductions import BatchHeader, NodeHello

GPUS: Final = 8
#: What trials of the experiments ask for, in turn.
REQUESTS: Final = (
    {"cpu": 4.0, "gpu": 1.0},
    {"cpu": 2.0, "gpu": 0.5},
    {"cpu": 8.0, "gpu": 2.0},
    {"cpu": 32.0, "gpu": 8.0},
)
#: A trial reports every 30 s, up to so many times, and saves at every tenth result.
PERIOD_S: Final = 30.0
RESULTS: Final = 20
_SAVES_EVERY: Final = 10
#: A trial is over when this is 1: each in its time, so that as many end now as later.
_PROGRESS: Final = "progress"
_LATENCY_S: Final = 0.05


class _NoProcess:
    """The process of an experiment that runs in ours."""

    pid = 0
    pidfd = -1

    def __init__(self, _folder: Path, sock: socket.socket, **_options: object) -> None:
        self.socket = sock

    def returncode(self) -> None:
        return None

    def kill(self) -> None:
        raise AssertionError("the supervisor found something wrong with it")

    def close(self) -> None:
        self.socket.close()

    def last_words(self) -> str:
        return ""


class BytesJournal:
    """Encodes turns as the real one does, and counts their bytes."""

    def __init__(self) -> None:
        self.turns = self.entries = self.bytes = 0

    def append(self, entries: Sequence[m.Entry]) -> None:
        self.turns += 1
        self.entries += len(entries)
        self.bytes += len(m.encode(entries))

    def close(self) -> None:
        pass


class Experiment:
    """Both ends of one experiment, and the search behind them."""

    def __init__(self, farm: LargeFarm, number: int, owner: str, request: dict[str, float]) -> None:
        self.name, self.owner = f"e{number:03d}", owner
        self.told: Usage | None = None
        self._usage: Usage | None = None
        self.journal = BytesJournal()
        ends: list[_NoProcess] = []

        def begin(*arguments: Any, **options: Any) -> _NoProcess:
            ends.append(_NoProcess(*arguments, **options))
            return ends[0]

        code = "search.py"
        job = r.Job(name=self.name, results="/nowhere", code=code, term=1, prefix=self.name)
        self.link = ExperimentLink(job, farm, folder=Path("/nowhere"), begin=begin)
        self._mail = select.poll()
        self._mail.register(ends[0].socket.fileno(), select.POLLIN)
        self.line = SupervisorLine(ends[0].socket)
        self.line.first()
        executor = RelayedExecutor(self.line)
        problem = Problem(FIFOScheduler, seed=number, trials=1_000_000, max_t=RESULTS)
        plan = _plan(self.name)
        self.runner = TrialRunner(RunnerSettings(request=request))
        self.loop = ExperimentLoop(
            runner=self.runner,
            plan=plan,
            algorithms=problem.algorithms(),
            executor=executor,
            journal=self.journal,
            records=CountedRecords(),
            resources_for=lambda _config: request,
            trial_prefix=self.name,
            clock=lambda: farm.time.now,
            nodes_may_come=True,
        )
        executor.open(plan)

    @property
    def has_mail(self) -> bool:
        """Whether its process has something to read."""
        return bool(self._mail.poll(0)) or self.line._frames.waiting > 0

    def step(self) -> None:
        """One turn of its process, as `RelayedExecutor` begins it and `Teller` ends it."""
        self.line.wake()  # it never waits: what there is to read is there
        self.loop.step()
        usage = self.runner.usage()
        if usage != self._usage:
            self._usage = usage
            self.line.send(r.Used(usage))

    def close(self) -> None:
        self.link.kill = lambda: None  # type: ignore[method-assign]
        self.link._frames.close()
        self.line.close()


class LargeFarm:
    """So many nodes of eight GPUs, and experiments of ten owners that use all of them.

    Attributes:
        seen: what happened, counted.
    """

    def __init__(self, nodes: int, experiments: int, meter: Meter, *, owners: int = 10) -> None:
        self.time = VirtualTime()
        self.meter = meter
        self.seen: Counter[str] = Counter()
        self.roster = Roster(1)
        self.allotter = Allotter()
        self._farm_tenant = self.roster.tenants["farm"] = Tenant("farm")
        self._entries: list[tuple[Tenant, bytes, dict[bytes, bytes]]] = []
        self._numbers: Counter[tuple[str, str]] = Counter()
        self._taken: dict[str, int] = {}
        self._hosting: dict[str, set[tuple[str, int]]] = {}
        self._renewals = 0
        self._ids = itertools.count(1)
        self._is_turn_due = False
        self._selector = selectors.EpollSelector()
        self._now = 1.0
        self.hosts = SimulatedHosts(
            self.time, _metrics, _step_time, self._report, uploads=UploadSettings(), seed=1
        )
        self.hosts.open(_plan(""))
        self.experiments = {
            one.name: one
            for one in (
                Experiment(self, n, f"owner{n % owners}", REQUESTS[n % len(REQUESTS)])
                for n in range(experiments)
            )
        }
        with meter("nodes join"):
            for n in range(nodes):
                self._join(n)
            self._look()
            self._attend_nodes()
        for one in self.experiments.values():
            self.allotter.experiment_added(one.name, one.owner)
            self._selector.register(one.link.fileno(), selectors.EVENT_READ, one.link)
            one.step()
        self._beat()

    # --- what is used of the wire -----------------------------------------------------------------

    def add(self, events_key: str) -> WireClient:
        """A part of the wire for one experiment."""
        tenant = self.roster.tenants[events_key] = Tenant(events_key)
        self.roster.announce(tenant)
        return WireClient(
            tenant, self.roster, hold=_nothing, say_goodbye=_nothing, forget=_nothing
        )

    # --- time -------------------------------------------------------------------------------------

    def run(self, seconds: float) -> None:
        """Go on for so long."""
        self.time.pass_to(self.time.now + seconds)

    def close(self) -> None:
        """Close all sockets."""
        self._selector.close()
        for one in self.experiments.values():
            one.close()

    def held(self) -> float:
        """How many GPUs experiments hold."""
        return sum(
            sum(sum(amounts.devices.values()) for amounts in one.runner.usage().held.values())
            for one in self.experiments.values()
        )

    # --- the supervisor ---------------------------------------------------------------------------

    def _turn_soon(self, delay: float = 0.0) -> None:
        if not self._is_turn_due:
            self._is_turn_due = True
            self.time.after(delay, self._turn)

    def _turn(self) -> None:
        """As `Supervisor` does it; experiments have their turns in the middle of it."""
        self._is_turn_due = False
        self.seen["turns"] += 1
        with self.meter("wire: read"):
            entries, self._entries = self._entries, []
            for tenant, entry_id, fields in entries:
                tenant.was_read(entry_id, *self.roster.read_batch(tenant, entry_id, fields))
        self.seen["batches"] += len(entries)
        waiting = True
        while waiting:
            with self.meter("relay: to experiments"):
                for one in self.experiments.values():
                    one.link.attend()
            for one in self.experiments.values():
                self._step(one)
            with self.meter("relay: from experiments"):
                for key, _ in self._selector.select(0):
                    key.data.on_readable()
            waiting = any(
                one.link.wants_write or one.line._frames.waiting
                for one in self.experiments.values()
            )
        self._allot()
        with self.meter("wire: send"):
            for node in self.roster.nodes.values():
                if node.mailbox.is_changed and node.takes_orders:
                    assignment = m.encode(node.mailbox.next_assignment())
                    self.time.after(_LATENCY_S, self._obey, assignment)
                    self.seen["assignments"] += 1
        self.seen["commands"] += len(self.roster.commands)
        self.roster.commands = []

    def _step(self, one: Experiment) -> None:
        before = one.journal.entries, one.runner.suggested
        if not one.has_mail:
            return
        with self.meter("experiment: turn"):
            one.step()
        self.seen["experiment turns"] += 1
        self.seen["entries"] += one.journal.entries - before[0]
        self.seen["trials"] += one.runner.suggested - before[1]

    def _allot(self) -> None:
        self.allotter.advance(self._now + self.time.now)
        for one in self.experiments.values():
            if one.link.usage is not None and one.link.usage is not one.told:
                one.told = one.link.usage
                with self.meter("allotter: usage"):
                    self.allotter.usage(one.name, one.told)
        with self.meter("allotter: offers"):
            offers = self.allotter.offers()
        self.seen["offers"] += len(offers)
        for name, offer in offers:
            self.experiments[name].link.offer(offer)
        if offers:
            self._turn_soon(0.001)

    def _beat(self) -> None:
        self._look()
        self._turn_soon()
        self.time.after(wire.LEASE_PERIOD_S / 2, self._beat)

    def _look(self) -> None:
        """Twice a second: the leases, every second of which is a new one."""
        self._renewals += 1
        value = str(self._renewals // 2)
        with self.meter("wire: look"):
            keys = self.roster.lease_keys()
            leases = [f"{value}:1:{self._taken.get(one, 0)}".encode() for one in self.roster.nodes]
            assert len(keys) == len(leases)
            self.roster.read_leases(self._now + self.time.now, leases)

    def _attend_nodes(self) -> None:
        for fact in self._farm_tenant.take():
            if isinstance(fact, m.NodeJoined):
                with self.meter("allotter: node"):
                    self.allotter.node_joined(fact)

    # --- nodes ------------------------------------------------------------------------------------

    def _join(self, number: int) -> None:
        name = f"node{number:05d}"
        model, memory = ("A100", 80e9) if number % 10 else ("V100", 32e9)
        gpus = tuple(m.Gpu(f"GPU-{number:05d}-{one}", model, memory) for one in range(GPUS))
        resources = {"cpu": 8.0 * GPUS, "gpu": float(GPUS), "memory": 1e12}
        hello = NodeHello(
            protocol=m.PROTOCOL_VERSION,
            node=name,
            incarnation=f"{name}.1",
            hostname=name,
            node_ip="10.0.0.1",
            pid=1,
            resources=resources,
            python=f"{sys.version_info.major}.{sys.version_info.minor}.0",
            cloudpickle=cloudpickle.__version__,
            gpus=gpus,
        )
        self._hosting[hello.incarnation] = set()
        self.roster.read_hello(self._entry_id(), m.encode(hello))

    def _report(self, node: str, *events: m.NodeEvent) -> None:
        trial = next(one.trial for one in events if hasattr(one, "trial"))
        key = wire.events(trial.partition("_")[0])
        first = self._numbers[node, key] + 1
        self._numbers[node, key] += len(events)
        for event in events:
            self.seen["results"] += isinstance(event, m.ResultReported)
            if isinstance(event, m.HostFreed):
                self._hosting[node].discard((event.trial, event.epoch))
        header = m.encode(BatchHeader(m.PROTOCOL_VERSION, node, first, (1, self._taken[node])))
        fields = {wire.HEADER: header, wire.EVENTS: m.encode(events)}
        self.seen["stream bytes"] += sum(map(len, fields.values()))
        self.time.after(_LATENCY_S, self._arrive, self.roster.tenants[key], fields)

    def _arrive(self, tenant: Tenant, fields: dict[bytes, bytes]) -> None:
        self._entries.append((tenant, self._entry_id(), fields))
        self._turn_soon()

    def _obey(self, data: bytes) -> None:
        assignment = m.decode_assignment(data)
        node = assignment.incarnation
        if assignment.version <= self._taken.get(node, 0):
            return
        self._taken[node] = assignment.version
        for order in assignment.orders:
            key = order.trial, order.epoch
            if order.start is not None and self.hosts.get(*key) is None and not order.kill:
                if key not in self._hosting[node]:
                    self._hosting[node].add(key)
                    self.hosts.start(_start(node, order, order.start))

    def _entry_id(self) -> bytes:
        return f"{next(self._ids)}-0".encode()


def _start(node: str, order: m.HostOrder, start: m.HostStart) -> StartTrial:
    return StartTrial(
        trial=order.trial,
        epoch=order.epoch,
        incarnation=node,
        number=start.trial_number,
        config=start.config,
        resources=start.resources,
        run_until=order.run_until,
        last_step=start.last_step,
        restore=start.restore,
        devices=start.devices,
    )


def _plan(experiment: str) -> ExperimentPlan:
    return msgspec.structs.replace(
        PLAN,
        experiment=experiment,
        events_key=wire.events(experiment),
        stop=(Condition(_PROGRESS, 1),),
        checkpoint_frequency=_SAVES_EVERY,
    )


def _metrics(config: dict[str, Any], step: int) -> dict[str, Any]:
    lr = config["lr"]
    progress = step / math.ceil(RESULTS * noise("length", lr))
    return {"loss": noise(lr, step), "accuracy": noise(step, lr), "lr": lr, _PROGRESS: progress}


def _step_time(config: dict[str, Any], step: int) -> float:
    """The first one ends at any time, so that not all report at once."""
    return PERIOD_S * (noise(config["lr"]) if step == 1 else 1.0)


def _nothing(*_arguments: object) -> None:
    pass
