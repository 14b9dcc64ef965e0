"""Experiments of a farm are isolated from each other's code and failures."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
import venv
from collections.abc import Iterator
from pathlib import Path
from urllib.parse import urlsplit

import pytest

from tests.support.farms.farm_service import FarmService, Here, Search, farm_service
from tests.support.keys import key_folder
from tests.support.searches import chain
from tests.support.waiting import eventually, need

pytestmark = pytest.mark.faults

_PASSWORD = "a-secret-that-nobody-has-seen"
_KEY_FILES = ("ada", "scheduler", "worker")


@pytest.fixture
def farm(tmp_path: Path) -> Iterator[FarmService]:
    with farm_service(tmp_path, password=_PASSWORD) as farm:
        farm.add_worker("one", cpus=4)
        farm.has_nodes("one")
        yield farm


# --- code -----------------------------------------------------------------------------------------

_WITH_MODULES = """
import tunemq as tune
import model  # both users call theirs so
import numerics


def train(config):
    import helpers.steps
    import time
    # Both run at the same time.
    for _ in range(5):
        time.sleep(0.05)
        tune.report(
            {"whose": model.WHOSE, "helped": helpers.steps.WHOSE, "numerics": numerics.__version__}
        )


tuner = tune.Tuner(train, param_space={"n": tune.grid_search([1, 2])})
tuner_says = (model.WHOSE, numerics.__version__)
print("the search has", *tuner_says)
"""


def _write_user(folder: Path, whose: str) -> Path:
    (folder / "helpers").mkdir(parents=True)
    (folder / "model.py").write_text(f"WHOSE = {whose!r}\n")
    (folder / "helpers" / "__init__.py").write_text("")
    (folder / "helpers" / "steps.py").write_text(f"WHOSE = {whose!r}\n")
    (folder / "search.py").write_text(_WITH_MODULES)
    return folder / "search.py"


def _environment(folder: Path) -> tuple[Path, Path]:
    """A virtual environment with all that this one has: its interpreter, and its packages."""
    venv.create(folder, with_pip=False, symlinks=True)
    (packages,) = folder.glob("lib/python*/site-packages")
    outer = [path for path in sys.path if path.endswith("site-packages")]
    lines = "; ".join(f"site.addsitedir({path!r})" for path in outer)
    (packages / "zz_outer.pth").write_text(f"import site; {lines}\n")
    return folder / "bin" / "python", packages


def _check_versions(farm: FarmService, name: str, whose: str, version: str) -> None:
    recorded = farm.recorded(name)
    assert sorted(recorded) == [0, 1]
    for lines in recorded.values():
        assert len(lines) == 5
        found = {(line["whose"], line["helped"], line["numerics"]) for line in lines}
        assert found == {(whose, whose, version)}
    printed = (farm.results / name / "experiment.out").read_text()
    assert f"the search has {whose} {version}" in printed


def test_experiments_use_their_own_modules_and_package_versions(farm, tmp_path):
    for whose, version in (("ann", "1.0"), ("ben", "2.0")):
        python, packages = _environment(tmp_path / f"venv-{whose}")
        (packages / "numerics").mkdir()
        (packages / "numerics" / "__init__.py").write_text(f"__version__ = {version!r}\n")
        script = _write_user(farm.folder / "laptop" / whose, whose)
        farm.tunemq(
            *("submit", str(script), "--name", whose, "--owner", whose, "--detach"),
            *("--python", str(python)),
        )

    for whose in ("ann", "ben"):
        farm.wait_for(whose, "FINISHED")
    _check_versions(farm, "ann", "ann", "1.0")
    _check_versions(farm, "ben", "ben", "2.0")


@pytest.mark.timeout(420)  # two downloads may take 90 s each
def test_two_real_versions_of_numpy_are_in_use_at_once(farm, tmp_path):
    for whose, version in (("ann", "1.26.4"), ("ben", "2.1.3")):
        python, packages = _environment(tmp_path / f"venv-{whose}")
        _install(packages, f"numpy=={version}")
        script = _write_user(farm.folder / "laptop" / whose, whose)
        script.write_text(script.read_text().replace("numerics", "numpy"))
        farm.tunemq(
            *("submit", str(script), "--name", whose, "--owner", whose, "--detach"),
            *("--python", str(python)),
        )

    for whose, version in (("ann", "1.26.4"), ("ben", "2.1.3")):
        farm.wait_for(whose, "FINISHED")
        found = {line["numpy"] for lines in farm.recorded(whose).values() for line in lines}
        assert found == {version}


_LISTS = """
import tunemq as tune
import model


def train(config):
    from pathlib import Path

    folder = Path(model.__file__).parent
    files = [path for path in folder.rglob("*") if path.is_file() and path.suffix != ".pyc"]
    tune.report({"files": " ".join(sorted(str(path.relative_to(folder)) for path in files))})


