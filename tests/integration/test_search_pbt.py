"""Population based training on real workers: trials continue from others' checkpoints."""

from __future__ import annotations

import itertools
import json
from pathlib import Path
from typing import Any

import pytest

import tunemq as tune
from tests.support.searches.journals import ended_searches
from tests.support.searches.searches import fit, results_of, table_of
from tests.support.stores.object_servers import ObjectServer
from tunemq.schedulers import PB2, PopulationBasedTraining, PopulationBasedTrainingReplay

__all__ = ["ended_searches"]

pytestmark = pytest.mark.integration

STEPS, INTERVAL = 12, 3


def walk(config):
    """Each state knows the steps by which it came: the trial, its attempt and the step."""
    checkpoint = tune.get_checkpoint()
    path = checkpoint.to_dict()["path"] if checkpoint is not None else []
    me = tune.get_context().get_trial_id()
    for step in range(len(path) + 1, STEPS + 1):
        path = [*path, f"{me} {step}"]
        saved = tune.Checkpoint.from_dict({"path": path})
        tune.report({"score": config["rate"] * step, "path": "/".join(path)}, checkpoint=saved)


class Walk(tune.Trainable):
    def setup(self, config: dict[str, Any]) -> None:
        self.path: list[str] = []

    def step(self) -> dict[str, Any]:
        step = len(self.path) + 1
        self.path.append(f"{self.trial_id} {step}")
        return {"score": self.config["rate"] * step, "path": "/".join(self.path)}

    def save_checkpoint(self, checkpoint_dir: str) -> dict[str, Any]:
        return {"path": self.path}

    def load_checkpoint(self, checkpoint: Any) -> None:
        self.path = list(checkpoint["path"])


def population(**options: Any) -> PopulationBasedTraining:
    return PopulationBasedTraining(
        time_attr="training_iteration",
        perturbation_interval=INTERVAL,
        hyperparam_mutations={"rate": [0.1, 0.2, 0.4, 0.8]},
        quantile_fraction=0.5,
        **options,
    )


def bandits(**options: Any) -> PB2:
    return PB2(
        time_attr="training_iteration",
        perturbation_interval=INTERVAL,
        hyperparam_bounds={"rate": [0.1, 0.8]},
        quantile_fraction=0.5,
        **options,
    )


@pytest.mark.parametrize("synch", [False, True])
@pytest.mark.parametrize(
    ("trainable", "make"), [(walk, population), (Walk, population), (Walk, bandits)]
)
def test_each_lineage_continues_the_state_of_its_donor(
    trainable: Any, make: Any, synch: bool
) -> None:
    grid = fit(
        trainable,
        {"rate": tune.grid_search([0.1, 0.2, 0.4, 0.8])},
        metric="score",
        mode="max",
        scheduler=make(synch=synch),
        seed=3,
        stop={"training_iteration": STEPS},
    )
    assert not grid.errors
    recorded = {
        (row["trial_id"], row["training_iteration"], row["path"])
        for result in grid
        for row in results_of(result)
    }
    exploited = 0
    for result in grid:
        rows = results_of(result)
        assert [row["path"] for row in table_of(result)] == [row["path"] for row in rows]
        assert rows[-1]["training_iteration"] == STEPS
        for before, after in itertools.pairwise(rows):
            step, path = after["training_iteration"], after["path"].split("/")
            assert len(path) == step
            if after["lineage"] == before["lineage"]:
                assert path[:-1] == before["path"].split("/")
                continue
            exploited += 1
            assert after["lineage"] == before["lineage"] + 1
            donor = path[-2].split()[0]
            assert (donor, step - 1, "/".join(path[:-1])) in recorded
        assert result.config == rows[-1]["config"]
        assert 0.1 <= result.config["rate"] <= 0.8
    assert exploited >= 2


def test_states_come_from_a_bucket_that_keeps_one_checkpoint_of_each_trial(
    minio: ObjectServer, bucket: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name, value in minio.environ.items():
        monkeypatch.setenv(name, value)
    grid = fit(
        walk,
        {"rate": tune.grid_search([0.1, 0.2, 0.4, 0.8])},
        metric="score",
        mode="max",
        scheduler=population(),
        seed=3,
        stop={"training_iteration": STEPS},
        storage_path=minio.address(bucket),
        num_to_keep=1,
    )
    assert not grid.errors
    rows = [row for result in grid for row in results_of(result)]
    assert all(len(row["path"].split("/")) == row["training_iteration"] for row in rows)
    assert sum(result.metrics["lineage"] for result in grid) >= 2


def test_function_that_saves_nothing_is_told_at_a_perturbation() -> None:
    def saves_nothing(config):
        for step in range(STEPS):
            tune.report({"score": config["rate"] * step})

    with pytest.raises(tune.error.TuneError, match="has saved no checkpoint from which it could"):
        fit(
            saves_nothing,
            {"rate": tune.grid_search([0.1, 0.2])},
            metric="score",
            mode="max",
            scheduler=population(synch=True),
        )


def replayed(trainable: Any, grid: tune.ResultGrid, trial_id: str) -> tune.ResultGrid:
    return fit(
        trainable,
        metric="score",
        mode="max",
        scheduler=PopulationBasedTrainingReplay(grid.experiment_path, trial_id),
        stop={"training_iteration": STEPS},
    )


@pytest.mark.parametrize("trainable", [walk, Walk])
def test_replay_does_each_step_with_the_configuration_that_led_to_the_state(
    trainable: Any,
) -> None:
    grid = fit(
        trainable,
        {"rate": tune.grid_search([0.1, 0.2, 0.4, 0.8])},
        metric="score",
        mode="max",
        scheduler=population(),
        seed=3,
        stop={"training_iteration": STEPS},
    )
    rates = {row["path"]: row["config"]["rate"] for one in grid for row in results_of(one)}
    last = max(grid, key=lambda one: len(set(states_of(one, rates))))
    expected = states_of(last, rates)
    assert len(set(expected)) >= 2
    (result,) = replayed(trainable, grid, last.metrics["trial_id"])
    rows = results_of(result)
    assert [row["config"]["rate"] for row in rows] == expected
    assert [row["score"] for row in rows] == [
        rate * step for step, rate in enumerate(expected, start=1)
    ]
    assert all(len(row["path"].split("/")) == row["training_iteration"] for row in rows)


def states_of(result: tune.Result, rates: dict[str, float]) -> list[float]:
    """Return the rate with which each step of a trial's last state was done."""
    path = result.metrics["path"].split("/")
    return [rates["/".join(path[:step])] for step in range(1, len(path) + 1)]


def test_replay_of_a_function_that_saves_nothing_is_told_with_the_fix(tmp_path: Path) -> None:
    def saves_nothing(config):
        for step in range(STEPS):
            tune.report({"score": config["rate"] * step})

    file = tmp_path / "pbt_policy_1.txt"
    file.write_text(json.dumps(["t1", "t0", 4, 3, {"rate": 0.1}, {"rate": 0.2}]))
    with pytest.raises(tune.error.TuneError, match="had saved no checkpoint before step 4"):
        fit(saves_nothing, scheduler=PopulationBasedTrainingReplay(str(file)))
