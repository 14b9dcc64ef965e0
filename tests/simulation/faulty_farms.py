"""Searches on a simulated farm in which things go wrong, audited event by event."""

from __future__ import annotations

import random
import sys
from collections.abc import Callable, Sequence
from typing import Any, Final, NamedTuple

from tests.simulation.farm import CountingSink
from tests.simulation.simulated_problem import Problem
from tunemq.testing.faulty_executor import FaultyTrialExecutor
from tunemq.testing.journal_auditor import JournalAuditor
from tunemq.testing.journal_replay import ReplayOutcome, replay_lock_step
from tunemq.testing.simulated_executor import SimulationSettings
from tunemq.testing.simulated_farm import SimulatedFarm
from tunemq.testing.simulated_faults import FaultSettings
from tunemq.testing.simulated_uploads import UploadSettings
from tunemq_scheduler.core import commands as c
from tunemq_scheduler.core.runner_settings import RunnerSettings
from tunemq_scheduler.core.runner_snapshot import dump
from tunemq_scheduler.core.trial_runner import TrialRunner
from tunemq_scheduler.core.trials.kept_checkpoints import RetentionPolicy
from tunemq_scheduler.core.trials.trial import ERROR, TrialSummary
from tunemq_scheduler.experiment.event_driver import EventDriver
from tunemq_scheduler.experiment.experiment_loop import ExperimentLoop
from tunemq_scheduler.schedulers import (
    ASHAScheduler,
    HyperBandScheduler,
    MultiObjectiveASHA,
    PopulationBasedTraining,
    PopulationBasedTrainingReplay,
    TrialScheduler,
)
from tunemq_scheduler.search import BasicVariantGenerator, Searcher
from tunemq_shared.base.errors import InvariantBroken
from tunemq_shared.code.config_packing import pack_config
from tunemq_shared.protocol import messages as m

#: Longest virtual seconds from the last fault to the end of the search: many times the back-offs,
#: the uploads of absent nodes and the remaining training together.
TIMEOUT_S: Final = 1_800.0
#: Trial schedulers that change which steps are done, or with which configurations.
_DECIDING: Final = (
    ASHAScheduler,
    HyperBandScheduler,
    MultiObjectiveASHA,
    PopulationBasedTraining,
    PopulationBasedTrainingReplay,
)

LOCAL: Final = UploadSettings()
TWO_AND_NEWEST: Final = RetentionPolicy(
    num_to_keep=2, score_attribute="loss", higher_is_better=False
)

#: Where in a turn a scheduler dies; at the last, all nodes die with it.
BEFORE_COMMIT, AFTER_COMMIT, WITHIN_ORDERS, BEFORE_RELEASE, POWER_CUT = range(5)
DOWNTIMES_S: Final = (0.0, 0.5, 5.0, 20.0)


def found_all_damaged(trial: TrialSummary) -> bool:
    """Whether the trial ended because none of its checkpoints was whole."""
    return trial.status == ERROR and trial.reason.startswith("checkpoint not restored: not retried")


class SchedulerDied(Exception):
    """A scheduler is killed here."""


class Death(NamedTuple):
    """A scheduler's: when, where in its turn, and for how long there is none."""

    moment: float
    place: int
    downtime_s: float


