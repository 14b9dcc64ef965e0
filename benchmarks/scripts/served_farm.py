"""A farm's service for measurements: Redis, a scheduler and a worker, ended with the script."""

from __future__ import annotations

import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

from tunemq_scheduler.api import farm_answer_types as a
from tunemq_scheduler.api.farm_client import FarmClient
from tunemq_scheduler.embedded.redis_command import find_redis_server, redis_command
from tunemq_shared.base.errors import TuneError
from tunemq_shared.code.blob_store import open_blobs
from tunemq_shared.code.bundles import bundle
from tunemq_shared.protocol import farm_requests as r

_TIMEOUT_S = 90.0


class ServedFarm:
    """A farm whose files are below a folder."""

    def __init__(self, folder: Path) -> None:
        self.folder, self.url = folder, f"unix://{folder}/redis"
        self.results = folder / "results"
        self.results.mkdir()
        self.running: list[subprocess.Popen[bytes]] = []
        self._start(*redis_command(find_redis_server(), str(folder / "redis")))

    def start(self, cpus: int, settings: str = "", worker: Sequence[str] = ()) -> None:
        """Start the scheduler and a worker, and wait until they know each other.

        Args:
            worker: more of the worker's options.
        """
        (self.folder / "farm.toml").write_text(settings)
        self.start_scheduler()
        workdir = ("--workdir", str(self.folder / "worker"))
        self._tunemq("worker", "--name", "one", "--cpus", str(cpus), *workdir, *worker)
        wait_until(lambda: [row.node for row in self._nodes()] == ["one"])

    def start_scheduler(self) -> None:
        """Start the scheduler."""
        settings = str(self.folder / "farm.toml")
        self._tunemq("scheduler", "--results", str(self.results), "--settings", settings)
        self._scheduler = self.running[-1]

    def kill_scheduler(self) -> None:
        """`kill -9` it."""
        self._scheduler.kill()
        self._scheduler.wait()

    def code(self, name: str, text: str) -> r.ScriptCode:
        """A script that the farm has."""
        script = self.folder / f"{name}.py"
        script.write_text(text)
        with open_blobs(str(self.results)) as blobs:
            return r.ScriptCode(bundle=bundle(script, blobs), script=script.name)

    def submit(self, name: str, code: r.ScriptCode, priority: int = 0) -> None:
        """Queue an experiment."""
        with FarmClient(self.url) as client:
            client.ask(
                r.SubmitExperiment(name=name, code=code, priority=priority), a.ExperimentSubmitted
            )

    def stop(self, name: str) -> None:
        """Have an experiment stop."""
        with FarmClient(self.url) as client:
            client.ask(r.StopExperiment(name=name), a.RequestDone)

    def said(self) -> str:
        """The output of all its processes."""
        return (self.folder / "said").read_text(errors="replace")

    def rows(self) -> dict[str, a.ExperimentRow]:
        """All experiments."""
        with FarmClient(self.url) as client:
            found = client.ask(r.ListExperiments(), a.ExperimentList)
        return {row.name: row for row in found.experiments}

    def end(self) -> None:
        """End all of it."""
        for process in reversed(self.running):
            process.kill()
            process.wait()

    def _nodes(self) -> tuple[a.NodeRow, ...]:
        try:
            with FarmClient(self.url) as client:
                return client.ask(r.ListNodes(), a.NodeList).nodes
        except TuneError:
            return ()

    def _tunemq(self, command: str, *more: str) -> None:
        self._start(sys.executable, "-m", "tunemq", command, "--redis", self.url, *more)

    def _start(self, *command: str) -> None:
        with open(self.folder / "said", "ab") as log:
            self.running.append(
                subprocess.Popen(command, cwd=self.folder, stdout=log, stderr=log, env=os.environ)
            )


@contextmanager
def served_farm() -> Iterator[ServedFarm]:
    """A farm in a temporary folder with a short path, as sockets need."""
    with tempfile.TemporaryDirectory(prefix="bench-") as name:
        farm = ServedFarm(Path(name))
        try:
            yield farm
        finally:
            farm.end()


def wait_until(condition: Callable[[], object], within: float = _TIMEOUT_S) -> None:
    """Return when it is true."""
    deadline = time.monotonic() + within
    while not condition():
        if time.monotonic() > deadline:
            raise TimeoutError("it does not come true")
        time.sleep(0.002)
