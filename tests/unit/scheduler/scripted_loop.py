"""An experiment loop that tests run by hand; executor, journal and callbacks are lists."""

from __future__ import annotations

from collections import deque
from typing import Any

from tests.support.searches.plans import PLAN
from tunemq_scheduler.base.experiment_plan import ExperimentPlan
from tunemq_scheduler.core import commands as c
from tunemq_scheduler.core.runner_settings import RunnerSettings
from tunemq_scheduler.core.trial_runner import TrialRunner
from tunemq_scheduler.experiment.algorithm_driver import AlgorithmDriver
from tunemq_scheduler.experiment.event_driver import EventDriver
from tunemq_scheduler.experiment.experiment_loop import ExperimentLoop
from tunemq_scheduler.schedulers import FIFOScheduler, TrialScheduler
from tunemq_scheduler.search import (
    BasicVariantGenerator,
    Searcher,
    SearchGenerator,
)
from tunemq_scheduler.transport.trial_executor import TrialExecutor
from tunemq_shared.base.errors import JournalError
from tunemq_shared.protocol import messages as m

NODE = m.NodeJoined("n.1", "n", "host", "127.0.0.1", {"cpu": 1.0})


class ScriptedExecutor(TrialExecutor):
    """Returns the events that the test sets, and records each call with the journal's length."""

    def __init__(self, log: list[tuple[Any, ...]]) -> None:
        self.batches: deque[list[m.Event]] = deque()
        self.log = log

    def poll(self, timeout: float) -> list[m.Event]:
        return self.batches.popleft() if self.batches else []

    def start_trial(self, order: c.StartTrial) -> None:
        self.log.append(("start", order.trial, order.attempt))

    def continue_training(self, order: c.ContinueTrial) -> None:
        self.log.append(("continue", order.trial))

    def stop_trial(self, order: c.StopTrial) -> None:
        self.log.append(("stop", order.trial))

    def pause_trial(self, order: c.PauseTrial) -> None:
        self.log.append(("pause", order.trial))

    def acknowledge(self, acknowledged: dict[str, int]) -> None:
        self.log.append(("acknowledge", dict(acknowledged)))


class LoggedJournal:
    def __init__(self, log: list[tuple[Any, ...]]) -> None:
        self.log = log
        self.journal_records: list[m.JournalRecord] = []
        self.is_full = False

    def append(self, journal_records):
        if self.is_full:
            raise JournalError("no space")
        self.journal_records += journal_records
        self.log.append(("journal", len(journal_records)))

    def close(self) -> None:
        pass


class LoggingSink:
    def __init__(self, log: list[tuple[Any, ...]]) -> None:
        self.log = log

    def notify(self, command, trial) -> None:
        self.log.append((type(command).__name__, command.trial))

    def trial_waits(self, trial) -> None:
        self.log.append(("waits", trial.trial_id, *trial.waits))

    def turn_began(self) -> None:
        pass

    def turn_ended(self) -> None:
        pass

    def notices(self, text) -> None:
        self.log.append(("notices", text))


class Loop:
    """A loop and the ordered log of its actions."""

    def __init__(
        self,
        *,
        search: Searcher | None = None,
        scheduler: TrialScheduler | None = None,
        resources: dict[str, float] | None = None,
        trials: int = 2,
        plan: ExperimentPlan = PLAN,
        **options: Any,
    ) -> None:
        self.log: list[tuple[Any, ...]] = []
        self.now = 0.0
        searcher = search or BasicVariantGenerator()
        self.executor = ScriptedExecutor(self.log)
        self.journal = LoggedJournal(self.log)
        algorithms = AlgorithmDriver(
            search=SearchGenerator(searcher, {"x": 1}, trials),
            scheduler=scheduler or FIFOScheduler(),
        )
        self.runner = TrialRunner(RunnerSettings(request=resources or {"cpu": 1.0}))
        self.loop = ExperimentLoop(
            driver=EventDriver(self.runner, algorithms, plan),
            plan=plan,
            executor=self.executor,
            journal=self.journal,
            dispatcher=LoggingSink(self.log),
            resources_for=lambda _config: resources or {"cpu": 1.0},
            trial_prefix="t",
            clock=lambda: self.now,
            discard=lambda removal: self.log.append(("discard", removal)),
            **options,
        )

    def turn(self, *batches: m.Event) -> list[tuple[Any, ...]]:
        """Run one turn with these events and return its actions."""
        self.executor.batches.append(list(batches))
        before = len(self.log)
        self.loop.step()
        return self.log[before:]

    def batch(self, first: int, *events: m.NodeEvent) -> list[tuple[Any, ...]]:
        read = m.BatchRead("n.1", first, first + len(events) - 1, f"{first}-0")
        return self.turn(read, *events)


def started(trial: str = "t_00000") -> m.TrialStarted:
    return m.TrialStarted(trial, 1, 1, "host", "127.0.0.1", 0.0)


def result(step: int, trial: str = "t_00000", *, done: bool = False) -> m.ResultReported:
    return m.ResultReported(trial, 1, step, {"loss": 1.0}, 0.0, 1.0, 1.0, 1.0, step, done=done)


def recorded(log: list[tuple[Any, ...]]) -> int:
    return sum(line[0] == "NotifyResult" for line in log)
