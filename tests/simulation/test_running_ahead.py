"""Running ahead changes nothing: decisions, records and kept checkpoints are exact."""

from __future__ import annotations

from collections.abc import Callable

import pytest

from tests.simulation.farm import Search
from tunemq.testing.comparable_state import comparable
from tunemq.testing.journal_replay import compare
from tunemq.testing.simulated_executor import SimulationSettings
from tunemq_scheduler.schedulers import (
    PASHA,
    ASHAScheduler,
    FIFOScheduler,
    HyperBandScheduler,
    MedianStoppingRule,
    MultiObjectiveASHA,
    TrialScheduler,
)
from tunemq_shared.base.errors import InvariantBroken
from tunemq_shared.protocol.result_conditions import Condition

#: Seeds for the promised behaviour; fewer for behaviour that is not promised.
SEEDS, FEWER = 40, 25
MAX_T = 9


def asha() -> TrialScheduler:
    return ASHAScheduler(max_t=MAX_T, grace_period=1, reduction_factor=3)


def hyperband() -> TrialScheduler:
    return HyperBandScheduler(max_t=MAX_T, reduction_factor=3)


def median() -> TrialScheduler:
    return MedianStoppingRule("training_iteration", grace_period=3, hard_stop=False)


def promotion() -> TrialScheduler:
    return ASHAScheduler(max_t=MAX_T, grace_period=1, reduction_factor=3, type="promotion")


def pasha() -> TrialScheduler:
    return PASHA(max_t=MAX_T, reduction_factor=2)


def moasha() -> TrialScheduler:
    return MultiObjectiveASHA(["loss", "training_iteration"], "min", max_t=MAX_T)


SCHEDULERS = {
    "fifo": FIFOScheduler,
    "asha": asha,
    "asha, promotion": promotion,
    "pasha": pasha,
    "multi-objective asha": moasha,
    "hyperband": hyperband,
    "median": median,
}


def search(
    make: Callable[[], TrialScheduler],
    seed: int,
    latency_s: float,
    *,
    lock_step: bool = False,
    horizon_error: int = 0,
    deaths: float = 0.0,
) -> Search:
    simulation = SimulationSettings(
        nodes=4,
        seed=seed,
        latency_s=latency_s,
        horizon_error=horizon_error,
        deaths=deaths,
        death_window_s=30.0,
    )
    return Search(make, simulation=simulation, max_t=MAX_T, lock_step=lock_step).run()


@pytest.mark.parity(15)
@pytest.mark.parametrize("latency_s", [0.0, 0.1, 2.0])
@pytest.mark.parametrize("name", SCHEDULERS)
def test_the_journal_replayed_in_lock_step_gives_the_same(name: str, latency_s: float) -> None:
    for seed in range(SEEDS):
        run = search(SCHEDULERS[name], seed, latency_s)
        live = run.outcome()
        compare(live, run.outcome_in_lock_step())
        assert comparable(run.replayed()) == comparable(run.runner)
        assert len(live.ends) == 20
        assert name == "fifo" or live.decisions, "a test of decisions in which none was taken"


@pytest.mark.parametrize("name", SCHEDULERS)
def test_without_latency_running_ahead_and_lock_step_are_the_same_run(name: str) -> None:
    for seed in range(SEEDS):
        ahead = search(SCHEDULERS[name], seed, 0.0)
        lock_step = search(SCHEDULERS[name], seed, 0.0, lock_step=True)
        compare(ahead.outcome(), lock_step.outcome())


@pytest.mark.parametrize("make", [asha, promotion, pasha, moasha, hyperband, median])
def test_dying_nodes_keep_results_exact(make: Callable[[], TrialScheduler]) -> None:
    for seed in range(FEWER):
        run = search(make, seed, 0.1, deaths=0.5)
        compare(run.outcome(), run.outcome_in_lock_step())
        assert comparable(run.replayed()) == comparable(run.runner)


class OneStepTooFar(ASHAScheduler):
    """A wrong horizon: claims that it decides only at the step after each rung."""

    def horizon(self, trial):
        honest = super().horizon(trial)
        return honest and tuple(Condition(one.key, one.bound + 1) for one in honest)


def test_a_horizon_one_step_too_far_is_noticed() -> None:
    def too_far() -> TrialScheduler:
        return OneStepTooFar(max_t=MAX_T, grace_period=1, reduction_factor=3)

    noticed = 0
    for seed in range(20):
        run = search(too_far, seed, 0.1)
        try:
            compare(run.outcome(), run.outcome_in_lock_step())
        except InvariantBroken:
            noticed += 1
    assert noticed == 20
