"""Algorithms that replay the events continue as those that saw the events live."""

from __future__ import annotations

import random
from collections.abc import Callable
from typing import Any

import optuna
import pytest

from tests.simulation.farm import Search
from tunemq.testing.comparable_state import comparable
from tunemq.testing.simulated_executor import SimulationSettings
from tunemq_scheduler.core.runner_snapshot import dump
from tunemq_scheduler.core.trial_runner import TrialRunner
from tunemq_scheduler.experiment.event_driver import EventDriver
from tunemq_scheduler.schedulers import (
    PASHA,
    ASHAScheduler,
    FIFOScheduler,
    HyperBandForBOHB,
    HyperBandScheduler,
    MedianStoppingRule,
    MultiObjectiveASHA,
    Resume,
    Stop,
    TrialScheduler,
)
from tunemq_scheduler.search import (
    BasicVariantGenerator,
    ConcurrencyLimiter,
    Searcher,
)
from tunemq_scheduler.search.optuna.optuna_search import OptunaSearch
from tunemq_scheduler.search.optuna.tune_bohb import TuneBOHB
from tunemq_scheduler.stopping.budget import (
    GPUHoursStopper,
    MaximumTrialsStopper,
    TargetStopper,
)
from tunemq_scheduler.stopping.plateau import ExperimentPlateauStopper, TrialPlateauStopper
from tunemq_scheduler.stopping.stopper import CombinedStopper, FunctionStopper, Stopper
from tunemq_shared.code.config_packing import pack_config
from tunemq_shared.protocol import messages as m

SEEDS = 3
TRIALS = 30


class Greedy(Searcher):
    """A searcher as users write them, which stays near the best so far."""

    def __init__(self, offers_state: bool = False) -> None:
        super().__init__()
        self.best: list[Any] = [None, None]
        self.suggested: dict[str, float] = {}
        self.results = 0
        self.offers_state = offers_state

    def set_search_properties(self, metric, mode, config, **spec):
        self._metric, self._mode = metric, mode
        return True

    def suggest(self, trial_id):
        draw = random.Random(f"{len(self.suggested)}/{self.results}").random()
        near = 0.5 if self.best[1] is None else self.best[1]
        self.suggested[trial_id] = value = (near + draw) / 2
        return {"lr": value}

    def on_trial_result(self, trial_id, result):
        self.results += 1

    def on_trial_complete(self, trial_id, result=None, error=False):
        if result and (self.best[0] is None or result["loss"] < self.best[0]):
            self.best = [result["loss"], self.suggested[trial_id]]

    def on_trial_restored(self, trial_id, config):
        self.suggested[trial_id] = config["lr"]
        return True

    def get_state(self):
        if not self.offers_state:
            return None
        return {"best": self.best, "suggested": self.suggested, "results": self.results}

    def set_state(self, state):
        self.best, self.suggested = state["best"], state["suggested"]
        self.results = state["results"]


class Halving(TrialScheduler):
    """A trial scheduler as users write them, asked about every result; it offers no state."""

    def __init__(self) -> None:
        self.seen: dict[str, int] = {}
        self.values: list[float] = []

    def on_trial_result(self, runner, trial, result):
        self.seen[trial.trial_id] = self.seen.get(trial.trial_id, 0) + 1
        self.values.append(result["loss"])
        worse = sum(value < result["loss"] for value in self.values)
        is_slow = self.seen[trial.trial_id] >= 3 and worse > len(self.values) / 2
        return self.STOP if is_slow else self.CONTINUE


class Rounds(TrialScheduler):
    """A trial scheduler with actions as users write them: at step 3 it keeps the better half."""

    def on_trial_result(self, runner, trial, result):
        return self.PAUSE if result["training_iteration"] == 3 else self.CONTINUE

    def on_stall(self, runner):
        ranked = sorted(runner.get_trials(), key=lambda trial: trial.last_result["loss"])
        half = (len(ranked) + 1) // 2
        return [*map(Resume, ranked[:half]), *(Stop(one, "worse") for one in ranked[half:])]

    def choose_trial_to_run(self, runner):
        return next((one for one in runner.waiting() if one.status == "PENDING"), None)


