"""Stoppers say what they compared; the driver of the algorithms journals it."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest

from tunemq_scheduler.stopping.budget import (
    CostStopper,
    GPUHoursStopper,
    MaximumTrialsStopper,
    TargetStopper,
)
from tunemq_scheduler.stopping.plateau import ExperimentPlateauStopper, TrialPlateauStopper
from tunemq_scheduler.stopping.stopper import (
    CombinedStopper,
    FunctionStopper,
    MaximumIterationStopper,
    NoopStopper,
    Stopper,
    TimeoutStopper,
    reason_of,
)


def at_five(_trial_id: str, result: dict[str, Any]) -> bool:
    return bool(result["training_iteration"] >= 5)


@pytest.mark.parametrize(
    ("make", "told"),
    [
        (lambda: FunctionStopper(at_five), "FunctionStopper: at_five(trial_id, result) is true"),
        (
            lambda: MaximumIterationStopper(5),
            "MaximumIterationStopper: training_iteration 5 has reached 5",
        ),
        (
            lambda: TrialPlateauStopper("loss", std=0.5, num_results=3),
            (
                "TrialPlateauStopper: the standard deviation of the last 3 values of loss, 0, is "
                "below 0.5"
            ),
        ),
        (
            lambda: ExperimentPlateauStopper("loss", std=0.5, top=2),
            (
                "ExperimentPlateauStopper: the standard deviation of the best 2 values of loss, 0, "
                "is at most 0.5"
            ),
        ),
        (
            lambda: TargetStopper("loss", 2, "min"),
            "TargetStopper: loss 1.5 of trial t has reached the target 2",
        ),
        (
            lambda: CombinedStopper(NoopStopper(), MaximumIterationStopper(5)),
            "MaximumIterationStopper: training_iteration 5 has reached 5",
        ),
    ],
)
def test_stopper_of_a_trial_tells_the_values_that_it_compared(
    make: Callable[[], Stopper], told: str
) -> None:
    stopper = make()
    results = [{"training_iteration": step, "loss": 1.5} for step in range(1, 6)]
    assert any([stopper("t", one) for one in results])  # noqa: C419  each result is shown
    assert reason_of(stopper, "it") == told


@pytest.mark.parametrize(
    ("make", "told"),
    [
        (
            lambda: MaximumTrialsStopper(1),
            "MaximumTrialsStopper: 1 trials have ended, and 1 are the most",
        ),
        (
            lambda: CostStopper(3, "cost"),
            "CostStopper: the sum of cost over all trials, 4, has reached 3",
        ),
        (
            lambda: GPUHoursStopper(0.5, gpus_per_trial=2),
            "GPUHoursStopper: the sum of time_total_s over all trials, 1000, has reached 900",
        ),
        (lambda: TimeoutStopper(1e-9), "TimeoutStopper: 1e-09 s have passed"),
    ],
)
def test_stopper_of_an_experiment_tells_the_values_that_it_compared(
    make: Callable[[], Stopper], told: str
) -> None:
    stopper = CombinedStopper(NoopStopper(), make())
    stopper.stop_all()
    stopper("t", {"training_iteration": 1, "cost": 4, "time_total_s": 1000})
    stopper.on_trial_complete("t", {})
    assert stopper.stop_all()
    assert reason_of(stopper, "the experiment") == told


@pytest.mark.parametrize("reason", ["", None, 3, lambda _self: "no text"])
def test_stopper_without_a_reason_is_named(reason: Any) -> None:
    stopper = type("Enough", (NoopStopper,), {"reason": reason})()
    assert reason_of(stopper, "the experiment") == "Enough stopped the experiment"
