"""The farm page of README, followed to the letter, on separate machines: network namespaces."""

from __future__ import annotations

import json
import os
import re
import shlex
import shutil
import signal
import subprocess
import sys
import sysconfig
from collections.abc import Iterator
from functools import cached_property
from pathlib import Path
from typing import Any, Final

import pytest

from tests.support.farms.network_namespaces import Host, Hosts
from tests.support.searches.chain import executed, expected, open_gate
from tests.support.stores.object_servers import minio_program
from tests.support.waiting import eventually, need
from tests.support.warm_commands import WarmCommands

pytestmark = [pytest.mark.faults, pytest.mark.timeout(700)]

_ROOT: Final = Path(__file__).parents[2]
#: ``name$ command``: how the page shows which machine a command is typed on.
_LINE: Final = re.compile(r"^(redis|minio|all|head|worker|laptop)\$ +(.+)$", re.MULTILINE)
_TRIALS, _STEPS = 9, 30
_SCRIPT: Final = """
import tunemq as tune
import steps

tuner = tune.Tuner(
    steps.train,
    param_space={
        "seed": tune.grid_search(list(range(%(trials)d))),
        "executed": %(executed)r,
        "steps": %(steps)d,
        "gate": %(gate)r,
    },
    tune_config=tune.TuneConfig(metric="score", mode="max"),
    run_config=tune.RunConfig(failure_config=tune.FailureConfig(max_failures=-1)),
)
"""
_MODULE: Final = """
import tempfile


def train(config):
    import work  # beside the script; not imported before
    work.run({**config, "payload": 64, "save_every": 5, "step_s": 0.02})
"""


class _Page:
    """The farm of README's page."""

    def __init__(self, hosts: Hosts, folder: Path) -> None:
        self.folder = folder
        section = (_ROOT / "README.md").read_text().split("## On a farm")[1].split("\n## ")[0]
        self.lines: dict[str, list[str]] = {}
        for name, line in _LINE.findall(section):
            self.lines.setdefault(name, []).append(line)
        self.hosts = hosts
        # In the order of the page's addresses: 10.0.0.1 and 10.0.0.2.
        self.redis, self.minio = self._add("redis"), self._add("minio")
        self.head, self.laptop = self._add("head"), self._add("laptop")
        self.workers: list[Host] = []
        self.variables: dict[str, str] = {}
        for line in self.lines["all"]:
            assert line.startswith("export ")
            self.variables.update(one.split("=", 1) for one in shlex.split(line)[1:])

    def _add(self, name: str) -> Host:
        (self.folder / name).mkdir()
        return self.hosts.add(name)

    def environ(self, name: str, variables: dict[str, str] | None = None) -> dict[str, str]:
        scripts = str(Path(sys.executable).parent)
        redis = sysconfig.get_path("scripts")
        path = f"{scripts}:{redis}:{self.folder / 'bin'}:{os.environ['PATH']}"
        home = {"PATH": path, "HOME": str(self.folder / name), "PYTHONPATH": str(_ROOT)}
        return {**home, **(variables or {})}

    def type(self, host: Host, name: str, line: str, log: str) -> Any:
        """Type a line of the page on a machine, and leave it running."""
        folder = self.folder / name
        command = line.replace("/srv/minio", str(self.folder / "srv"))
        variables = {} if name in {"redis", "minio"} else self.variables
        return host.start(
            ["bash", "-c", f"exec env {command}"],
            self.environ(name, variables),
            folder / f"{log}.log",
            cwd=folder,
        )

    def start(self) -> None:
        self.type(self.redis, "redis", *self.lines["redis"], "redis")
        self.type(self.minio, "minio", *self.lines["minio"], "minio")
        # A scheduler begins with a store that answers, and ends where there is none.
        eventually(self._has_store, within=90, every=0.3, message=self.log)
        self.start_scheduler()
        for _ in range(3):
            self.add_worker()

    def _has_store(self) -> bool:
        place = f"http://{self.minio.address}:9000/minio/health/cluster"
        line = [
            sys.executable,
            "-c",
            f"import urllib.request as r; r.urlopen({place!r}, timeout=10)",
        ]
        log = self.folder / "head" / "store.log"
        return self.head.start(line, self.environ("head"), log).wait() == 0

    def start_scheduler(self) -> None:
        self.scheduler = self.type(self.head, "head", *self.lines["head"], "scheduler")

    def add_worker(self) -> Host:
        name = f"worker{len(self.workers)}"
        host = self._add(name)
        self.workers.append(host)
        (line,) = self.lines["worker"]
        self.type(host, name, f"{line} --name {name} --cpus 2", "worker")
        return host

    def tunemq(self, *arguments: str, code: int = 0) -> str:
        """Run a command on the laptop; return its output."""
        done = self.run(*arguments)
        assert done.returncode == code, (
            f"{arguments}: {done.returncode}\n{done.stdout}{done.stderr}"
        )
        return done.stdout if code == 0 else done.stderr

    def run(self, *arguments: str) -> subprocess.CompletedProcess[str]:
        """Run a command on the laptop."""
        environ = self.environ("laptop", self.variables)
        return self.commands.run(arguments, environ, self.folder / "laptop")

    @cached_property
    def commands(self) -> WarmCommands:
        """The runner of commands on the laptop."""
        return self.laptop.commands(self.environ("laptop", self.variables))

    def json(self, *arguments: str) -> Any:
        return json.loads(self.tunemq(*arguments, "--json"))

    def nodes(self) -> dict[str, dict[str, Any]]:
        return {row["node"]: row for row in self.json("nodes")["nodes"] if row["state"] != "gone"}

    def state_of(self, node: str) -> str:
        """Of a node; nothing where it is gone."""
        return str(self.nodes().get(node, {}).get("state", ""))

    def state(self, name: str) -> str:
        (row,) = [row for row in self.json("ls")["experiments"] if row["name"] == name]
        return str(row["state"])

    def steps(self) -> dict[int, list[int]]:
        return executed(self.folder / "executed")

    def open_gate(self, up_to: int) -> None:
        """Let trials do the steps up to that one."""
        open_gate(self.folder / "gate", up_to)

    def have_done(self, step: int) -> bool:
        """Whether the six that run have come that far."""
        # A file that was made just now has nothing in it.
        return [max(steps, default=0) for steps in self.steps().values()] == [step] * 6

    def log(self) -> str:
        return "\n".join(path.read_text()[-3000:] for path in self.folder.glob("*/**/*.log"))


