"""Searches on the simulated executor, for tests and benchmarks."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Sequence
from typing import Any

from tests.simulation.simulated_problem import Problem
from tunemq.testing.journal_replay import ReplayOutcome, outcome, replay, replay_lock_step
from tunemq.testing.simulated_executor import SimulatedTrialExecutor, SimulationSettings
from tunemq_scheduler.core import commands as c
from tunemq_scheduler.core.runner_settings import RunnerSettings
from tunemq_scheduler.core.trial_runner import TrialRunner
from tunemq_scheduler.core.trials.kept_checkpoints import RetentionPolicy
from tunemq_scheduler.experiment.event_driver import EventDriver
from tunemq_scheduler.experiment.experiment_loop import ExperimentLoop
from tunemq_scheduler.results.trial_view import TrialView
from tunemq_scheduler.schedulers import TrialScheduler
from tunemq_shared.protocol import messages as m


class ListJournal:
    """Keeps the turns in memory."""

    def __init__(self) -> None:
        self.journal_records: list[m.JournalRecord] = []

    def append(self, journal_records: Sequence[m.JournalRecord]) -> None:
        self.journal_records.extend(journal_records)

    def close(self) -> None:
        pass


class CountingJournal:
    """Keeps nothing but the number of turns and of entries."""

    def __init__(self) -> None:
        self.turns = 0
        self.journal_records = 0

    def append(self, journal_records: Sequence[m.JournalRecord]) -> None:
        self.turns += 1
        self.journal_records += len(journal_records)

    def close(self) -> None:
        pass


class CountingSink:
    """Count the recorded commands by kind."""

    def __init__(self) -> None:
        self.counts: Counter[type[c.Command]] = Counter()

    def notify(self, command: c.NotifyCommand, trial: TrialView) -> None:
        self.counts[type(command)] += 1

    def trial_waits(self, trial: TrialView) -> None:
        pass

    def turn_began(self) -> None:
        pass

    def turn_ended(self) -> None:
        pass

    def notices(self, text: str) -> None:
        pass


class Search:
    """One simulated search; ``algorithms`` as `ExperimentProblem` takes them."""

    def __init__(
        self,
        make_scheduler: Callable[[], TrialScheduler],
        *,
        simulation: SimulationSettings,
        trials: int = 20,
        max_t: int = 9,
        lock_step: bool = False,
        journal: Any = None,
        in_experiment: int | None = None,
        max_bytes: int | None = None,
        **algorithms: Callable[[], Any],
    ) -> None:
        self.settings = RunnerSettings(
            keep=RetentionPolicy(
                num_to_keep=2,
                score_attribute="loss",
                higher_is_better=False,
                in_experiment=in_experiment,
                max_bytes=max_bytes,
            ),
            request={"cpu": 1.0},
            max_failures=-1,
            max_storage_failures=-1,
            max_node_losses=-1,
        )
        self.problem = problem = Problem(
            make_scheduler, seed=simulation.seed, trials=trials, max_t=max_t, **algorithms
        )
        self.runner = TrialRunner(self.settings)
        self.executor = SimulatedTrialExecutor(simulation, problem.metrics, problem.step_time)
        self.journal = journal if journal is not None else ListJournal()
        self.dispatcher = CountingSink()
        self.algorithms = problem.algorithms(lock_step=lock_step)
        self.loop = ExperimentLoop(
            driver=EventDriver(self.runner, self.algorithms, problem.plan),
            plan=problem.plan,
            executor=self.executor,
            journal=self.journal,
            dispatcher=self.dispatcher,
            resources_for=lambda _config: {"cpu": 1.0},
            trial_prefix="t",
            clock=self.executor.clock,
        )
        self.executor.open(problem.plan)

    def run(self) -> Search:
        self.loop.run()
        return self

    def outcome(self) -> ReplayOutcome:
        """The outcome of the run."""
        return outcome(self.settings, self.journal.journal_records)

    def replayed(self) -> TrialRunner:
        return replay(self.settings, self.journal.journal_records)

    def outcome_in_lock_step(self) -> ReplayOutcome:
        """The outcome of its journal when the algorithms decide about every result."""
        algorithms = self.problem.algorithms(lock_step=True)
        return replay_lock_step(
            self.settings, self.problem.plan, algorithms, self.journal.journal_records
        )
