"""Every command of a farm's users, from a machine that is not the scheduler's, for both readers."""

from __future__ import annotations

import json
import signal
import subprocess
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.support.farms.farm_service import FarmService, Search, on_hosts
from tests.support.farms.network_namespaces import Hosts
from tests.support.waiting import eventually

pytestmark = pytest.mark.faults

REJECTED, USE, UNAVAILABLE, NO_SCHEDULER, CTRL_C = 1, 64, 69, 75, 130


@pytest.fixture
def farm(tmp_path: Path) -> Iterator[FarmService]:
    with Hosts() as hosts:
        farm = on_hosts(tmp_path, hosts)
        farm.start_scheduler()
        for name in ("one", "two"):
            farm.add_worker(name)
        farm.has_nodes("one", "two")
        try:
            yield farm
        finally:
            farm.close()


def _attached(farm: FarmService, *arguments: str) -> tuple[subprocess.Popen[bytes], Path]:
    """Start a command of the user that keeps running; return it and the path of its output."""
    log = farm.folder / "laptop" / f"{arguments[0]}.log"
    command = farm.command(*arguments)
    return farm.laptop.start(command, farm.environ("laptop"), log), log


def _rejected(farm: FarmService, *arguments: str, code: int) -> str:
    """Run a command that must fail; return its error, which is the same with ``--json``."""
    done = farm.run(*arguments)
    assert done.returncode == code, f"{arguments}: {done}"
    assert done.stdout == ""
    assert "Traceback" not in done.stderr
    assert farm.run(*arguments, "--json").returncode == code
    return done.stderr


def _trials(farm: FarmService, name: str) -> list[dict[str, Any]]:
    trials: list[dict[str, Any]] = farm.json("show", name)["trials"]
    return trials


# --- submit ---------------------------------------------------------------------------------------


def test_attached_experiment_survives_ctrl_c_and_is_followed_to_its_end(farm):
    script = farm.write(Search(name="first", trials=2, steps=5))
    done = farm.run("submit", str(script), "--name", "first")
    assert done.returncode == 0, done
    assert "ended after 5 steps" in done.stdout
    assert "first is FINISHED" in done.stderr
    farm.check_results("first")

    script = farm.write(Search(name="second", trials=2, steps=4, has_gate=True))
    process, log = _attached(farm, "submit", str(script), "--name", "second")
    eventually(
        lambda: "started on" in log.read_text(), within=60, every=0.3, message=lambda: str(farm)
    )
    process.send_signal(signal.SIGINT)
    assert process.wait(60) == CTRL_C
    assert "second continues" in log.read_text()
    assert "tunemq logs -f second" in log.read_text()
    assert "Traceback" not in log.read_text()

    following, log = _attached(farm, "logs", "-f", "second")
    farm.open_gate("second", 4)
    assert following.wait(90) == 0
    assert "ended after 4 steps" in log.read_text()
    farm.check_results("second")
    farm.check_steps("second")

    # For a program: one line of JSON at the end, and with --detach at once.
    script = farm.write(Search(name="third", trials=1, steps=2))
    done = farm.run("submit", str(script), "--name", "third", "--json")
    assert done.returncode == 0
    assert json.loads(done.stdout)["experiment"]["state"] == "FINISHED"
    script = farm.write(Search(name="fourth", trials=1, steps=2))
    told = farm.json("submit", str(script), "--name", "fourth", "--detach")
    assert told["name"] == "fourth"


# --- list of experiments --------------------------------------------------------------------------


def test_running_experiment_is_shown_by_the_commands(farm):
    farm.submit(Search(name="exp", trials=6, steps=6, has_gate=True), "--priority", "3")
    farm.wait_for("exp", "RUNNING")
    farm.open_gate("exp", 3)
    farm.wait_for_steps("exp", 4, 3)

    assert "exp" in farm.tunemq("ls")

    def is_listed() -> bool:
        (row,) = farm.json("ls")["experiments"]
        return (row["state"], row["priority"], row["total"]) == ("RUNNING", 3, 6)

    eventually(is_listed, every=0.3, message=lambda: str(farm))  # its process reports the numbers

    def is_shown() -> bool:
        rows = farm.json("show", "exp")["trials"]
        return [(row["status"], row["step"]) for row in rows] == [("RUNNING", 3)] * 4

    eventually(is_shown, every=0.3, message=lambda: str(farm))
    nodes = {row["node"] for row in farm.json("nodes")["nodes"]}
    assert {row["node"] for row in farm.json("show", "exp")["trials"]} <= nodes
    assert "RUNNING" in farm.tunemq("show", "exp")
    assert farm.json("show", "exp", "--trials", "1")["hidden"] == 3

    running = _trials(farm, "exp")[0]
    assert "started on" in farm.tunemq("logs", "exp")
    (page,) = map(json.loads, farm.tunemq("logs", "exp", "--json").splitlines())
    assert "started on" in page["text"]
    farm.tunemq("logs", f"exp/{running['trial']}")

    assert "runs, on" in farm.tunemq("why", "exp", running["trial"])
    assert farm.json("why", "exp")["lines"]

    def are_in_use() -> bool:
        rows = farm.json("nodes")["nodes"]
        found = [(row["node"], row["state"], row["used"]["cpu"], row["trials"]) for row in rows]
        # Nodes send their version with their metrics, not with the registration.
        has_versions = all(row["version"] for row in rows)
        return has_versions and found == [("one", "ready", 2, 2), ("two", "ready", 2, 2)]

    eventually(are_in_use, every=0.3, message=lambda: str(farm))
    assert "ready" in farm.tunemq("nodes")

    farm.open_gate("exp", 6)
    farm.wait_for("exp", "FINISHED")
    farm.check_results("exp")
    farm.check_steps("exp")
    assert [row["status"] for row in _trials(farm, "exp")] == ["TERMINATED"] * 6
    assert farm.json("ls", "--active")["experiments"] == []


