"""Redis and workers as people run them: a redis-server over TCP, and `tunemq worker`."""

from __future__ import annotations

import contextlib
import json
import os
import shutil
import signal
import subprocess
import sys
import sysconfig
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, Final

import psutil
import redis

from tests.integration.farm_support import is_alive
from tests.support.searches.chain import executed, expected, open_gate
from tests.support.searches.killed_searches import JournalTail
from tests.support.waiting import eventually, free_port, need
from tunemq_shared.protocol import messages as m

SCRIPT: Final = Path(__file__).parents[2] / "faults" / "scripts" / "farm_search.py"
#: Whatever these processes start inherits this variable, wherever it goes.
MARK: Final = "FARM_TEST_MARK"


def redis_program() -> str:
    """The redis-server that came with the interpreter, else that of the machine."""
    beside = Path(sysconfig.get_path("scripts"), "redis-server")
    program = str(beside) if beside.exists() else shutil.which("redis-server")
    need("redis-server", program)
    return str(program)


def whole_lines(path: Path) -> list[bytes]:
    """The lines of a file but for a last one that is being written."""
    whole, _, _ = path.read_bytes().rpartition(b"\n")
    return whole.splitlines()


class TcpRedis:
    """A redis-server on a free port, which writes nothing to disk unless options say so."""

    def __init__(self, folder: Path, password: str = "", options: Sequence[str] = ()) -> None:
        program = redis_program()
        self.port = free_port()
        place = f":{password}@127.0.0.1" if password else "127.0.0.1"
        self.url = f"redis://{place}:{self.port}/0"
        self._command = [program, "--port", str(self.port), "--bind", "127.0.0.1"]
        self._command += ["--save", "", "--loglevel", "warning", "--logfile", "redis.log"]
        self._folder = folder
        self._command += ["--dir", str(folder), *options]
        if password:
            self._command += ["--requirepass", password]
        self.start()

    def start(self) -> None:
        """Start the server on the data on its disk."""
        self.process = subprocess.Popen(self._command, cwd=self._folder)  # its log is relative
        self.client = redis.Redis.from_url(self.url, socket_timeout=60)
        eventually(self.answers, message="redis-server does not answer")

    def answers(self) -> bool:
        """Whether it can be reached."""
        try:
            return bool(self.client.ping())
        except (redis.ConnectionError, redis.TimeoutError):
            return False

    def end(self) -> None:
        """End it for good."""
        self.client.close()
        self.process.kill()
        self.process.wait()


def fail_to_save(client: redis.Redis) -> Callable[[], None]:
    """Have a redis-server fail to save to its disk, after which it refuses writes; the way back."""
    config: Any = client.config_get("d*")
    file = Path(config["dir"], config["dbfilename"])
    (file / "in the way").mkdir(parents=True)
    client.config_set("save", "3600 1")
    client.bgsave()
    info: Any = client.info
    eventually(lambda: info("persistence")["rdb_last_bgsave_status"] == "err")

    def restore() -> None:
        client.config_set("save", "")
        shutil.rmtree(file)

    return restore


class Command:
    """A ``tunemq`` command as a process; its output is in a file.

    Args:
        arguments: of the command line.
        log: for its output.
        variables: for its environment.
    """

    def __init__(
        self, *arguments: str, log: Path, variables: Mapping[str, str] | None = None
    ) -> None:
        self.log = log
        with log.open("ab") as output:
            self.process = subprocess.Popen(
                [sys.executable, "-m", "tunemq", *arguments],
                stdin=subprocess.DEVNULL,
                stdout=output,
                stderr=output,
                start_new_session=True,
                env={**os.environ, **(variables or {})},
            )

    @property
    def said(self) -> str:
        """Its output so far."""
        return self.log.read_text(encoding="utf-8", errors="replace")

    def says(self, text: str, within: float = 60.0) -> None:
        """Wait until the process has printed ``text``."""
        eventually(
            lambda: text in self.said,
            within=within,
            message=lambda: f"not said: {text}\n{self.said}",
        )

    def send(self, number: signal.Signals) -> None:
        """Send it a signal."""
        self.process.send_signal(number)

    def ends(self, within: float = 60.0) -> int:
        """Wait for its end; its exit code."""
        try:
            return self.process.wait(within)
        except subprocess.TimeoutExpired:
            raise AssertionError(f"it does not end: {self.said}") from None

    def kill(self) -> None:
        """``kill -9``."""
        if self.process.poll() is None:
            self.process.kill()
        self.process.wait()