tuner = tune.Tuner(train, param_space={"n": tune.grid_search([0])})
"""


def test_secrets_beside_a_script_are_not_sent_with_it(farm, tmp_path):
    """Neither those of any farm nor those of the process that submits, told once."""
    (farm.folder / "laptop" / ".git").mkdir()
    (farm.folder / "laptop" / ".gitignore").write_text("notes.md\n")
    folder = farm.folder / "laptop" / "project"
    key_folder(folder / "keys", "ada")
    (folder / "search.py").write_text(_LISTS)
    cell = {"source": [f'PASSWORD = "{_PASSWORD}"\n']}
    for name, text in {
        "model.py": "",
        "model.yaml": "layers: 3\n",
        ".env": "COLOUR=blue\n",
        "farm.yaml": "env:\n  AWS_SECRET_ACCESS_KEY: hunter2\n",
        "try.ipynb": json.dumps({"cells": [cell]}),
        "notes.md": "the password of the lab",
    }.items():
        (folder / name).write_text(text)

    submit = ("submit", str(folder / "search.py"), "--detach", "--name")
    done = farm.run(*submit, "first")
    assert done.returncode == 0, done
    (told,) = [line for line in done.stderr.splitlines() if "secrets" in line]
    for name in (".env", "farm.yaml", "try.ipynb", *(f"keys/{one}.toml" for one in _KEY_FILES)):
        assert f"'{name}' (it " in told
    assert _PASSWORD not in told
    (folder / ".tunemqignore").write_text("!.env\nfarm.yaml\nkeys/\n*.ipynb\n")
    done = farm.run(*submit, "second")
    assert done.returncode == 0, done
    assert "secrets" not in done.stderr

    for name, more in (("first", []), ("second", [".env", ".tunemqignore"])):
        farm.wait_for(name, "FINISHED")
        ((line,),) = farm.recorded(name).values()
        assert line["files"].split() == [*more, "model.py", "model.yaml", "search.py"]


def _install(packages: Path, what: str) -> None:
    line = ["-m", "pip", "install", "--quiet", "--no-deps", "--only-binary", ":all:"]
    try:
        done = subprocess.run(
            [sys.executable, *line, "--target", str(packages), what],
            capture_output=True,
            timeout=90,
            check=False,
        )
    except subprocess.TimeoutExpired:
        pytest.skip(f"{what} cannot be had here in time")
    if done.returncode:
        pytest.skip(f"{what} cannot be had here")


# --- troubles -------------------------------------------------------------------------------------

_SLEEPER = """
import time

from tunemq.search import Searcher


class Sleeper(Searcher):
    def suggest(self, trial_id):
        time.sleep(600)
        return {}

    def on_trial_complete(self, trial_id, result=None, error=False):
        pass
"""
_CRASHER = """
import ctypes


class Crasher(tune.Callback):
    def on_trial_result(self, iteration, trials, trial, result, **info):
        ctypes.string_at(0)
"""
_READER = """
import json
import os
from itertools import product
from pathlib import Path

import psutil


class Reader(tune.Callback):
    \"\"\"Looks for the farm's keys wherever a process can look.\"\"\"

    def on_trial_result(self, iteration, trials, trial, result, **info):
        found = {"own environ": repr(dict(os.environ))}
        # What it was forked from, and the supervisor.
        parents = psutil.Process().parents()[:2]
        for parent, name in product(parents, ("environ", "cmdline", "maps", "mem", "fd")):
            whose = "supervisor" if parent == parents[1] else "forkserver"
            try:
                found[f"{name} of {whose}"] = self.read(Path("/proc", str(parent.pid), name))
            except OSError as error:
                found[f"{name} of {whose}"] = f"refused: {error.strerror}"
        connections = psutil.Process().net_connections("all")
        found["own sockets"] = repr([one.raddr for one in connections])
        Path(OPTIONS["executed"]).parent.joinpath("found.json").write_text(json.dumps(found))

    def read(self, path):
        if path.name == "fd":
            return repr([os.readlink(one) for one in path.iterdir()])
        if path.name == "mem":
            with open(path, "rb"):
                return "it can be opened"
        return path.read_text(errors="replace")
"""


def _without_privileges() -> list[str]:
    """The command prefix that drops root's privileges."""
    if os.geteuid() != 0:
        return []
    need("setpriv", shutil.which("setpriv"))
    return ["setpriv", "--bounding-set=-all", "--inh-caps=-all"]


@pytest.fixture
def guarded(tmp_path: Path) -> Iterator[FarmService]:
    """A farm whose head runs as a user without root's rights."""
    with farm_service(tmp_path, password=_PASSWORD, head=Here(_without_privileges())) as farm:
        farm.add_worker("one", cpus=4)
        farm.has_nodes("one")
        yield farm


