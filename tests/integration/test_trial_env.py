"""`tunemq worker --trial-env`: which of a worker's variables its trials see, in any place."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from tests.integration.code_support import make_environment, write_files
from tests.integration.farm_support import RedisServer, Scheduler, order
from tests.integration.node_fixtures import scheduler, server
from tests.support.farms.farm_processes import Command
from tests.support.waiting import eventually
from tunemq_shared.protocol.messages import Environment, ResultReported, TrialFailed

__all__ = ["scheduler", "server"]

pytestmark = pytest.mark.integration

CANARIES = {"CANARY_TOKEN": "1", "WANTED_ONE": "2", "WANTED_TWO": "3", "ALSO": "4", "LC_TIME": "C"}
PLACES = ["environ", "preloaded", "own /proc", "forkserver's /proc", "child"]

Start = Callable[..., Command]
See = Callable[..., dict[str, dict[str, str]]]


def looking(config):
    import os
    import subprocess
    import sys
    from pathlib import Path

    import preloaded_module

    from tunemq_shared.trial.session import report

    def pairs(text):
        return dict(line.split("=", 1) for line in text.split("\0") if "=" in line)

    assert sys.executable == config["python"] or not config["python"]
    places = {
        "environ": dict(os.environ),
        "preloaded": preloaded_module.seen,
        "own /proc": pairs(Path("/proc/self/environ").read_text()),
        "forkserver's /proc": pairs(Path(f"/proc/{os.getppid()}/environ").read_text()),
        "child": pairs(subprocess.check_output(["env", "-0"], text=True)),
    }
    report({"places": places})


@pytest.fixture
def worker(server: RedisServer, tmp_path: Path) -> Iterator[Start]:
    running: list[Command] = []

    def start(*options: str, **variables: str) -> Command:
        line = ["worker", "--redis", server.url, "--name", "one", "--cpus", "2"]
        line += ["--workdir", str(tmp_path / "node"), *options]
        given = {**CANARIES, **variables}
        running.append(Command(*line, log=tmp_path / "said", variables=given))
        return running[-1]

    yield start
    for one in running:
        one.kill()


@pytest.fixture
def see(scheduler: Scheduler, tmp_path: Path) -> See:
    """Run a trial on the worker; return the variables that it found, by place."""
    path = str(write_files(tmp_path / "code", {"preloaded_module.py": PRELOADED}))

    def run(python: str = "") -> dict[str, dict[str, str]]:
        eventually(scheduler.registrations, within=60)
        given = Environment(python, ("preloaded_module",), {"GIVEN": "5"}, (path,), inherits=True)
        start = scheduler.start(looking, {"python": python}, environment=given)
        scheduler.assign(scheduler.registrations()[-1].instance_id, order("t", start))
        said = scheduler.said
        eventually(lambda: said(ResultReported) or said(TrialFailed), within=60)
        assert not said(TrialFailed), said(TrialFailed)
        return said(ResultReported)[0].metrics["places"]

    return run


PRELOADED = "import os\nseen = dict(os.environ)\n"


def test_a_worker_without_trial_env_gives_trials_all_its_variables(worker, see):
    worker()
    found = see()
    assert list(found) == PLACES
    for place, variables in found.items():
        assert CANARIES.items() <= variables.items(), place


@pytest.mark.parametrize("other_python", [False, True])
def test_a_trial_of_a_worker_with_trial_env_finds_no_other_variable_anywhere(
    worker, see, tmp_path, other_python
):
    python = make_environment(tmp_path / "venv", {}) if other_python else ""
    started = worker("--trial-env", "WANTED_*,ALSO")
    for place, variables in see(python).items():
        assert "CANARY_TOKEN" not in variables, place
        allowed = {"WANTED_ONE", "WANTED_TWO", "ALSO", "LC_TIME", "GIVEN"}
        assert allowed <= variables.keys(), place
        assert {"PATH", "HOME"} <= variables.keys(), place
    assert "--trial-env" not in started.said


def test_an_empty_trial_env_of_the_environment_allows_nothing_but_the_minimum(worker, see):
    worker(TUNEMQ_TRIAL_ENV="")
    for place, variables in see().items():
        assert variables.keys() & {*CANARIES, "PATH"} == {"LC_TIME", "PATH"}, place


def test_trial_env_names_that_match_no_variable_are_a_warning(worker):
    started = worker("--trial-env", "ALSO, WANTED_TOO,CANRY_*,TUNEMQ_REDIS")
    started.says("It offers")
    assert "--trial-env names WANTED_TOO, CANRY_*, TUNEMQ_REDIS, which no variable" in started.said


@pytest.mark.parametrize("text", ["A=1", "A B", "A,$B", "[A]"])
def test_trial_env_with_an_invalid_name_is_refused(worker, text):
    rejected = worker("--trial-env", text)
    assert rejected.ends() == 64
    assert "which is not the name of a variable" in rejected.said
    assert "WANDB_*,HTTPS_PROXY" in rejected.said