class Farm:
    """Redis and workers below a folder, ended with the test."""

    def __init__(self, folder: Path, redis: Sequence[str] = ()) -> None:
        self.folder = folder
        self.results = folder / "results"
        self.redis = TcpRedis(folder, options=redis)
        self.workers: dict[str, Command] = {}
        self._started: list[Command] = []
        self.journal = JournalTail(self.results / "search" / "journal")

    def worker(self, name: str, cpus: int = 2, *more: str) -> Command:
        """Start a worker."""
        line = ["worker", "--redis", self.redis.url, "--name", name, "--cpus", str(cpus)]
        line += ["--workdir", str(self.folder / f"worker-{name}"), *more]
        self.workers[name] = Command(*line, log=self.folder / f"{name}.log")
        self._started.append(self.workers[name])
        return self.workers[name]

    def open_gate(self, up_to: int) -> None:
        """Let trials do the steps up to this one."""
        open_gate(self.folder / "gate", up_to)

    # --- results ----------------------------------------------------------------------------------

    def steps(self) -> dict[int, list[int]]:
        """By trial number, the steps that were executed, in their order."""
        return executed(self.folder / "executed")

    def wait_for_steps(self, trials: int, steps: int, within: float = 60.0) -> None:
        """Wait until `trials` trials have executed `steps` steps each."""

        def have_begun() -> bool:
            begun = [len(done) for done in self.steps().values() if len(done) >= steps]
            return len(begun) >= trials

        eventually(have_begun, within=within, message=lambda: f"{self.steps()}{self}")

    def all_of(self, kind: type[Any]) -> list[Any]:
        """All events of a kind in the journal."""
        return [seen.event for seen in self.journal.read() if isinstance(seen.event, kind)]

    def recorded(self, results: Path | None = None) -> dict[int, list[tuple[int, str]]]:
        """By trial number, the contents of its result.json: step and the chain's value."""
        files = sorted((results or self.results).glob("search/*/result.json"))
        return {
            int(file.parent.name.rpartition("_")[2]): [
                (line["training_iteration"], line["chain"])
                for line in map(json.loads, whole_lines(file))
            ]
            for file in files
        }

    def nothing_is_missing_or_doubled(
        self, trials: int, steps: int, results: Path | None = None
    ) -> None:
        """Check that each result of an undisturbed run exists once."""
        recorded = self.recorded(results)
        assert sorted(recorded) == list(range(trials)), f"{sorted(recorded)}{self}"
        for number, lines in recorded.items():
            assert [step for step, _ in lines] == list(range(1, steps + 1)), f"{number}: {lines}"
            assert lines[-1][1] == expected({"own": number}, steps), f"trial {number}"

    def __str__(self) -> str:
        said = [f"--- {one.log.name}\n{one.said[-3000:]}" for one in self.workers.values()]
        nodes = [
            f"--- {path}\n{path.read_text()[-1500:]}"
            for path in self.folder.glob("worker-*/logs/node.log")
        ]
        return "\n" + "\n".join([*said, *nodes])

    def close(self) -> None:
        """End all of it, whatever became of it."""
        for one in self._started:
            if one.process.poll() is None:
                children = psutil.Process(one.process.pid).children(recursive=True)
                one.send(signal.SIGCONT)
                one.kill()
                for child in children:  # a killed node's forkserver ends them; not in this second
                    with contextlib.suppress(psutil.NoSuchProcess):
                        child.kill()
                eventually(lambda: not any(is_alive(child.pid) for child in children))  # noqa: B023
        self.redis.end()


def farms(folder: Path, redis: Sequence[str] = ()) -> Iterator[Farm]:
    """For a fixture: a farm that ends with the test; ``redis``: options of redis-server."""
    farm = Farm(folder, redis)
    yield farm
    farm.close()


__all__ = ["Command", "Farm", "TcpRedis", "farms", "free_port", "m", "whole_lines"]