@pytest.fixture
def page(tmp_path: Path) -> Iterator[_Page]:
    program = minio_program()
    need("MinIO", program)
    (tmp_path / "bin").mkdir()
    (tmp_path / "bin" / "minio").symlink_to(str(program))
    (tmp_path / "executed").mkdir()
    with Hosts() as hosts:
        page = _Page(hosts, tmp_path)
        laptop = tmp_path / "laptop"
        about = {"trials": _TRIALS, "steps": _STEPS, "executed": str(tmp_path / "executed")}
        about["gate"] = str(tmp_path / "gate")
        page.open_gate(10)
        (laptop / "search.py").write_text(_SCRIPT % about)
        (laptop / "steps.py").write_text(_MODULE)
        source = _ROOT / "tests" / "support" / "searches" / "chain.py"
        chain = source.read_text()
        (laptop / "work.py").write_text(f"{chain}\n\nrun = chain\n")
        page.start()
        try:
            yield page
        finally:
            page.commands.close()


def test_farm_page_works_while_machines_leave_and_return(page):
    eventually(
        lambda: (page.scheduler.poll() is None) and _answers(page),
        within=60,
        every=0.5,
        message=page.log,
    )
    eventually(lambda: len(page.nodes()) == 3, within=60, every=0.5, message=page.log)
    for line in page.lines["laptop"]:
        program, *arguments = shlex.split(line)
        assert program == "tunemq"
        printed = page.tunemq(*arguments)
        assert "first" in printed or arguments[0] in {"nodes", "logs"}
    assert shutil.which("minio", path=page.environ("x")["PATH"])

    # Trials run on all three.
    eventually(lambda: page.have_done(10), within=60, every=0.5, message=page.log)
    assert all(row["used"]["cpu"] == 2 for row in page.nodes().values())

    # The scheduler dies: trials continue, and the next scheduler takes them over.
    os.kill(page.scheduler.pid, signal.SIGKILL)
    page.scheduler.wait()
    page.open_gate(20)
    eventually(lambda: page.have_done(20), within=60, every=0.5, message=page.log)
    page.start_scheduler()
    eventually(lambda: _answers(page), within=60, every=0.5, message=page.log)
    page.open_gate(22)
    eventually(lambda: page.have_done(22), within=60, every=0.5, message=page.log)
    assert all(steps == list(range(1, 23)) for steps in page.steps().values())

    # A cable is pulled, and put back: silent, then there again.
    page.workers[0].unplug()
    eventually(lambda: page.state_of("worker0") == "silent", within=60, every=0.5, message=page.log)
    page.workers[0].plug_in()
    eventually(lambda: page.state_of("worker0") == "ready", within=60, every=0.5, message=page.log)

    # A machine loses its power, and another one comes.
    page.workers[1].kill()
    page.add_worker()
    eventually(
        lambda: page.nodes().get("worker3", {}).get("used", {}).get("cpu"),
        within=90,  # the farm waits for nodes without power
        every=0.5,
        message=page.log,
    )

    page.open_gate(_STEPS)
    eventually(lambda: page.state("first") == "FINISHED", within=240, every=0.5, message=page.log)
    shown = page.json("show", "first")
    assert [row["status"] for row in shown["trials"]] == ["TERMINATED"] * _TRIALS
    assert {row["step"] for row in shown["trials"]} == {_STEPS}
    _check_results(page)


def _answers(page: _Page) -> bool:
    return page.run("ls").returncode == 0


def _check_results(page: _Page) -> None:
    """Every trial's chain is the one of an undisturbed run; no result is missing or doubled."""
    results = page.folder / "head" / "tunemq_results" / "first"
    found = sorted(results.glob("*/result.json"))
    assert len(found) == _TRIALS
    for path in found:
        rows = [json.loads(line) for line in path.read_text().splitlines()]
        assert [row["training_iteration"] for row in rows] == list(range(1, _STEPS + 1))
        config = json.loads((path.parent / "params.json").read_text())
        config |= {"payload": 64}
        assert rows[-1]["chain"] == expected(config, _STEPS)
