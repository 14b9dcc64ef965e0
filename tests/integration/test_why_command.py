"""``tunemq why`` and `Result.decisions` of real searches, here and on a farm."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

import tunemq as tune
from tests.support.farms.farm_service import FarmService, Search, farm_service
from tests.support.searches.searches import fit, results_of, table_of
from tests.support.stores.object_servers import ObjectServer
from tests.support.waiting import eventually
from tunemq.schedulers import ASHAScheduler, HyperBandScheduler, PopulationBasedTraining
from tunemq_shared.protocol import messages as m

pytestmark = pytest.mark.integration

WORST_AT_ONE = "is not among the best 1/3 of"


def climbs(config: dict[str, Any]) -> None:
    """Report a score that grows by ``slope`` per step."""
    done = 0
    if (checkpoint := tune.get_checkpoint()) is not None:
        done = checkpoint.to_dict()["done"]
    for step in range(done + 1, 10):
        kept = tune.Checkpoint.from_dict({"done": step})
        tune.report({"score": config["slope"] * step}, checkpoint=kept)


def searched(scheduler: Any, **options: Any) -> tune.ResultGrid:
    """A search of six trials, whose best comes first."""
    return fit(
        climbs,
        {"slope": tune.grid_search([6.0, 5.0, 4.0, 3.0, 2.0, 1.0])},
        metric="score",
        mode="max",
        scheduler=scheduler,
        max_concurrent_trials=options.pop("max_concurrent_trials", 1),
        **options,
    )


def asha() -> ASHAScheduler:
    return ASHAScheduler(max_t=9, reduction_factor=3)


def tunemq(*arguments: str) -> subprocess.CompletedProcess[str]:
    """Run a command without the address of a farm."""
    environment = {name: text for name, text in os.environ.items() if name != "TUNEMQ_REDIS"}
    command = [sys.executable, "-m", "tunemq", *arguments]
    return subprocess.run(command, capture_output=True, text=True, env=environment, check=False)


def told(result: tune.Result) -> list[str]:
    return [str(one) for one in result.decisions]


def test_decisions_of_an_embedded_search_are_in_results_files_and_the_command(
    tmp_path: Path,
) -> None:
    grid = searched(asha(), storage_path=str(tmp_path), name="first")
    best, second = grid[0], grid[1]
    assert told(best) == ["stopped at step 9: training_iteration 9 has reached max_t 9"]
    stopped = f"stopped at step 1: score 5 {WORST_AT_ONE} 1 trials at rung 1 (cutoff 6)"
    assert told(second) == [stopped]

    (row,) = results_of(second)
    assert row["decisions"] == [
        {
            "step": 1,
            "action": "STOP",
            "reason": f"score 5 {WORST_AT_ONE} 1 trials at rung 1 (cutoff 6)",
            "elapsed_s": second.decisions[0].elapsed_s,
        }
    ]
    assert ["decisions" in one for one in results_of(best)] == [False] * 8 + [True]
    assert all("decisions" not in one for one in table_of(second))
    assert tune.Result.from_path(second.path).decisions == second.decisions

    folder = str(tmp_path / "first")
    for arguments in ((second.path,), (folder, second.trial_id), (folder, second.trial_name)):
        done = tunemq("why", *arguments)
        assert done.stdout == f"trial {second.trial_id} is TERMINATED\n{stopped}\n", done
    answer = json.loads(tunemq("why", "--json", second.path).stdout)
    assert [(one["step"], one["action"]) for one in answer["decisions"]] == [(1, "STOP")]
    assert tunemq("why", folder).stdout.splitlines() == [
        "it has 6 trials: 6 TERMINATED",
        "its search algorithm has no more configurations",
    ]
    done = tunemq("why", folder, f"{second.trial_id[:5]}_00099")
    assert (done.returncode, done.stdout) == (64, "")
    assert "there is no trial" in done.stderr


def test_decisions_of_paused_trials_are_the_same_after_a_restore(tmp_path: Path) -> None:
    grid = searched(HyperBandScheduler(max_t=9), storage_path=str(tmp_path), name="first", seed=1)
    paused = [one for one in grid if one.decisions[0].action == "PAUSE"]
    assert paused
    for result in paused:
        actions = [one.action for one in result.decisions]
        assert actions[0::2] in (["PAUSE"], ["PAUSE", "STOP"]), told(result)
        assert set(actions[1::2]) <= {"RESUME", "STOP"}
        assert all(one.reason for one in result.decisions)
    assert any("of bracket 1 (cutoff " in line for one in paused for line in told(one))
    before = {one.trial_id: one.decisions for one in grid}
    restored = tune.Tuner.restore(str(tmp_path / "first"), climbs)
    assert {one.trial_id: one.decisions for one in restored.get_results()} == before
    assert {one.trial_id: one.decisions for one in restored.fit()} == before


def test_exploited_trial_names_the_other_one_its_scores_and_its_new_values(
    tmp_path: Path,
) -> None:
    scheduler = PopulationBasedTraining(
        time_attr="training_iteration",
        perturbation_interval=3,
        quantile_fraction=0.5,
        hyperparam_mutations={"slope": [1.0, 2.0, 3.0, 4.0, 5.0, 6.0]},
    )
    grid = searched(
        scheduler, storage_path=str(tmp_path), name="first", seed=1, max_concurrent_trials=0
    )
    found = [(one, two) for one in grid for two in one.decisions if two.action == m.EXPLOIT]
    assert found
    result, decision = found[0]
    text = tunemq("why", result.path).stdout
    assert f"exploited trial {decision.source} at step {decision.step}" in text
    for result, decision in found:
        assert "which is among the worst" in decision.reason
        rows = results_of(result)
        later = [row for row in rows if row["lineage"] == decision.lineage + 1]
        if later:  # the line behind the decision has it
            actions = [one["action"] for one in later[0]["decisions"]]
            assert m.EXPLOIT in actions


def test_decisions_are_read_from_the_store_alone(
    tmp_path: Path, minio: ObjectServer, bucket: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name, value in minio.environ.items():
        monkeypatch.setenv(name, value)
    monkeypatch.setenv("TUNEMQ_RESULTS", str(tmp_path / "here"))
    address = minio.address(bucket)
    grid = searched(asha(), storage_path=address, name="first")
    place = f"{address.partition('?')[0]}/first" + address[len(address.partition("?")[0]) :]
    monkeypatch.setenv("TUNEMQ_RESULTS", str(tmp_path / "elsewhere"))
    done = tunemq("why", place, grid[1].trial_id)
    assert f"stopped at step 1: score 5 {WORST_AT_ONE}" in done.stdout, done
    read = tune.Tuner.restore(place, climbs).get_results()
    assert [one.decisions for one in read] == [one.decisions for one in grid]


KILLED = """
import os, signal, sys
import tunemq as tune
from tunemq.schedulers import ASHAScheduler

