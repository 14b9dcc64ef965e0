"""The contract of trial schedulers, as the experiment's loop relies on it."""

from __future__ import annotations

import json
import random
from collections.abc import Callable, Iterable
from types import SimpleNamespace
from typing import Any

import pytest

from tunemq_scheduler.schedulers import (
    PASHA,
    PB2,
    ASHAScheduler,
    Exploit,
    FIFOScheduler,
    HyperBandForBOHB,
    HyperBandScheduler,
    MedianStoppingRule,
    MultiObjectiveASHA,
    PopulationBasedTraining,
    Resume,
    Stop,
    TrialScheduler,
    make_scheduler,
    read_answer,
)
from tunemq_scheduler.search import uniform
from tunemq_shared.protocol.result_conditions import Condition, first_that_holds

STEPS = 30


class Median(TrialScheduler):
    """A minimal user's scheduler, without horizons or state."""

    def on_trial_result(self, runner: Any, trial: Any, result: dict[str, Any]) -> str:
        bad = result["training_iteration"] > 3 and result["loss"] > 0.8
        return self.STOP.because("above 0.8") if bad else "CONTINUE"


class Rounds(TrialScheduler):
    """A minimal user's scheduler with actions: after three steps only the best continues."""

    def on_trial_result(self, runner: Any, trial: Any, result: dict[str, Any]) -> Any:
        if result["training_iteration"] != 3:
            return "CONTINUE"
        others = [one for one in runner.get_trials() if one is not trial]
        if any(one.last_result.get("training_iteration", 0) < 3 for one in others):
            return "PAUSE"
        best = min([*others, trial], key=lambda one: one.last_result["loss"])
        stops = [Stop(one, "another is better") for one in [*others, trial] if one is not best]
        return [*stops, Resume(best)]

    def choose_trial_to_run(self, runner: Any) -> Any:
        return next((one for one in runner.waiting() if one.status == "PENDING"), None)


def population(*, synch: bool) -> TrialScheduler:
    return PopulationBasedTraining(
        "training_iteration",
        perturbation_interval=4,
        hyperparam_mutations={"lr": uniform(0, 1), "batch": [16, 32, 64]},
        synch=synch,
    )


def bandits(*, synch: bool) -> TrialScheduler:
    bounds = {"lr": [0, 1], "batch": [16, 64]}
    return PB2("training_iteration", perturbation_interval=4, hyperparam_bounds=bounds, synch=synch)


MAKERS: dict[str, Callable[[], TrialScheduler]] = {
    "fifo": FIFOScheduler,
    "asha": lambda: ASHAScheduler(max_t=20, reduction_factor=2),
    "asha in brackets": lambda: ASHAScheduler(max_t=20, reduction_factor=2, brackets=3),
    "asha to the end": lambda: ASHAScheduler(max_t=20, stop_last_trials=False),
    "asha, promotion": lambda: ASHAScheduler(max_t=20, reduction_factor=2, type="promotion"),
    "asha, promotion in brackets": lambda: ASHAScheduler(
        max_t=20, reduction_factor=2, brackets=2, type="promotion"
    ),
    "pasha": lambda: PASHA(max_t=20, reduction_factor=2),
    "multi-objective asha": lambda: MultiObjectiveASHA(
        ["loss", "training_iteration"], "min", max_t=20, reduction_factor=2, brackets=2
    ),
    "hyperband": lambda: HyperBandScheduler(max_t=20, reduction_factor=2),
    "hyperband for bohb": lambda: HyperBandForBOHB(max_t=20, reduction_factor=2),
    "hyperband to the end": lambda: HyperBandScheduler(max_t=9, stop_last_trials=False),
    "median": lambda: MedianStoppingRule("training_iteration", grace_period=3),
    "median, soft": lambda: MedianStoppingRule(
        "training_iteration", grace_period=3, min_time_slice=4, hard_stop=False
    ),
    "pbt": lambda: population(synch=False),
    "pbt, synchronous": lambda: population(synch=True),
    "pb2": lambda: bandits(synch=False),
    "pb2, synchronous": lambda: bandits(synch=True),
    "custom": Median,
    "rounds": Rounds,
}