def test_waiting_trial_names_the_reason(farm):
    farm.submit(Search(name="large", trials=1, steps=1, resources={"cpu": 3}))
    farm.submit(Search(name="odd", trials=1, steps=1, resources={"cpu": 1, "tpu": 1}))
    farm.wait_for("large", "RUNNING")
    eventually(lambda: _trials(farm, "large"), every=0.3, message=lambda: str(farm))

    (waiting,) = _trials(farm, "large")
    assert waiting["status"] == "PENDING"
    lines = farm.json("why", "large", waiting["trial"])["lines"]
    assert any("waits for a place" in line for line in lines), lines
    assert any("3 cpu" in line or "cpu 3" in line or "'cpu': 3" in line for line in lines), lines
    assert "cpu" in farm.tunemq("why", "large")
    eventually(lambda: "tpu" in farm.tunemq("why", "odd"), every=0.3, message=lambda: str(farm))

    farm.add_worker("three", 3)
    farm.wait_for("large", "FINISHED")
    farm.check_results("large")
    assert farm.rows()["odd"].state == "RUNNING"


def test_an_experiment_is_paused_resumed_stopped_and_removed(farm):
    # It is not over before it is stopped, however long that takes.
    farm.submit(Search(name="exp", trials=4, steps=99_999, step_s=0.05))
    farm.wait_for_steps("exp", 4, 2)

    assert farm.json("pause", "exp")["state"] == "PAUSED"
    eventually(
        lambda: [row.trials for row in farm.nodes().values()] == [0, 0],
        within=60,
        every=0.3,
        message=lambda: str(farm),
    )
    assert farm.rows()["exp"].state == "PAUSED"
    assert "already" in farm.tunemq("pause", "exp")

    farm.tunemq("resume", "exp")
    farm.wait_for("exp", "RUNNING")
    before = {trial: len(steps) for trial, steps in farm.steps("exp").items()}
    eventually(
        lambda: all(len(farm.steps("exp")[trial]) > done for trial, done in before.items()),
        within=60,
        every=0.3,
        message=lambda: str(farm),
    )

    trial = _trials(farm, "exp")[0]["trial"]
    farm.tunemq("stop", f"exp/{trial}")
    eventually(
        lambda: (
            {row["trial"]: row["status"] for row in _trials(farm, "exp")}[trial] == "TERMINATED"
        ),
        within=60,
        every=0.3,
        message=lambda: str(farm),
    )
    assert farm.rows()["exp"].state == "RUNNING"

    assert farm.json("stop", "exp")["state"] == "STOPPING"
    farm.wait_for("exp", "STOPPED")
    assert all(steps == sorted(set(steps)) for steps in farm.steps("exp").values())
    for lines in farm.recorded("exp").values():  # every written line is complete
        steps = [line["training_iteration"] for line in lines]
        assert steps == list(range(1, len(steps) + 1))

    farm.tunemq("rm", "exp")
    assert farm.rows() == {}
    assert (farm.results / "exp").is_dir()  # results belong to the user
    _rejected(farm, "show", "exp", code=USE)

    farm.submit(Search(name="brief", trials=1, steps=2))
    farm.wait_for("brief", "FINISHED")
    done = farm.run("rm", "brief", "--files")  # no terminal to confirm at
    assert done.returncode == REJECTED
    assert (farm.results / "brief").is_dir()
    assert farm.json("rm", "brief", "--files", "--yes")["text"]
    assert not (farm.results / "brief").exists()


_FAILS_ONCE = """
from pathlib import Path

def fails_once(config):
    import time
    for step in range(1, 4):
        time.sleep(0.02)
        if config["own"] == 1 and step == 2:
            mark = Path(config["executed"]).parent / "fixed"
            if not mark.exists():
                raise ValueError("not fixed yet")
        tune.report({"score": step})
"""


