"""Whom we measure: interpreters that have a peer installed, and scripts run by them."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from benchmarks.scripts.measured import MARK

SCRIPTS = Path(__file__).parent / "scripts"
ROOT = Path(__file__).parent.parent
RAY_PYTHON = "TUNEMQ_BENCH_RAY_PYTHON"

_TIMEOUT_S = 900.0


class BenchmarkFailed(Exception):
    """A script ended without printing its figures; the message has its output."""


@dataclass
class Running:
    """A running script; ``figures`` holds the values that it has printed so far."""

    process: subprocess.Popen[str]
    started: float
    figures: dict[str, Any] = field(default_factory=dict)

    @property
    def pid(self) -> int:
        """Its process."""
        return self.process.pid

    def wait_for(self, key: str) -> Any:
        """The figure ``key``, as soon as it is printed."""
        assert self.process.stdout is not None
        said: list[str] = []
        while key not in self.figures:
            line = self.process.stdout.readline()
            if not line:
                raise BenchmarkFailed("".join(said[-40:]))
            said.append(line)
            _, mark, figures = line.partition(MARK)
            if mark:
                self.figures |= json.loads(figures)
        return self.figures[key]


@dataclass(frozen=True)
class Peer:
    """An interpreter with something to measure.

    Attributes:
        name: ``tunemq`` or ``ray``.
        python: the interpreter.
        folder: for the results of searches.
    """

    name: str
    python: str
    folder: str

    @contextmanager
    def running(self, script: str, *arguments: object) -> Iterator[Running]:
        """Run a script of `SCRIPTS`; it is ended when the block is left."""
        started = time.time()
        process = subprocess.Popen(
            [self.python, str(SCRIPTS / script), *map(str, arguments)],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            env=self._variables(),
            text=True,
        )
        try:
            yield Running(process, started)
        finally:
            process.terminate()
            try:
                process.communicate(timeout=30)
            except subprocess.TimeoutExpired:
                process.kill()
                process.communicate()

    def measure(self, script: str, *arguments: object, until: str) -> Running:
        """Run a script until it has printed the figure ``until`` and ended."""
        with self.running(script, *arguments) as running:
            running.wait_for(until)
            running.process.communicate(timeout=_TIMEOUT_S)
        return running

    def search(self, *arguments: object) -> Running:
        """Run a search to its end."""
        return self.measure("search.py", *self._search(arguments), until="ends")

    def searching(self, *arguments: object) -> AbstractContextManager[Running]:
        """Start a search; it is ended when the block is left."""
        return self.running("search.py", *self._search(arguments))

    def _search(self, arguments: tuple[object, ...]) -> tuple[object, ...]:
        return "--peer", self.name, "--storage", self.folder, *arguments

    def _variables(self) -> dict[str, str]:
        """The environment, without variables that slow Python down or use the network."""
        variables = {
            name: value
            for name, value in os.environ.items()
            if not name.startswith(("PYTHON", "TUNEMQ_", "RAY_", "TUNE_"))
        }
        if self.name == "tunemq":
            variables["PYTHONPATH"] = str(ROOT)
        return variables | {"RAY_USAGE_STATS_ENABLED": "0"}


def find_peers(ray_python: str | None, folder: str) -> list[Peer]:
    """TuneMQ, and Ray Tune if ``ray_python`` or the variable names an interpreter that has it.

    Raises:
        BenchmarkFailed: it is named and has no Ray Tune.
    """
    peers = [Peer("tunemq", sys.executable, folder)]
    ray_python = ray_python or os.environ.get(RAY_PYTHON)
    if ray_python:
        found = subprocess.run(
            [ray_python, "-c", "import ray.tune"], capture_output=True, text=True, check=False
        )
        if found.returncode:
            raise BenchmarkFailed(f"{ray_python} cannot import ray.tune: {found.stderr[-500:]}")
        peers.append(Peer("ray", ray_python, folder))
    return peers
