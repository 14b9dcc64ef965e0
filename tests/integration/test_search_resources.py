"""Trials on real workers whose resources change while they run."""

from __future__ import annotations

import time
from pathlib import Path
from typing import Any

import pytest

import tunemq as tune
from tests.support.searches.journals import ended_searches
from tests.support.searches.searches import fit, results_of
from tests.support.waiting import eventually
from tunemq.schedulers import (
    DistributeResources,
    DistributeResourcesToTopJob,
    PopulationBasedTraining,
    ResourceChangingScheduler,
)

__all__ = ["ended_searches"]

pytestmark = pytest.mark.integration


@pytest.fixture(autouse=True)
def four_cpus(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TUNEMQ_CPUS", "4")


def wait_for_the_shorter(config: dict[str, Any], step: int) -> None:
    """Let the trial of 30 steps do the fifth only once the other one is in its last, the third."""
    if config["steps"] == step == 3:
        Path(config["last"]).touch()
    if config["steps"] == 30 and step == 5:
        eventually(Path(config["last"]).exists)


def count(config):
    """Report the steps, and the CPUs that it has; one trial has fewer steps."""
    checkpoint = tune.get_checkpoint()
    done = checkpoint.to_dict()["done"] if checkpoint is not None else 0
    cpus = tune.get_context().get_trial_resources()["cpu"]
    for step in range(done + 1, config["steps"] + 1):
        wait_for_the_shorter(config, step)
        time.sleep(config.get("step_s", 0.0))
        saved = tune.Checkpoint.from_dict({"done": step})
        tune.report({"score": config["rate"] * step, "cpus": cpus}, checkpoint=saved)


class Count(tune.Trainable):
    def setup(self, config: dict[str, Any]) -> None:
        self.done = 0

    def step(self) -> dict[str, Any]:
        wait_for_the_shorter(self.config, self.done + 1)
        self.done += 1
        return {
            "score": self.config["rate"] * self.done,
            "cpus": self.trial_resources["cpu"],
            "done": self.done == self.config["steps"],
        }

    def save_checkpoint(self, checkpoint_dir: str) -> dict[str, Any]:
        return {"done": self.done}

    def load_checkpoint(self, checkpoint: Any) -> None:
        self.done = checkpoint["done"]


def cpus_of(result: tune.Result) -> list[float]:
    rows = results_of(result)
    assert [row["training_iteration"] for row in rows] == list(range(1, len(rows) + 1))
    return [row["cpus"] for row in rows]


@pytest.mark.parametrize("trainable", [count, Count])
def test_trials_share_all_cpus_and_a_trial_alone_has_all(trainable: Any, tmp_path: Path) -> None:
    grid = fit(
        trainable,
        {"rate": 1, "steps": tune.grid_search([3, 30]), "last": str(tmp_path / "last")},
        metric="score",
        mode="max",
        scheduler=ResourceChangingScheduler(),
    )
    assert not grid.errors
    short, long = map(cpus_of, grid)
    assert short == [1.0, 2.0, 2.0]
    assert long == sorted(long)
    assert {long[0], long[-1]} == {1.0, 4.0}
    assert len(long) == 30


class WaitsInTheEnd(Count):
    """The best trial does its last steps once the other one has ended."""

    def step(self) -> dict[str, Any]:
        ended = Path(self.config["ended"])
        if self.config["rate"] == 100 and self.done == 8:
            eventually(ended.exists)
        return super().step()

    def cleanup(self) -> None:
        if self.config["rate"] == 1 and self.done == 8:
            Path(self.config["ended"]).touch()


def test_best_trial_has_what_others_leave(tmp_path: Path) -> None:
    share = DistributeResourcesToTopJob(reserve_resources={"cpu": 1})
    grid = fit(
        WaitsInTheEnd,
        {
            "rate": tune.grid_search([1, 100]),
            "steps": tune.sample_from(lambda spec: 8 if spec.config.rate == 1 else 40),
            "ended": str(tmp_path / "ended"),
        },
        metric="score",
        mode="max",
        scheduler=ResourceChangingScheduler(resources_allocation_function=share),
    )
    worse, best = map(cpus_of, grid)
    assert set(worse) <= {1.0, 2.0}
    assert best == sorted(best)
    assert (best[0], best[-1]) == (1.0, 3.0)


def test_population_changes_resources_and_states() -> None:
    base = PopulationBasedTraining(
        time_attr="training_iteration",
        perturbation_interval=3,
        hyperparam_mutations={"rate": [0.1, 0.2, 0.4, 0.8]},
        quantile_fraction=0.5,
    )
    share = DistributeResources(increase_by={"cpu": 1}, increase_by_times=2)
    grid = fit(
        count,
        # None is done before the other one has begun.
        {"rate": tune.grid_search([0.1, 0.8]), "steps": 12, "step_s": 0.3},
        metric="score",
        mode="max",
        scheduler=ResourceChangingScheduler(base, share),
        seed=3,
    )
    assert not grid.errors
    rows = [results_of(result) for result in grid]
    assert sum(one[-1]["lineage"] for one in rows) >= 1
    assert {row["cpus"] for one in rows for row in one} <= {1.0, 2.0, 3.0}
    assert max(row["cpus"] for one in rows for row in one) >= 2.0