def train(config):
    for step in range(1, 10):
        if step == 2 and not os.path.exists(config["go"]):
            os.kill(config["script"], signal.SIGKILL)
        tune.report({"score": config["slope"] * step})

if __name__ == "__main__":
    space = {"slope": tune.grid_search([6.0, 5.0, 4.0]), "go": sys.argv[2], "script": os.getpid()}
    tuner = tune.Tuner(
        train,
        param_space=space,
        tune_config=tune.TuneConfig(
            metric="score", mode="max", max_concurrent_trials=1,
            scheduler=ASHAScheduler(max_t=9, reduction_factor=3),
        ),
        run_config=tune.RunConfig(name="first", storage_path=sys.argv[1], verbose=0),
    )
    if os.path.exists(sys.argv[1] + "/first"):
        tuner = tune.Tuner.restore(sys.argv[1] + "/first", train)
    grid = tuner.fit()
    print([[str(one) for one in result.decisions] for result in grid])
"""


def test_decisions_survive_a_kill_of_the_script(tmp_path: Path) -> None:
    """The first trial runs alone to its end only after the restore."""
    script = tmp_path / "search.py"
    script.write_text(KILLED)
    go = tmp_path / "go"
    command = [sys.executable, str(script), str(tmp_path), str(go)]
    first = subprocess.run(command, capture_output=True, text=True, check=False, timeout=120)
    assert first.returncode == -9, first
    go.touch()
    done = subprocess.run(command, capture_output=True, text=True, check=True, timeout=120)
    decisions = json.loads(done.stdout.splitlines()[-1].replace("'", '"'))
    assert decisions[0] == ["stopped at step 9: training_iteration 9 has reached max_t 9"]
    assert all("stopped at step 1: score" in line for one in decisions[1:] for line in one)
    assert [len(one) for one in decisions] == [1, 1, 1]


# --- on a farm ------------------------------------------------------------------------------------


@pytest.fixture
def farm(tmp_path: Path) -> Iterator[FarmService]:
    with farm_service(tmp_path) as farm:
        farm.add_worker("one")
        farm.has_nodes("one")
        yield farm


STOPS_FIRST = """
from tunemq.schedulers import TrialScheduler

class StopsFirst(TrialScheduler):
    def on_trial_result(self, runner, trial, result):
        if (trial.number, result["training_iteration"]) != (0, 2):
            return self.CONTINUE
        return self.STOP.because(f"number {trial.number} is below 1")
"""


def test_why_of_a_trial_on_a_farm_tells_its_decisions_while_it_runs_and_after_a_kill(
    farm: FarmService,
) -> None:
    search = Search(
        name="exp", steps=6, has_gate=True, code=STOPS_FIRST, tune="scheduler=StopsFirst()"
    )
    farm.submit(search)
    farm.wait_for_gate("exp", 1, 2)
    farm.open_gate("exp", 3)
    trials = sorted(row["trial"] for row in farm.json("show", "exp")["trials"])
    stopped = "stopped at step 2: number 0 is below 1"
    told: list[str] = []

    def is_told() -> bool:
        told[:] = farm.tunemq("why", f"exp/{trials[0]}").splitlines()
        return stopped in told

    eventually(is_told, within=60, every=0.3, message=lambda: f"{told}\n{farm}")
    (decision,) = farm.json("why", f"exp/{trials[0]}")["decisions"]
    assert (decision["step"], decision["action"]) == (2, "STOP")
    assert "runs, on" in farm.tunemq("why", f"exp/{trials[1]}")
    farm.kill_scheduler()
    farm.start_scheduler()
    farm.open_gate("exp", 6)
    farm.wait_for("exp", "FINISHED")

    assert farm.tunemq("why", f"exp/{trials[0]}").splitlines() == [
        "exp is FINISHED: finished",
        f"trial {trials[0]} is TERMINATED",
        stopped,
    ]
    _, line = farm.tunemq("why", "exp", trials[1]).splitlines()
    assert line.startswith(f"trial {trials[1]} is TERMINATED: ")
    shown = {row["trial"]: row["decision"] for row in farm.json("show", "exp")["trials"]}
    assert shown == {trials[0]: stopped, trials[1]: ""}
    assert stopped in farm.tunemq("show", "exp")
    done = farm.run("why", "exp/aaaaa_00009")
    assert done.returncode == 64
    assert "there is no trial aaaaa_00009" in done.stderr