class Runner:
    """Trials that follow a scheduler's answers, each of ``STEPS`` results at most."""

    def __init__(self, trials: Iterable[Any]) -> None:
        self.trials = list(trials)
        #: Trial, step, what happened to it, and why; in order.
        self.story: list[tuple[str, int, str, str]] = []

    def get_trials(self) -> list[Any]:
        return [trial for trial in self.trials if trial.status != "TERMINATED"]

    def waiting(self) -> Iterable[Any]:
        waiting = [trial for trial in self.trials if trial.status in ("PENDING", "PAUSED")]
        return sorted(waiting, key=lambda trial: trial.status != "PENDING")

    def call(self, scheduler: TrialScheduler, method: str, *args: Any, about: Any = None) -> str:
        """Call a method of the scheduler, and do what it answers; return the decision."""
        told = getattr(scheduler, method)(self, *args)
        trial_id = about.trial_id if about is not None else ""
        decision, actions = read_answer(scheduler, method, told, trial_id)
        if about is not None:
            self._apply(about, decision, decision.reason)
        by_id = {trial.trial_id: trial for trial in self.trials}
        for action in actions:
            if isinstance(action, Exploit):
                self._exploit(by_id[action.trial_id], by_id[action.source], action)
            else:
                self._apply(by_id[action.trial_id], action.word, action.reason)
        return decision

    def get_trial(self, trial_id: str) -> Any:
        return next((one for one in self.get_trials() if one.trial_id == trial_id), None)

    def has_waiting(self) -> bool:
        return any(trial.status in {"PENDING", "PAUSED"} for trial in self.trials)

    def expects_trials(self) -> bool:
        return False

    def _exploit(self, trial: Any, source: Any, action: Exploit) -> None:
        trial.last_result = {**source.last_result}
        trial.config = action.config
        self.story.append((trial.trial_id, step_of(trial), f"EXPLOIT {source}", action.reason))
        if trial.status == "RUNNING":
            trial.status = "PENDING"

    def _apply(self, trial: Any, word: str, reason: str) -> None:
        statuses = {"STOP": "TERMINATED", "PAUSE": "PAUSED", "RESUME": "PENDING"}
        if word in statuses:
            trial.status = statuses[word]
            self.story.append((trial.trial_id, step_of(trial), word, reason))

    def start_all(self, scheduler: TrialScheduler) -> bool:
        """Start the trials that the scheduler chooses; return whether any runs."""
        while (chosen := scheduler.choose_trial_to_run(self)) is not None:
            chosen.status = "RUNNING"
        return any(trial.status == "RUNNING" for trial in self.trials)


def new_trial(number: int) -> Any:
    return SimpleNamespace(
        trial_id=f"t{number}",
        number=number,
        config={"lr": 0.5, "batch": 32},
        status="PENDING",
        last_result={},
    )


def step_of(trial: Any) -> int:
    return trial.last_result.get("training_iteration", 0)


@pytest.fixture(params=MAKERS)
def make(request: pytest.FixtureRequest) -> Callable[[], TrialScheduler]:
    return lambda: make_scheduler(MAKERS[request.param](), "loss", "min", 4)


def loss(number: int, step: int) -> float:
    return random.Random(f"{number}/{step}").random()


def play(scheduler: TrialScheduler, *, always: bool, trials: int = 12) -> list[Any]:
    """Run trials in turns, and return the story: the decisions must not depend on ``always``."""
    runner = Runner(new_trial(number) for number in range(trials))
    for trial in runner.trials:
        runner.call(scheduler, "on_trial_add", trial)
    runner.call(scheduler, "on_search_exhausted")
    while True:
        if not runner.start_all(scheduler):
            runner.call(scheduler, "on_stall")
            if not runner.start_all(scheduler):
                break
        for trial in runner.trials:
            if trial.status == "RUNNING":
                advance(scheduler, runner, trial, always=always)
    assert not runner.get_trials(), "nothing can happen any more"
    return runner.story


