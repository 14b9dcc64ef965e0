"""One experiment of a large farm: the supervisor's end, a socket, and the experiment process."""

from __future__ import annotations

import math
import select
import socket
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, Final

import msgspec

from tests.simulation.farm import CountingSink
from tests.simulation.simulated_problem import Problem, noise
from tests.support.farms.farm_api_server import CODE
from tests.support.searches.plans import PLAN
from tunemq_scheduler.base.experiment_plan import ExperimentPlan
from tunemq_scheduler.core.runner_settings import RunnerSettings
from tunemq_scheduler.core.shared_amounts import OfferUsage
from tunemq_scheduler.core.trial_runner import TrialRunner
from tunemq_scheduler.experiment.event_driver import EventDriver
from tunemq_scheduler.experiment.experiment_loop import ExperimentLoop
from tunemq_scheduler.farm.ipc import ipc_messages as r
from tunemq_scheduler.farm.ipc.experiment_side import SupervisorConnection
from tunemq_scheduler.farm.ipc.relayed_executor import RelayedExecutor
from tunemq_scheduler.farm.ipc.supervisor_side import (
    ExperimentConnection,
)
from tunemq_scheduler.schedulers import FIFOScheduler
from tunemq_scheduler.transport.node_transport import NodeTransport
from tunemq_shared.broker.redis_keys import events
from tunemq_shared.protocol import messages as m
from tunemq_shared.protocol.result_conditions import Condition

#: A trial reports every 30 s, up to this many times, and saves at every tenth result.
PERIOD_S: Final = 30.0
RESULTS: Final = 20
SAVES_EVERY: Final = 10
#: A trial ends when this is 1; end times are spread evenly over the run.
_PROGRESS: Final = "progress"


class _NoProcess:
    """The process of an experiment that runs in ours."""

    pid = 0
    watched = -1

    def __init__(self, _folder: Path, sock: socket.socket, **_options: object) -> None:
        self.socket = sock

    def returncode(self) -> None:
        return None

    def kill(self) -> None:
        raise AssertionError("the supervisor found something wrong with it")

    def close(self) -> None:
        self.socket.close()

    def last_output(self) -> str:
        return ""


class BytesJournal:
    """Encodes turns as the real one does, and counts their bytes."""

    def __init__(self) -> None:
        self.turns = self.journal_records = self.bytes = 0

    def append(self, journal_records: Sequence[m.JournalRecord]) -> None:
        self.turns += 1
        self.journal_records += len(journal_records)
        self.bytes += len(m.encode(journal_records))

    def close(self) -> None:
        pass


class Experiment:
    """Both ends of one experiment's connection, and its search."""

    def __init__(
        self,
        number: int,
        owner: str,
        request: dict[str, float],
        transport: NodeTransport,
        clock: Callable[[], float],
        at_most: int = 0,
    ) -> None:
        self.name, self.owner = f"e{number:03d}", owner
        #: The usage that the allocator received last.
        self.told: OfferUsage | None = None
        self._usage: OfferUsage | None = None
        self.journal = BytesJournal()
        ends: list[_NoProcess] = []

        def begin(*arguments: Any, **options: Any) -> _NoProcess:
            ends.append(_NoProcess(*arguments, **options))
            return ends[0]

        job = r.ExperimentJob(
            name=self.name, results="/nowhere", code=CODE, term=1, prefix=self.name
        )
        self.connection = ExperimentConnection(job, transport, folder=Path("/nowhere"), begin=begin)
        self._assignment = select.poll()
        self._assignment.register(ends[0].socket.fileno(), select.POLLIN)
        self.line = SupervisorConnection(ends[0].socket)
        self.line.first()
        executor = RelayedExecutor(self.line)
        problem = Problem(FIFOScheduler, seed=number, trials=1_000_000, max_t=RESULTS)
        plan = plan_of(self.name)
        self.runner = TrialRunner(RunnerSettings(request=request, max_concurrent=at_most))
        self.loop = ExperimentLoop(
            driver=EventDriver(self.runner, problem.algorithms(), plan),
            plan=plan,
            executor=executor,
            journal=self.journal,
            dispatcher=CountingSink(),
            resources_for=lambda _config: request,
            trial_prefix=self.name,
            clock=clock,
            nodes_may_come=True,
        )
        executor.open(plan)

    @property
    def has_unsent(self) -> bool:
        """Whether one of the two waits for the other to read."""
        return self.connection.wants_write or self.line._frames.waiting > 0

    @property
    def has_commands(self) -> bool:
        """Whether its process has something to do."""
        return bool(self._assignment.poll(0)) or self.line._frames.waiting > 0

    def step(self) -> None:
        """One turn of its process: from `RelayedExecutor` to `SearchStatusReporter`."""
        self.line.wake()  # never waits: the data is there
        self.loop.step()
        usage = self.runner.usage()
        if usage != self._usage:
            self._usage = usage
            self.line.send(r.OfferUsageUpdate(usage))

    def gpus(self) -> float:
        """How many GPUs its trials hold."""
        held = self.runner.usage().held.values()
        return sum(sum(amounts.devices.values()) for amounts in held)

    def stop(self) -> None:
        """Have the search end."""
        self.loop.request_stop("enough")

    def close(self) -> None:
        """Close both ends."""
        self.connection._frames.close()
        self.line.close()


def plan_of(experiment: str) -> ExperimentPlan:
    """The plan of one of the experiments."""
    return msgspec.structs.replace(
        PLAN,
        experiment=experiment,
        events_key=events(experiment),
        stop=(Condition(_PROGRESS, 1),),
        checkpoint_frequency=SAVES_EVERY,
    )


def metrics(config: dict[str, Any], step: int) -> dict[str, Any]:
    """The metrics that a trial reports."""
    lr = config["lr"]
    progress = step / math.ceil(RESULTS * noise("length", lr))
    return {"loss": noise(lr, step), "accuracy": noise(step, lr), "lr": lr, _PROGRESS: progress}


def step_time(config: dict[str, Any], step: int) -> float:
    """The first one ends at any time, so that not all report at once."""
    return PERIOD_S * (noise(config["lr"]) if step == 1 else 1.0)