def test_experiment_is_isolated_from_others_that_sleep_crash_and_look_for_keys(guarded):
    farm = guarded
    farm.submit(
        Search(
            name="sleeper",
            space="0",
            code=_SLEEPER,
            tune="search_alg=Sleeper(), num_samples=9",
        )
    )
    farm.submit(Search(name="crasher", steps=1000, code=_CRASHER, run="callbacks=[Crasher()],"))
    farm.submit(Search(name="reader", code=_READER, run="callbacks=[Reader()],"))
    eventually(lambda: "SIGSEGV" in farm.said(), within=60, message=lambda: str(farm))
    farm.submit(Search(name="good", trials=4, steps=40))

    farm.wait_for("good", "FINISHED")
    farm.check_results("good")
    farm.check_steps("good")

    assert farm.wait_for("sleeper", "RUNNING").state == "RUNNING"  # still in its 60 s

    farm.wait_for("reader", "FINISHED")
    found = json.loads((farm.folder / "executed" / "found.json").read_text())
    assert _PASSWORD not in json.dumps(found)
    assert str(urlsplit(farm.url).port) not in found["own sockets"]
    assert {name for name, text in found.items() if text.startswith("refused")} >= {
        f"{name} of {whose}"
        for name in ("environ", "mem", "fd")
        for whose in ("forkserver", "supervisor")
    }


def test_experiment_whose_trials_end_during_a_crash_finishes_with_its_results(farm):
    farm.submit(Search(name="crasher", steps=5, code=_CRASHER, run="callbacks=[Crasher()],"))

    row = farm.wait_for("crasher", "FINISHED")

    assert "SIGSEGV" in farm.said()
    assert (row.trials["TERMINATED"], row.total) == (2, 2)
    rows = farm.json("show", "crasher")["trials"]
    assert [(one["status"], one["step"]) for one in rows] == [("TERMINATED", 5)] * 2
    farm.check_results("crasher")
    farm.check_steps("crasher")


@pytest.mark.soak
def test_experiment_whose_process_keeps_crashing_fails_with_the_reason(farm):
    farm.submit(Search(name="crasher", steps=1000, code=_CRASHER, run="callbacks=[Crasher()],"))

    row = farm.wait_for("crasher", "FAILED")

    assert "SIGSEGV (Segmentation fault)" in row.reason
    assert "times" in row.reason
    assert "SIGSEGV" in farm.tunemq("ls")
    shown = farm.tunemq("show", "crasher")
    assert "FAILED" in shown
    assert "SIGSEGV" in shown
    assert "it is restarted in" in farm.said()
    eventually(lambda: farm.nodes()["one"].used["cpu"] == 0, message=lambda: str(farm))
    # Nothing of it is in the way of the next one.
    farm.submit(Search(name="good"))
    farm.wait_for("good", "FINISHED")
    farm.check_results("good")


_DIES_AT_ONCE = """
import os, signal, sys
from tunemq_scheduler.farm.process import experiment_forkserver as forkserver
sys.argv = sys.argv[sys.argv.index("-m") + 1:]
leave = forkserver._leave_the_forkserver

def leave_or_die(pid):
    if os.path.exists({broken!r}):
        os.kill(os.getpid(), signal.SIGKILL)
    leave(pid)

forkserver._leave_the_forkserver = leave_or_die
sys.exit(forkserver.main())
"""


def test_search_whose_process_fails_to_start_says_so_and_why_until_it_starts(farm, tmp_path):
    python, broken = tmp_path / "python", tmp_path / "broken"
    (tmp_path / "dies.py").write_text(_DIES_AT_ONCE.format(broken=str(broken)))
    python.write_text(
        f'#!/bin/sh\ncase "$*" in *experiment_forkserver*) set -- {tmp_path}/dies.py "$@" ;; esac\n'
        f'exec {sys.executable} "$@"\n'
    )
    python.chmod(0o755)
    broken.touch()
    farm.submit(Search(name="search", trials=1, steps=2), "--python", str(python))

    def said() -> str:
        return farm.rows()["search"].trouble

    def examined() -> dict[str, str]:
        done = farm.run("doctor", "--json", "--results", str(farm.results))
        findings = json.loads(done.stdout)["findings"]
        (finding,) = [one for one in findings if one["check"] == "searches"]
        return finding

    eventually(lambda: "2 times in a row" in said(), message=lambda: str(farm))
    reason = "its process cannot be started: it died at once"
    assert f"The process of search failed 2 times in a row: {reason}." in said()
    assert reason in farm.tunemq("why", "search")
    assert "The process of search failed" in farm.tunemq("ls")
    assert reason in farm.tunemq("show", "search")
    assert examined()["level"] == "problem"
    assert reason in examined()["what"]
    rejected = farm.run("why", "search", "no-trial")
    assert rejected.returncode == 1
    assert reason in rejected.stderr

    broken.unlink()
    farm.wait_for("search", "FINISHED")
    assert said() == ""
    assert examined()["level"] == "ok"