class FaultySearch:
    """One search under faults; `run` ends with the search, and audits each of its events.

    Args:
        scheduler_deaths, power_cuts: how many; they begin like all other faults.
        stops, interrupts: how often a user stops a trial, or interrupts the search and resumes it.
        errored: how a scheduler that resumes the search treats trials in ERROR.
        clock_jumps: how often the scheduler's clock jumps forward by an hour.
        snapshots: the share of turns after which the journal gets a new snapshot.
        gpus, request: of each node, and the resources of a trial if not one CPU.
        every: number of events between two checks of the whole state.
    """

    def __init__(
        self,
        make_scheduler: Callable[[], TrialScheduler],
        *,
        seed: int,
        faults: FaultSettings,
        scheduler_deaths: int = 0,
        power_cuts: int = 0,
        stops: int = 0,
        interrupts: int = 0,
        clock_jumps: int = 0,
        errored: str = "",
        make_search: Callable[[], Searcher] = BasicVariantGenerator,
        trials: int = 8,
        max_t: int = 9,
        nodes: int = 3,
        cpus: float = 2.0,
        gpus: tuple[tuple[m.Gpu, ...], ...] = (),
        request: dict[str, float] | None = None,
        uploads: UploadSettings = LOCAL,
        keep: RetentionPolicy = TWO_AND_NEWEST,
        max_failures: int = -1,
        max_node_losses: int = -1,
        max_storage_failures: int = -1,
        snapshots: float = 0.02,
        every: int = 1,
    ) -> None:
        self.seed, self._trials, self._max_t = seed, trials, max_t
        self._errored, self._snapshots = errored, snapshots
        self.settings = RunnerSettings(
            keep=keep,
            request=request or {"cpu": 1.0},
            max_failures=max_failures,
            max_node_losses=max_node_losses,
            max_storage_failures=max_storage_failures,
        )
        self.problem = Problem(
            make_scheduler, seed=seed, trials=trials, max_t=max_t, make_search=make_search
        )
        simulation = SimulationSettings(
            nodes=nodes, resources={"cpu": cpus}, gpus=gpus, seed=seed, uploads=uploads
        )
        self.farm = SimulatedFarm(
            simulation,
            faults,
            self.problem.metrics,
            self.problem.step_time,
            on_start=self._process_starts,
        )
        self.turns: list[bytes] = []
        self.dispatcher = CountingSink()
        self.auditor = JournalAuditor(
            self.settings, said=self._said, store=self.farm.store, every=every
        )
        self._outcome = ReplayOutcome()
        self._started: dict[tuple[str, int], str] = {}
        self.rng = rng = random.Random(f"{seed}/schedulers")
        until_s = faults.until_s
        deaths = [(rng.randrange(4), rng.choice(DOWNTIMES_S)) for _ in range(scheduler_deaths)]
        deaths += [(POWER_CUT, rng.choice(DOWNTIMES_S)) for _ in range(power_cuts)]
        self._deaths = sorted(Death(until_s * rng.random(), *death) for death in deaths)
        self._stops = sorted(until_s * rng.random() for _ in range(stops))
        self._interrupts = sorted(until_s * rng.random() for _ in range(interrupts))
        self._jumps = sorted(until_s * rng.random() for _ in range(clock_jumps))
        self._jumped_s = 0.0
        self._is_doomed: int | None = None
        #: The snapshot: the number of turns before it, the state, the finished trials, the
        #: algorithms.
        self._snapshot: tuple[int, bytes, dict[str, bytes], dict[str, bytes]] | None = None
        #: Whether all configurations come to their end, whatever goes wrong.
        self.is_exact = (
            not isinstance(make_scheduler(), _DECIDING)
            and not stops
            and {max_failures, max_node_losses, max_storage_failures} == {-1}
        )
        #: How many events were journalled, ticks of the clock not counted.
        self.events = 0
        self.lives = 0
        self.loop: ExperimentLoop
        self.executor: FaultyTrialExecutor

    # --- the run ----------------------------------------------------------------------------------

    def run(self) -> FaultySearch:
        self.farm.open(self.problem.plan)
        self.lives = 1
        runner = TrialRunner(self.settings)
        self._begin(EventDriver(runner, self.problem.algorithms(), self.problem.plan))
        while not self._live():
            self._take_up()
        self.auditor.same_as(self.loop.runner)
        self.auditor.check()
        self.auditor.check_store()
        return self

    def _live(self) -> bool:
        """Turn until the search ends (True), or its scheduler dies or is interrupted."""
        last = self.farm.faults.settings.until_s + TIMEOUT_S
        time = self.farm.time
        while not self.loop.runner.is_finished:
            self._act(time.now)
            try:
                self.loop.step()
            except SchedulerDied:
                death = self._deaths.pop(0)
                self._end_life(death.downtime_s, is_cold=death.place == POWER_CUT)
                return False
            if time.now > last:
                live = [(trial.trial_id, trial.status) for trial in self._runner.live.values()]
                raise InvariantBroken(f"I6: after {time.now:.0f} s there is still {live}")
        if not self._runner.interrupted:
            return True
        self._end_life(self.rng.choice(DOWNTIMES_S), is_cold=self.rng.random() < 0.5)
        return False

    def _act(self, now: float) -> None:
        """Apply the faults and user actions that are due."""
        if self._deaths and now >= self._deaths[0].moment:
            self._is_doomed = self._deaths[0].place
        if self._interrupts and now >= self._interrupts[0]:
            self._interrupts.pop(0)
            self.loop.interrupt("a person wants it")
        if self._stops and now >= self._stops[0] and self.loop.trials:
            self._stops.pop(0)
            trial = self.rng.choice(sorted(self.loop.trials))
            self.loop.request_stop("a person wants it", trial)
        if self._jumps and now >= self._jumps[0]:
            self._jumps.pop(0)
            self._jumped_s += 3600.0

    @property
    def _runner(self) -> TrialRunner:
        return self.loop.runner

    def _end_life(self, downtime_s: float, *, is_cold: bool) -> None:
        """Stop the scheduler for a while; nodes keep running unless they lose power, too."""
        self._is_doomed = None
        self._is_cold = is_cold
        self.executor.close()
        vars(self.farm).pop("send_assignment", None)
        if is_cold:
            for instance_id in self.farm.current.values():
                if self.farm.nodes[instance_id].is_alive:
                    self.farm.kill(instance_id)
            self.farm.wipe()
        self.farm.time.pass_to(self.farm.time.now + downtime_s)

    def _take_up(self) -> None:
        """Start a scheduler on the last one's files; that one may have died anywhere in a turn."""
        self.lives += 1
        algorithms = self.problem.algorithms()
        told = 0
        if self._snapshot is None or self.rng.random() < 0.3:
            runner = TrialRunner(self.settings)
        else:
            told, state, finished, states = self._snapshot
            runner = TrialRunner.load(self.settings, state, finished)
            algorithms.set_state(states)
        driver = EventDriver(runner, algorithms, self.problem.plan)
        driver.replay(m.decode_records(turn) for turn in self.turns[told:])
        self.auditor.same_as(runner)
        self._begin(driver)
        self.loop.resume(
            m.ExperimentResumed(
                self.lives, self.farm.time.now, errored=self._errored, is_cold=self._is_cold
            )
        )
        if not self._is_cold:
            self.loop.reattach()

    def _begin(self, driver: EventDriver) -> None:
        self.executor = FaultyTrialExecutor(self.farm, self.lives)
        began, before = self.farm.time.now + self._jumped_s, driver.runner.elapsed
        self.loop = ExperimentLoop(
            driver=driver,
            plan=self.problem.plan,
            executor=_Mortal(self),
            journal=self,
            dispatcher=self.dispatcher,
            resources_for=lambda _config: dict(self.settings.request or {}),
            trial_prefix="t",
            clock=lambda: before + self.farm.time.now + self._jumped_s - began,
            discard=self.farm.store.discard,
            after_turn=self._maybe_snapshot,
            nodes_may_come=True,
        )
        self.executor.open(self.problem.plan)

    def _maybe_snapshot(self) -> None:
        if self.rng.random() > self._snapshots:
            return
        states = self.loop.algorithms.get_state()
        if states is not None:
            runner = self._runner
            self._snapshot = len(self.turns), dump(runner), dict(runner.finished), states

    # --- the journal ------------------------------------------------------------------------------

    def append(self, journal_records: Sequence[m.JournalRecord]) -> None:
        self.die_at(BEFORE_COMMIT)
        self.die_at(POWER_CUT)
        self.turns.append(m.encode(journal_records))
        self.events += sum(type(entry.event) is not m.Tick for entry in journal_records)
        turn = m.decode_records(self.turns[-1])
        commands = self.auditor.turn(turn)
        self._outcome.note_turn(turn, commands)
        is_failing = sys.exc_info()[0] is not None  # then only records are kept of its commands
        if commands != self.loop.driver.commands and not is_failing:
            raise InvariantBroken(f"I8: {commands} are ordered, not {self.loop.driver.commands}")
        self.die_at(AFTER_COMMIT)

    def close(self) -> None:
        pass

    def die_at(self, place: int) -> None:
        if self._is_doomed == place:
            raise SchedulerDied

    def journal_records(self) -> list[m.JournalRecord]:
        return [entry for turn in self.turns for entry in m.decode_records(turn)]

    # --- results ----------------------------------------------------------------------------------

    def outcome(self) -> ReplayOutcome:
        """The outcome of its journal; the auditor has replayed each event."""
        return self._outcome

    def outcome_in_lock_step(self) -> ReplayOutcome:
        algorithms = self.problem.algorithms(lock_step=True)
        return replay_lock_step(
            self.settings, self.problem.plan, algorithms, self.journal_records()
        )

    def expected(self) -> dict[tuple[bytes, int], dict[str, Any]]:
        """Return the results of an undisturbed run.

        A trial whose checkpoints were all damaged ends there, in ERROR.
        """
        search = self.problem.algorithms().search
        found: dict[tuple[bytes, int], dict[str, Any]] = {}
        for n in range(self._trials):
            suggestion = search.suggest(n, f"t_{n:05d}")
            config = pack_config(suggestion.config)
            summary = self._runner.summary(f"t_{n:05d}")
            last = summary.last_result.step if found_all_damaged(summary) else self._max_t
            for step in range(1, last + 1):
                found[config, step] = self.problem.metrics(suggestion.config, step)
        return found

    def results(self) -> dict[tuple[bytes, int], dict[str, Any]]:
        """The recorded results: (configuration, step) -> metrics."""
        configs = {trial: self._runner.summary(trial).config for trial in self._runner.finished}
        return {(configs[trial], step): told for trial, step, told in self.outcome().records}

    # --- messages of the farm ---------------------------------------------------------------------

    def _said(self, instance_id: str, number: int) -> m.NodeEvent | None:
        return self.farm.nodes[instance_id].said(number)

    def _process_starts(self, order: c.StartTrial, held: list[c.StartTrial]) -> None:
        key = order.trial, order.attempt
        if key in self._started:
            raise InvariantBroken(
                f"I5: trial {order.trial}: attempt {order.attempt} starts on {order.instance_id}, "
                f"and was on {self._started[key]}"
            )
        self._started[key] = order.instance_id
        if order.devices.keys() & self.farm.nodes[order.instance_id].withheld:
            raise InvariantBroken(f"I5: trial {order.trial} begins on a device that is withheld")
        wanted = sum(one.resources["cpu"] for one in (order, *held))
        if wanted > self.farm.settings.resources["cpu"]:
            processes = [(one.trial, one.attempt) for one in held]
            raise InvariantBroken(
                f"I5: trial {order.trial}: attempt {order.attempt} starts on {order.instance_id}, "
                f"which has no room beside {processes}"
            )


class _Mortal:
    """The executor of a scheduler that may die while it gives its orders."""

    def __init__(self, search: FaultySearch) -> None:
        self._search, self._executor = search, search.executor

    def __getattr__(self, name: str) -> Any:
        return getattr(self._executor, name)

    def perform(self, commands: Sequence[c.ExecutorCommand]) -> None:
        if self._search._is_doomed == WITHIN_ORDERS:
            self._search.farm.send_assignment = self._some_commands
        self._executor.perform(commands)

    def _some_commands(self, assignment: m.Assignment) -> None:
        """Every other assignment still leaves."""
        farm = self._search.farm
        del farm.send_assignment
        if farm.faults.rng.random() < 0.5:
            raise SchedulerDied
        farm.send_assignment(assignment)
        farm.send_assignment = self._some_commands

    def acknowledge(self, acknowledged: dict[str, int]) -> None:
        self._search.die_at(BEFORE_RELEASE)
        self._executor.acknowledge(acknowledged)