def test_trials_in_error_are_retried_while_others_run_and_when_all_has_ended(farm):
    search = Search(
        name="exp",
        trials=2,
        trainable="fails_once",
        code=_FAILS_ONCE,
        failures=0,
    )
    farm.submit(search)
    farm.wait_for("exp", "FINISHED")
    failed = next(row for row in _trials(farm, "exp") if row["status"] == "ERROR")
    assert "not fixed yet" in failed["note"]
    assert "ERROR" in farm.tunemq("show", "exp")

    (farm.folder / "executed" / "fixed").touch()
    assert "queued" in farm.tunemq("retry", "exp", failed["trial"])
    farm.wait_for("exp", "FINISHED")

    def are_all_over() -> bool:
        return [row["status"] for row in _trials(farm, "exp")] == ["TERMINATED"] * 2

    eventually(are_all_over, within=60, every=0.3, message=lambda: str(farm))


# --- nodes ----------------------------------------------------------------------------------------


def test_a_node_is_drained_used_again_and_retired(farm):
    farm.submit(Search(name="exp", trials=4, steps=99_999, step_s=0.1))
    farm.wait_for_steps("exp", 4, 1)

    farm.tunemq("nodes", "drain", "one")
    eventually(
        lambda: (row := farm.nodes().get("one")) and row.state == "drained",
        within=60,
        every=0.3,
        message=lambda: str(farm),
    )
    (row,) = [row for row in farm.json("nodes")["nodes"] if row["node"] == "one"]
    assert (row["state"], row["trials"]) == ("drained", 0)
    assert "drained by" in row["health"]

    assert farm.json("nodes", "resume", "one")["text"]
    eventually(
        lambda: (row := farm.nodes().get("one")) and row.trials == 2,
        within=60,
        message=lambda: f"{farm.nodes()}{farm}",
    )

    farm.tunemq("nodes", "retire", "two")
    assert farm.workers["two"].wait(90) == 0
    eventually(lambda: "two" not in farm.nodes(), within=60, every=0.3, message=lambda: str(farm))
    assert "is absent now" in farm.json("nodes", "resume", "two")["text"]
    for steps in farm.steps("exp").values():  # trials resumed elsewhere from their checkpoints
        assert steps == sorted(set(steps))


# --- wrong use ------------------------------------------------------------------------------------


def test_unknown_name_is_named_with_similar_names(farm):
    farm.submit(Search(name="resnet", trials=2, steps=4, has_gate=True))
    farm.wait_for("resnet", "RUNNING")
    for command in (
        *(("show",), ("logs",), ("stop",), ("pause",), ("resume",), ("retry",), ("rm",), ("why",)),
    ):
        said = _rejected(farm, *command, "resnat", code=USE)
        assert "the experiment 'resnat' does not exist" in said, said
        assert "resnet" in said
    for command in ("stop", "retry", "why", "logs"):
        said = _rejected(farm, command, "resnet/ffffff_00009", code=USE)
        assert "no trial" in said
        assert "ffffff_00009" in said
    for change in ("drain", "resume", "retire"):
        said = _rejected(farm, "nodes", change, "tow", code=USE)
        assert "the node 'tow' does not exist" in said
        assert "two" in said
    assert "name the node" in _rejected(farm, "nodes", "drain", code=USE)


def test_request_in_the_wrong_state_is_refused_with_the_reason(farm):
    script = farm.write(Search(name="exp", trials=1, steps=4, has_gate=True))
    farm.tunemq("submit", str(script), "--name", "exp", "--detach")
    farm.wait_for("exp", "RUNNING")

    said = _rejected(farm, "rm", "exp", code=REJECTED)
    assert "tunemq stop exp" in said
    submit = ("submit", str(script), "--detach", "--name")
    assert "another --name" in _rejected(farm, *submit, "exp", code=USE)
    assert "is invalid for an experiment; use" in _rejected(
        farm, *submit, "a name/with spaces", code=USE
    )
    assert "blobs" in _rejected(farm, *submit, "blobs", code=USE)
    missing = ("submit", "nothing.py", "--detach")
    assert "nothing.py" in _rejected(farm, *missing, code=USE)
    assert "NAME=VALUE" in _rejected(farm, *submit, "other", "--env", "A", code=USE)

    farm.open_gate("exp", 4)
    farm.wait_for("exp", "FINISHED")
    assert "cannot be paused" in _rejected(farm, "pause", "exp", code=REJECTED)
    assert "FINISHED" in farm.tunemq("stop", "exp")  # the experiment is in the desired state


def test_missing_scheduler_and_missing_redis_are_told_apart(farm):
    commands = (("ls",), ("nodes", "drain", "one"))
    farm.kill_scheduler()
    script = str(farm.write(Search(name="exp")))
    for command in (*commands, ("submit", script, "--detach")):
        done = farm.run(*command)
        assert done.returncode == NO_SCHEDULER, f"{command}: {done}"
        assert "scheduler" in done.stderr
        assert "Traceback" not in done.stderr

    farm.redis_host.kill()
    for command in (("ls",), ("submit", script, "--detach"), ("stop", "exp", "--json")):
        done = farm.run(*command)
        assert done.returncode == UNAVAILABLE, f"{command}: {done}"
        assert "10.0.0.1" in done.stderr
        assert "Traceback" not in done.stderr

    done = farm.run("ls", variables={"TUNEMQ_REDIS": ""})
    assert done.returncode == USE
    assert "TUNEMQ_REDIS" in done.stderr