_MADE_ANEW = """
import time

class Activation:
    pass

def relu(x):
    return x

OPTIONS["values"] = tune.choice([Activation(), relu, lambda x: x])
OPTIONS["ordered"] = tune.choice(list({"adam", "sgd", "rmsprop", "lion", "adagrad"}))
OPTIONS["until"] = tune.uniform(0, time.time())

def chain(config):
    for name in ("values", "ordered", "until"):
        del config[name]
    work.chain(config)
"""


def test_search_whose_script_makes_another_space_each_time_continues_after_a_restart(farm):
    """It has functions and objects of the script, an order by hashes, and the time."""
    seeded = "seed=time.time_ns() % 2**32,"
    space = {"code": _MADE_ANEW, "trainable": "chain", "tune": seeded}
    farm.submit(Search(name="exp", trials=3, steps=6, has_gate=True, **space))
    farm.open_gate("exp", 2)
    farm.wait_for_steps("exp", 2, 2)
    farm.kill_scheduler()
    farm.start_scheduler()
    farm.open_gate("exp", 6)
    farm.wait_for("exp", "FINISHED")
    trials = farm.json("show", "exp")["trials"]
    assert [trial["status"] for trial in trials] == ["TERMINATED"] * 3
    farm.check_steps("exp")


_DRAWS_ITS_DATA = """
import os

def reports_its_data(config, drawn):
    tune.report({"score": 0, "drawn": drawn, "also": ALSO})

ALSO = os.urandom(4).hex()
"""


def test_trials_after_a_restart_have_the_data_of_the_first_run(farm):
    """The script runs again in the new process, and draws other data."""
    trainable = "tune.with_parameters(reports_its_data, drawn=os.urandom(4).hex())"
    farm.submit(
        Search(
            name="exp",
            trials=40,
            trainable=trainable,
            code=_DRAWS_ITS_DATA,
            tune="max_concurrent_trials=1,",
        )
    )
    folder = farm.results / "exp"
    eventually(lambda: len([*folder.glob("*/result.json")]) > 1, message=lambda: str(farm))
    farm.kill_scheduler()
    farm.start_scheduler()
    farm.wait_for("exp", "FINISHED")
    results = [*folder.glob("*/result.json")]
    drawn = {
        (row["drawn"], row["also"])
        for path in results
        for row in map(json.loads, path.read_text().splitlines())
    }
    assert (len(results), len(drawn)) == (40, 1)


_GRID_OF_A_SET = """
import time

NAMES = {f"name {number}" for number in range(12)}

def reports_its_name(config):
    tune.report({"score": 0})
    time.sleep(0.1)
"""


def test_grid_in_the_order_of_a_set_is_searched_whole_after_restarts(farm):
    """The script runs again in each process, and its set has another order there."""
    farm.submit(
        Search(
            name="exp",
            trainable="reports_its_name",
            space="tune.grid_search(list(NAMES))",
            code=_GRID_OF_A_SET,
            tune="max_concurrent_trials=1,",
        )
    )
    folder = farm.results / "exp"
    for begun in (3, 6):
        eventually(
            lambda begun=begun: len([*folder.glob("*/result.json")]) >= begun,
            message=lambda: str(farm),
        )
        farm.kill_scheduler()
        farm.start_scheduler()
    farm.wait_for("exp", "FINISHED")
    names = [json.loads(path.read_text())["own"] for path in folder.glob("*/params.json")]
    assert sorted(names) == sorted(f"name {number}" for number in range(12))


def test_search_that_begins_with_a_checkpoint_survives_restarts(farm, tmp_path):
    tmp_path.joinpath("begins").mkdir()
    chain.save(str(tmp_path / "begins"), "", 0, 64)
    begins = f"resume_from_checkpoint={str(tmp_path / 'begins')!r},"
    farm.submit(Search(name="exp", steps=4, has_gate=True, run=begins))
    for steps in (1, 2, 3):
        farm.open_gate("exp", steps)
        eventually(
            lambda steps=steps: (
                [len(rows) for rows in farm.recorded("exp").values()] == [steps] * 2
            ),
            message=lambda: str(farm),
        )
        farm.kill_scheduler()
        farm.start_scheduler()
    farm.open_gate("exp", 4)
    farm.wait_for("exp", "FINISHED")
    farm.check_results("exp")