def asha(**options) -> TrialScheduler:
    return ASHAScheduler(max_t=9, reduction_factor=3, **options)


POINTS = [{"lr": 0.5}, {"lr": 0.01}]
SEARCHES: dict[str, Callable[[], Searcher]] = {
    "random": BasicVariantGenerator,
    "random_limited": lambda: ConcurrencyLimiter(BasicVariantGenerator(POINTS), 2),
    "optuna": lambda: OptunaSearch(points_to_evaluate=POINTS),
    "optuna_limited": lambda: ConcurrencyLimiter(OptunaSearch(), 2),
    "optuna_batches": lambda: ConcurrencyLimiter(OptunaSearch(), 3, batch=True),
    "optuna_sampler": lambda: OptunaSearch(sampler=optuna.samplers.RandomSampler(seed=3)),
    "bohb": lambda: TuneBOHB(points_to_evaluate=POINTS),
    "bohb_model": lambda: TuneBOHB(bohb_config={"random_fraction": 0.0}),
    "bohb_limited": lambda: TuneBOHB(max_concurrent=2),
    "users_own": Greedy,
    "users_own_with_state": lambda: Greedy(offers_state=True),
}
SCHEDULERS: dict[str, Callable[[], TrialScheduler]] = {
    "fifo": FIFOScheduler,
    "asha": asha,
    "asha_brackets": lambda: asha(brackets=2),
    "asha_promotion": lambda: asha(type="promotion"),
    "pasha": lambda: PASHA(max_t=9, reduction_factor=2),
    "moasha": lambda: MultiObjectiveASHA(["loss", "training_iteration"], "min", max_t=9),
    "hyperband": lambda: HyperBandScheduler(max_t=9, reduction_factor=3),
    "hyperband_for_bohb": lambda: HyperBandForBOHB(max_t=9, reduction_factor=3),
    "median": lambda: MedianStoppingRule("training_iteration", grace_period=3, hard_stop=False),
    "users_own": Halving,
    "users_own_rounds": Rounds,
}
STOPPERS: dict[str, Callable[[], Stopper | None]] = {
    "none": lambda: None,
    "trial_plateau": lambda: TrialPlateauStopper("loss", std=0.15, num_results=3),
    "experiment_plateau": lambda: ExperimentPlateauStopper("loss", std=0.01, top=4, patience=90),
    "gpu_hours": lambda: GPUHoursStopper(0.1),
    "target": lambda: TargetStopper("loss", 0.01, "min"),
    "combined": lambda: CombinedStopper(
        TrialPlateauStopper("loss", std=0.1, grace_period=5), MaximumTrialsStopper(29)
    ),
    "function": lambda: FunctionStopper(lambda _trial, result: result["loss"] < 0.2),
}
#: Each of all with the simplest of the others, and some of them together.
MIXES = [
    *((search, "fifo", "none") for search in SEARCHES),
    *(("random", scheduler, "none") for scheduler in SCHEDULERS if scheduler != "fifo"),
    *(("random", "fifo", stopper) for stopper in STOPPERS if stopper != "none"),
    ("optuna", "asha", "trial_plateau"),
    ("bohb", "hyperband_for_bohb", "none"),
    ("bohb_model", "hyperband_for_bohb", "none"),
    ("bohb_limited", "hyperband_for_bohb", "trial_plateau"),
    ("bohb_model", "asha_promotion", "none"),
    ("users_own_with_state", "asha_brackets", "combined"),
]
#: Algorithms without saved state replay all events.
STATELESS = {"optuna_sampler", "users_own", "users_own_rounds", "function"}


class TurnJournal:
    def __init__(self) -> None:
        self.turns: list[list[m.JournalRecord]] = []

    def append(self, journal_records) -> None:
        self.turns.append(list(journal_records))

    def close(self) -> None:
        pass