def advance(scheduler: TrialScheduler, runner: Runner, trial: Any, *, always: bool) -> None:
    """Let a trial report its next result, or end behind its last."""
    step = step_of(trial) + 1
    if step > STEPS:
        trial.status = "TERMINATED"
        runner.call(scheduler, "on_trial_complete", trial, trial.last_result)
        return
    horizon = scheduler.horizon(trial)
    result = {"training_iteration": step, "loss": loss(trial.number, step)}
    trial.last_result = result
    due = horizon is None or first_that_holds(horizon, result) is not None
    observes = type(scheduler).observe is not TrialScheduler.observe
    if not due and observes:
        scheduler.observe(runner, trial, result)
    elif always or due:
        decision = runner.call(scheduler, "on_trial_result", trial, result, about=trial)
        assert due or decision == "CONTINUE"


def test_scheduler_asked_only_at_horizons_decides_the_same(
    make: Callable[[], TrialScheduler],
) -> None:
    always, only = make(), make()
    assert play(always, always=True) == play(only, always=False)
    assert always.get_state() == only.get_state()


def test_same_results_give_the_same_decisions(make: Callable[[], TrialScheduler]) -> None:
    assert play(make(), always=False) == play(make(), always=False)


def test_stop_has_a_reason(make: Callable[[], TrialScheduler]) -> None:
    story = play(make(), always=False)
    assert all(reason for *_, word, reason in story if word == "STOP")


def test_horizons_are_none_or_conditions_and_asking_changes_nothing(
    make: Callable[[], TrialScheduler],
) -> None:
    scheduler, trial = make(), new_trial(0)
    scheduler.on_trial_add(Runner([trial]), trial)
    horizon = scheduler.horizon(trial)
    assert horizon is None or all(isinstance(condition, Condition) for condition in horizon)
    assert scheduler.horizon(trial) == horizon


@pytest.mark.parity(62, 172)
def test_choosing_takes_a_waiting_trial_and_changes_nothing(
    make: Callable[[], TrialScheduler],
) -> None:
    scheduler = make()
    running, waiting = new_trial(0), new_trial(1)
    running.status = "RUNNING"
    runner = Runner([running, waiting])
    for trial in runner.trials:
        scheduler.on_trial_add(runner, trial)
    assert scheduler.choose_trial_to_run(runner) is waiting
    assert scheduler.choose_trial_to_run(runner) is waiting
    waiting.status = "RUNNING"
    assert scheduler.choose_trial_to_run(runner) is None


@pytest.mark.parity(172)
def test_trials_may_end_in_every_way(make: Callable[[], TrialScheduler]) -> None:
    scheduler = make()
    trials = [new_trial(number) for number in range(4)]
    runner = Runner(trials)
    for trial in trials:
        scheduler.on_trial_add(runner, trial)
    scheduler.on_trial_complete(runner, trials[0], {"training_iteration": 1, "loss": 1.0})
    scheduler.on_trial_complete(runner, trials[1], {})
    scheduler.on_trial_error(runner, trials[2])
    scheduler.on_trial_remove(runner, trials[3])
    assert scheduler.debug_string()


def test_saved_state_is_json_and_restores_the_scheduler(
    make: Callable[[], TrialScheduler],
) -> None:
    scheduler = make()
    play(scheduler, always=False)
    state = scheduler.get_state()
    if state is None:
        return  # such a scheduler gets the history replayed instead
    other = make()
    other.set_state(json.loads(json.dumps(state)))
    assert other.get_state() == state
    assert play(other, always=False) == play(scheduler, always=False)
