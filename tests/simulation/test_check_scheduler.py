"""The check for trial schedulers of third parties: good ones pass, and others are told why not."""

from __future__ import annotations

import random
from collections.abc import Callable
from typing import Any

import pytest

from tunemq.testing import check_trial_scheduler
from tunemq_scheduler.schedulers import (
    ASHAScheduler,
    FIFOScheduler,
    HyperBandScheduler,
    MedianStoppingRule,
    MultiObjectiveASHA,
    PopulationBasedTraining,
    TrialScheduler,
)
from tunemq_scheduler.search import uniform
from tunemq_shared.base.errors import SearchFailed
from tunemq_shared.protocol.result_conditions import Condition

GOOD: dict[str, Callable[[], TrialScheduler]] = {
    "fifo": FIFOScheduler,
    "asha": lambda: ASHAScheduler(max_t=20, reduction_factor=2, brackets=2),
    "promotion": lambda: ASHAScheduler(max_t=20, reduction_factor=2, type="promotion"),
    "hyperband": lambda: HyperBandScheduler(max_t=20, reduction_factor=2),
    "median": lambda: MedianStoppingRule("training_iteration", grace_period=3),
    "pbt": lambda: PopulationBasedTraining(
        "training_iteration",
        perturbation_interval=4,
        hyperparam_mutations={"x": uniform(0, 1)},
        synch=True,
    ),
}


@pytest.mark.parametrize("name", GOOD)
def test_schedulers_of_tunemq_pass(name: str) -> None:
    check_trial_scheduler(GOOD[name], seeds=range(2))


def test_scheduler_of_several_metrics_passes() -> None:
    check_trial_scheduler(
        lambda: MultiObjectiveASHA(["loss", "size"], "min", max_t=20),
        more_metrics=["size"],
        seeds=[3],
    )


class Draws(TrialScheduler):
    def on_trial_result(self, runner: Any, trial: Any, result: dict[str, Any]) -> str:
        return self.STOP if random.SystemRandom().random() < 0.1 else self.CONTINUE


class LeavesOut(TrialScheduler):
    """Says that it decides at each fourth step, and decides at each."""

    def on_trial_result(self, runner: Any, trial: Any, result: dict[str, Any]) -> str:
        self.last = result["training_iteration"]
        return self.STOP if result["loss"] > 0.9 else self.CONTINUE

    def horizon(self, trial: Any) -> Any:
        done = trial.last_result.get("training_iteration", 0)
        return (Condition("training_iteration", done - done % 4 + 4),)


class Forgets(TrialScheduler):
    def __init__(self) -> None:
        self.count = 0

    def on_trial_result(self, runner: Any, trial: Any, result: dict[str, Any]) -> str:
        self.count += 1
        return self.STOP if self.count % 10 == 0 else self.CONTINUE

    def get_state(self) -> dict[str, Any]:
        return {}

    def set_state(self, state: dict[str, Any]) -> None:
        pass


class NeverResumes(TrialScheduler):
    def on_trial_result(self, runner: Any, trial: Any, result: dict[str, Any]) -> str:
        return self.PAUSE

    def choose_trial_to_run(self, runner: Any) -> Any:
        return next((one for one in runner.waiting() if one.status == "PENDING"), None)


@pytest.mark.parametrize(
    ("scheduler", "told"),
    [
        (Draws, "with the same results (seed 0)"),
        (LeavesOut, "if asked about each result (seed 0)"),
        (Forgets, "with its state of result"),
    ],
)
def test_scheduler_that_decides_differently_is_told_when(
    scheduler: Callable[[], TrialScheduler], told: str
) -> None:
    with pytest.raises(AssertionError) as error:
        check_trial_scheduler(scheduler, seeds=range(2))
    assert told in str(error.value)
    assert "decision" in str(error.value)


def test_scheduler_that_lets_trials_wait_for_ever_fails() -> None:
    with pytest.raises(SearchFailed, match="NeverResumes"):
        check_trial_scheduler(NeverResumes)