class Mixed(Search):
    """A simulated search with any algorithms."""

    def __init__(self, mix: tuple[str, str, str], seed: int) -> None:
        search, scheduler, stopper = mix
        simulation = SimulationSettings(
            nodes=3, seed=seed, latency_s=0.1, deaths=0.3, death_window_s=40.0
        )
        super().__init__(
            SCHEDULERS[scheduler],
            make_search=SEARCHES[search],
            make_stopper=STOPPERS[stopper],
            simulation=simulation,
            trials=TRIALS,
            journal=TurnJournal(),
        )


class Asked:
    """Algorithms that decide about later events, as in the loop."""

    def __init__(self, driver: EventDriver) -> None:
        self.driver = driver
        self.suggestions = self.decisions = 0

    def ask(self, turn: list[m.JournalRecord]) -> None:
        for journal_record in turn:
            event = journal_record.event
            if isinstance(event, m.ConfigSuggested):
                suggestion = self.driver.algorithms.suggest(event.n, event.trial)
                assert pack_config(suggestion.config) == event.config, event
                self.suggestions += 1
            self.decisions += isinstance(event, m.ResultReported) and bool(journal_record.answers)
            if not isinstance(event, m.ActionTaken):  # the scheduler takes its actions itself
                self.driver.handle(event)
        assert self.driver.journal_records == turn
        self.driver.end_turn()


def told(search: Mixed, cut: int, snapshot: int | None) -> Asked | None:
    """Algorithms that replayed the turns before ``cut``, or loaded a state at ``snapshot``."""
    runner, algorithms, begin = TrialRunner(search.settings), search.problem.algorithms(), 0
    if snapshot is not None:
        EventDriver(runner, algorithms, search.problem.plan).replay(search.journal.turns[:snapshot])
        states = algorithms.get_state()
        if states is None:
            return None
        runner = TrialRunner.load(search.settings, dump(runner), dict(runner.finished))
        algorithms, begin = search.problem.algorithms(), snapshot
        algorithms.set_state(states)
    driver = EventDriver(runner, algorithms, search.problem.plan)
    driver.replay(search.journal.turns[begin:cut])
    return Asked(driver)


@pytest.mark.parity(172, 173, 180)
@pytest.mark.parametrize("with_snapshot", [False, True])
@pytest.mark.parametrize("mix", MIXES, ids="-".join)
def test_restart_changes_no_suggestion_and_no_decision(
    mix: tuple[str, str, str], with_snapshot: bool
) -> None:
    suggestions = decisions = taken = 0
    for seed in range(SEEDS):
        search = Mixed(mix, seed)
        search.run()
        turns = search.journal.turns
        chance = random.Random(seed)
        for _ in range(6):
            cut = chance.randrange(1, len(turns))
            asked = told(search, cut, chance.randrange(cut) if with_snapshot else None)
            if asked is None:
                assert STATELESS & set(mix) or mix[0] == "optuna_batches"
                continue
            taken += 1
            for turn in turns[cut:]:
                asked.ask(turn)
            suggestions += asked.suggestions
            decisions += asked.decisions
    if with_snapshot and STATELESS & set(mix):
        assert not taken
        return
    assert suggestions >= 20
    assert decisions >= 20 or mix[1:] == ("fifo", "none")


def test_result_decided_differently_on_replay_keeps_the_journalled_decision() -> None:
    search = Mixed(("random", "asha", "none"), 1)
    search.run()
    stopped = {
        answer.trial
        for turn in search.journal.turns
        for journal_record in turn
        for answer in journal_record.answers
        if isinstance(answer, m.DecisionMade)
    }
    assert stopped
    algorithms = search.problem.algorithms()
    ended: list[str] = []
    algorithms.scheduler.on_trial_complete = lambda _runner, trial, _result: ended.append(
        trial.trial_id
    )
    algorithms.scheduler.on_trial_result = lambda *_: "STOP"  # whatever is true of it
    runner = TrialRunner(search.settings)
    EventDriver(runner, algorithms, search.problem.plan).replay(search.journal.turns)
    assert comparable(runner) == comparable(search.runner)
    assert set(ended) == set(runner.finished) - stopped
