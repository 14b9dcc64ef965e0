"""GPUs of plain scripts: what their trials see, and how scripts and workers share a machine.

All processes are real; the driver is faked.
"""

from __future__ import annotations

import json
import os
import secrets
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.integration.node_fixtures import server
from tests.support.fake_gpus import FakeGpus, gpu, remove_locks
from tests.support.farms.farm_processes import Command
from tests.support.waiting import eventually

__all__ = ["server"]

pytestmark = pytest.mark.integration

SCRIPT = """
import json
import os
import sys
import time
from pathlib import Path

import tunemq as tune

NAME, ASKED, TOGETHER = sys.argv[1], json.loads(sys.argv[2]), int(sys.argv[3])
HERE = Path.cwd()


def wait_for(what):
    while not what():
        time.sleep(0.01)


def train(config):
    sees = os.environ["CUDA_VISIBLE_DEVICES"]
    if config["gpu"] == 1:
        (HERE / f"{sees}.used").touch(exist_ok=False)  # no other trial uses it
    (HERE / f"{NAME}.{config['n']}.began").touch()
    wait_for(lambda: len(list(HERE.glob(f"{NAME}.*.began"))) >= TOGETHER)
    wait_for((HERE / f"{NAME}.gate").exists)
    if config["gpu"] == 1:
        (HERE / f"{sees}.used").unlink()
    tune.report({"sees": sees})


asks = tune.with_resources(train, lambda config: {"cpu": 0.1, "gpu": config["gpu"]})
space = {"n": tune.grid_search(list(range(len(ASKED)))), "gpu": tune.sample_from(
    lambda spec: ASKED[spec.config.n]
)}
run = tune.RunConfig(storage_path=str(HERE / NAME))
results = tune.Tuner(asks, param_space=space, run_config=run).fit()
sees = {one.config["n"]: one.metrics["sees"] for one in results}
(HERE / f"{NAME}.new").write_text(json.dumps([sees[n] for n in range(len(ASKED))]))
(HERE / f"{NAME}.new").replace(HERE / f"{NAME}.json")  # the file appears complete
wait_for((HERE / f"{NAME}.may-end").exists)
"""


class Script:
    """A search whose trials ask for shares of GPUs, and wait for each other and for a gate.

    At its end, the script keeps its farm warm and waits until the test lets it end.
    """

    def __init__(self, folder: Path, fake: FakeGpus, name: str, *asked: float, together: int):
        self._folder, self._name = folder, name
        (folder / "script.py").write_text(SCRIPT)
        self._log = folder / f"{name}.log"
        line = [sys.executable, "script.py", name, json.dumps(asked), str(together)]
        environment = {**os.environ, **fake.environment(), "TUNEMQ_CPUS": "4"}
        environment.pop("CUDA_VISIBLE_DEVICES", None)
        with self._log.open("w") as log:
            self.process = subprocess.Popen(
                line, cwd=folder, env=environment, stdout=log, stderr=subprocess.STDOUT
            )

    @property
    def said(self) -> str:
        """Return all that it printed."""
        return self._log.read_text()

    def has_begun(self, number: int) -> None:
        """Wait until ``number`` of its trials have begun."""
        began = f"{self._name}.*.began"
        self._waits(lambda: len(list(self._folder.glob(began))) == number, "they do not begin")

    def says(self, text: str) -> None:
        """Wait until it has printed this."""
        self._waits(lambda: text in self.said, f"it does not say {text!r}")

    def go(self) -> None:
        """Let its trials end."""
        (self._folder / f"{self._name}.gate").touch()

    def sees(self) -> Any:
        """Wait for the end of the search; return what its trials have seen."""
        results = self._folder / f"{self._name}.json"
        self._waits(results.exists, "it is not over")
        return json.loads(results.read_text())

    def ends(self) -> None:
        """Let it end, and wait for that."""
        (self._folder / f"{self._name}.may-end").touch()
        assert self.process.wait(60) == 0, self.said

    def _waits(self, what: Callable[[], bool], message: str) -> None:
        eventually(
            lambda: what() or self.process.poll() is not None,
            within=60,
            message=lambda: f"{message}\n{self.said}",
        )
        assert what(), self.said


@pytest.fixture
def fake(tmp_path: Path) -> Iterator[FakeGpus]:
    """Two fake GPUs with unique UUIDs."""
    uuids = [f"GPU-test-{secrets.token_hex(6)}" for _ in range(2)]
    yield FakeGpus(tmp_path / "gpus.json", [gpu(uuid) for uuid in uuids])
    remove_locks(*uuids)


@pytest.fixture
def script(tmp_path: Path, fake: FakeGpus) -> Iterator[Callable[..., Script]]:
    running: list[Script] = []

    def start(name: str, *asked: float, together: int) -> Script:
        running.append(Script(tmp_path, fake, name, *asked, together=together))
        return running[-1]

    yield start
    for one in running:
        one.process.kill()
        one.process.wait()


def uuids_of(fake: FakeGpus) -> list[str]:
    return [device["uuid"] for device in json.loads(fake.file.read_text())["devices"]]


def test_trials_of_a_script_share_its_gpus_and_see_their_own(script, fake):
    one = script("one", 0.5, 0.5, 1.0, 0.0, together=4)
    one.go()
    *halves, whole, none = one.sees()
    assert none == ""
    assert len(set(halves)) == 1
    assert {whole, *halves} == set(uuids_of(fake))
    one.ends()


def test_two_scripts_take_turns_with_gpus_and_neither_waits_for_the_others_end(script, fake):
    one = script("one", 1.0, 1.0, together=2)
    one.has_begun(2)
    two = script("two", 1.0, 1.0, together=2)
    two.go()
    for uuid in uuids_of(fake):
        two.says(f"GPU {uuid} of node local is set aside: used by process ")
    assert f"(search of process {one.process.pid})" in two.said
    one.go()
    assert set(one.sees()) == set(uuids_of(fake))
    assert set(two.sees()) == set(uuids_of(fake))
    assert one.process.poll() is None
    one.ends()
    two.ends()


def test_a_script_uses_the_gpus_that_no_worker_offers(script, fake, server, tmp_path):
    first, second = uuids_of(fake)
    line = ["worker", "--redis", server.url, "--name", "gpu1", "--cpus", "1", "--gpus", first]
    workdir = ["--workdir", str(tmp_path / "worker")]
    worker = Command(*line, *workdir, log=tmp_path / "w.log", variables=fake.environment())
    try:
        worker.says(first, within=60)
        one = script("one", 1.0, 1.0, together=1)
        one.says(
            f"GPU {first} of node local is set aside: "
            f"used by process {worker.process.pid} (worker gpu1)"
        )
        one.go()
        assert one.sees() == [second, second]
        one.ends()
    finally:
        worker.kill()
