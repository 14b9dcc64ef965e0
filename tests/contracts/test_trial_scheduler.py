"""The contract of trial schedulers, as the experiment's loop relies on it."""

from __future__ import annotations

import json
import random
from collections.abc import Callable, Iterable
from types import SimpleNamespace
from typing import Any

import pytest

from tunemq_scheduler.schedulers import (
    ASHAScheduler,
    FIFOScheduler,
    TrialScheduler,
    make_scheduler,
    read_verdict,
)
from tunemq_shared.protocol.result_conditions import Condition, first_that_holds

STEPS = 30


class Median(TrialScheduler):
    """A minimal user's scheduler, without horizons or state."""

    def on_trial_result(self, runner: Any, trial: Any, result: dict[str, Any]) -> str:
        bad = result["training_iteration"] > 3 and result["loss"] > 0.8
        return self.STOP.because("above 0.8") if bad else "CONTINUE"


MAKERS: dict[str, Callable[[], TrialScheduler]] = {
    "fifo": FIFOScheduler,
    "asha": lambda: ASHAScheduler(max_t=20, reduction_factor=2),
    "asha in brackets": lambda: ASHAScheduler(max_t=20, reduction_factor=2, brackets=3),
    "asha to the end": lambda: ASHAScheduler(max_t=20, stop_last_trials=False),
    "custom": Median,
}


class Runner:
    def __init__(self, trials: Iterable[Any]) -> None:
        self.trials = list(trials)

    def waiting(self) -> Iterable[Any]:
        return [trial for trial in self.trials if trial.status == "PENDING"]


def new_trial(number: int) -> Any:
    return SimpleNamespace(
        trial_id=f"t{number}", number=number, config={}, status="PENDING", last_result={}
    )


@pytest.fixture(params=MAKERS)
def make(request: pytest.FixtureRequest) -> Callable[[], TrialScheduler]:
    return lambda: make_scheduler(MAKERS[request.param](), "loss", "min", 4)


def loss(number: int, step: int) -> float:
    return random.Random(f"{number}/{step}").random()


def play(scheduler: TrialScheduler, *, always: bool, trials: int = 12) -> list[Any]:
    """Run trials in turns, and return the story: the decisions must not depend on ``always``."""
    runner = Runner(new_trial(number) for number in range(trials))
    for trial in runner.trials:
        scheduler.on_trial_add(runner, trial)
        trial.status = "RUNNING"
    story = []
    for step in range(1, STEPS + 1):
        for trial in runner.trials:
            if trial.status != "RUNNING":
                continue
            result = {"training_iteration": step, "loss": loss(trial.number, step)}
            trial.last_result = result
            horizon = scheduler.horizon(trial)
            due = horizon is None or first_that_holds(horizon, result) is not None
            if not (always or due):
                continue
            verdict = read_verdict(scheduler, scheduler.on_trial_result(runner, trial, result))
            assert due or verdict == "CONTINUE"
            if verdict == "STOP":
                trial.status = "TERMINATED"
                story.append((trial.trial_id, step, verdict.reason))
    for trial in runner.trials:
        if trial.status == "RUNNING":
            scheduler.on_trial_complete(runner, trial, trial.last_result)
    return story


def test_scheduler_asked_only_at_horizons_decides_the_same(
    make: Callable[[], TrialScheduler],
) -> None:
    always, only = make(), make()
    assert play(always, always=True) == play(only, always=False)
    assert always.get_state() == only.get_state()


def test_same_results_give_the_same_decisions(make: Callable[[], TrialScheduler]) -> None:
    assert play(make(), always=False) == play(make(), always=False)


def test_stop_has_a_reason(make: Callable[[], TrialScheduler]) -> None:
    assert all(reason for _, _, reason in play(make(), always=False))


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
