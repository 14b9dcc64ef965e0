"""A farm for one test: a real Redis that can be wiped, stopped and killed, and real nodes.

The script's own farm is replaced by it, so a search runs on it as on any other; it runs in a
thread, and the test's thread disturbs. `tests.support.searches.chain` tells afterwards whether
anything was lost, done twice or mixed up.
"""

from __future__ import annotations

import contextlib
import itertools
import os
import random
import shutil
import signal
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any, Final, TypeVar

import pytest

import tunemq as tune
from tests.integration.farm_support import RedisServer
from tests.support.journal_records import read_records
from tests.support.proxies.tcp_proxy import TcpProxy
from tests.support.searches.chain import (
    chain,
    executed,
    expected,
    link,
    note,
    open_gate,
    wait_at_gate,
)
from tests.support.waiting import eventually
from tunemq_scheduler.experiment import run_experiment
from tunemq_scheduler.journal.journal_files import FILE_NAME
from tunemq_scheduler.output.terminal.reporter import ProgressReporter
from tunemq_shared.broker import redis_keys
from tunemq_shared.protocol import messages as m

_REPOSITORY: Final = Path(__file__).parents[3]
_terms = itertools.count(1)
_F = TypeVar("_F", bound="OwnFarm")


class AsksAtEveryResult(tune.Stopper):
    """Stops nothing and declares no horizon, so that every step waits for a command."""

    def __call__(self, trial_id, result):
        return False

    def stop_all(self):
        return False


class NodeProcess:
    """A node's process; started again it is another instance."""

    def __init__(
        self,
        url: str,
        name: str,
        folder: Path,
        cpus: int,
        variables: Mapping[str, str],
        *options: str,
    ):
        self.folder = folder
        folder.mkdir()
        self._command = [
            *(
                sys.executable,
                "-P",
                "-m",
                "tunemq_workers.node.node_process",
                "--redis",
                url,
                "--name",
                name,
            ),
            *("--workdir", str(folder), "--cpus", str(cpus), *options),
        ]
        self._variables = dict(variables)
        self.start()

    def start(self) -> None:
        """Start it."""
        environ = {**os.environ, **self._variables}
        self.process = subprocess.Popen(self._command, env=environ, stdin=subprocess.DEVNULL)

    def log(self) -> str:
        """What it has written to its log."""
        path = self.folder / "logs" / "node.log"
        return path.read_text(encoding="utf-8", errors="replace") if path.exists() else ""

    def end(self) -> None:
        """End it, whatever became of it."""
        if self.process.poll() is None:
            self.process.send_signal(signal.SIGCONT)
            self.process.terminate()
        try:
            self.process.wait(60)
        except subprocess.TimeoutExpired:
            self.process.kill()
            self.process.wait()
            raise


class OwnFarm:
    """Redis and nodes; has the methods that a search expects of its farm.

    Args:
        nodes, cpus: how many there are, and how many trials each runs.
        proxies: nodes and scheduler reach Redis through a `TcpProxy` each, ``to_nodes`` (one for
            all of them) and ``to_scheduler``.
        redis: options of redis-server.
        variables: for the nodes' environment.
        options: further ones of theirs.
    """

    def __init__(
        self,
        *,
        nodes: int = 2,
        cpus: int = 1,
        proxies: bool = False,
        redis: tuple[str, ...] = (),
        variables: Mapping[str, str] | None = None,
        options: tuple[str, ...] = (),
    ) -> None:
        self.folder = tempfile.mkdtemp(prefix="tq-", dir="/tmp")  # short, for the socket
        self._over: str | None = None
        self.server = RedisServer(Path(self.folder), *redis)
        self.to_nodes = TcpProxy(self.server.path) if proxies else None
        self.to_scheduler = TcpProxy(self.server.path) if proxies else None
        self._node_url = self.to_nodes.url if self.to_nodes else self.server.url
        self.url = self.to_scheduler.url if self.to_scheduler else self.server.url
        self._cpus, self._variables, self._options = cpus, dict(variables or {}), options
        self.nodes: list[NodeProcess] = []
        for _ in range(nodes):
            self.add_node()

    def add_node(self) -> NodeProcess:
        """Start one more node."""
        name = f"n{len(self.nodes)}"
        folder = Path(self.folder, name)
        given = (self._cpus, self._variables, *self._options)
        self.nodes.append(NodeProcess(self._node_url, name, folder, *given))
        return self.nodes[-1]

    # --- interface to searches ------------------------------------------------------------------

    def wait_until_ready(self) -> None:
        """It is."""

    def new_term(self) -> int:
        """A term greater than every one before."""
        return next(_terms)

    def trouble(self) -> str | None:
        """Why to abort running searches: None until the test ends."""
        return self._over

    def notices(self) -> list[str]:
        """No notices: only the test acts on the farm."""
        return []

    def excuse_node(self) -> None:
        """Nodes are started again by the test, however often they died."""

    def end_now(self) -> None:
        """For a person's second Ctrl-C."""

    # --- faults ---------------------------------------------------------------------------------

    def kill_redis(self, away_s: float) -> float:
        """Kill Redis, start it again after so long; returns when it answers."""
        self.server.kill()
        time.sleep(away_s)  # the test is about the length of the outage
        self.server.start()
        return time.monotonic()

    def stop_redis(self, for_s: float) -> float:
        """Stop Redis with SIGSTOP for `for_s` seconds, then send SIGCONT; return when that was."""
        assert self.server.process is not None
        self.server.process.send_signal(signal.SIGSTOP)
        time.sleep(for_s)  # the test is about the length of the outage
        self.server.process.send_signal(signal.SIGCONT)
        return time.monotonic()

    def set_clock_back(self) -> None:
        """Set Redis's clock an hour behind the ids of the last entries of the streams."""
        seconds, _ = self.server.client.time()
        ahead = f"{(seconds + 3600) * 1000}-0"
        pattern = redis_keys.events("*")
        eventually(lambda: self.server.client.keys(pattern))
        for key in (*self.server.client.keys(pattern), redis_keys.NODES):
            self.server.client.xadd(key, {"nothing": "of ours"}, id=ahead)

    def logs(self) -> str:
        """The logs of all nodes."""
        return "\n".join(f"--- {node.folder.name}\n{node.log()}" for node in self.nodes)

    def ownerless_keys(self, grace_s: float = 90_000) -> dict[str, int]:
        """The Redis keys without a living owner or an expiry: name and TTL.

        The generation and the nodes' stream belong to the farm. Keys of a node that has ended must
        expire, and so must all keys of a finished experiment.
        """
        keys = [key.decode() for key in self.server.client.keys("*")]
        own = {redis_keys.GENERATION, redis_keys.NODES}
        ttls = {key: self.server.client.ttl(key) for key in keys if key not in own}
        return {key: ttl for key, ttl in ttls.items() if ttl == -1 or ttl > grace_s}

    def close(self) -> None:
        """End all of it; a node that does not end by itself is an error."""
        self._over = "the test has ended"
        try:
            for node in self.nodes:
                if node.process.poll() is None:
                    node.process.send_signal(signal.SIGCONT)
                    node.process.terminate()
            for node in self.nodes:
                node.end()
        finally:
            for proxy in (self.to_nodes, self.to_scheduler):
                if proxy is not None:
                    proxy.close()
            with contextlib.suppress(ProcessLookupError):
                self.server.process.send_signal(signal.SIGCONT)
            self.server.end()
            shutil.rmtree(self.folder, ignore_errors=True)


class ChainRun:
    """A search of chains on a farm, in a thread.

    Args:
        folder: for its results.
        trials, steps, step_s: number of trials, steps per trial, least seconds per step.
        lock_step: every step waits for a command of the scheduler.
        save_every: steps between two checkpoints; by default trials save none.
        gate: trials wait behind this step until `open_gate`.
    """

    def __init__(
        self,
        farm: OwnFarm,
        folder: Path,
        *,
        trials: int = 2,
        steps: int = 60,
        step_s: float = 0.02,
        lock_step: bool = True,
        padding: int = 0,
        save_every: int = 10**9,
        gate: int | None = None,
    ) -> None:
        self.farm, self.folder, self.trials, self.steps = farm, folder, trials, steps
        self.results: tune.ResultGrid | None = None
        self.error: BaseException | None = None
        self._step_s, self._lock_step, self._padding = step_s, lock_step, padding
        self._save_every = save_every
        self._gate = None if gate is None else folder / "gate"
        if gate is not None:
            self.open_gate(gate)
        #: Lines that a user would see.
        self.told: list[str] = []
        self._executed = folder / "executed"
        self._executed.mkdir(parents=True)
        self._thread = threading.Thread(target=self._run, name="search", daemon=True)
        self._thread.start()

    def _run(self) -> None:
        try:
            self.results = tune.Tuner(
                chain if not self._padding else padded_chain,
                param_space={
                    "seed": tune.grid_search(list(range(self.trials))),
                    "executed": str(self._executed),
                    "steps": self.steps,
                    "save_every": self._save_every,
                    "payload": self._padding,
                    "step_s": self._step_s,
                    "gate": "" if self._gate is None else str(self._gate),
                },
                tune_config=tune.TuneConfig(metric="score", mode="max", seed=1),
                run_config=tune.RunConfig(
                    name="search",
                    storage_path=str(self.folder),
                    stop=AsksAtEveryResult() if self._lock_step else None,
                    progress_reporter=Listener(self.told),
                    verbose=1,  # else the run reports nothing
                ),
            ).fit()
        except BaseException as error:  # noqa: BLE001  raised by `ends`, in the test's thread
            self.error = error

    # --- control and observation ----------------------------------------------------------------

    def open_gate(self, up_to: int) -> None:
        """Let trials do the steps up to this one."""
        open_gate(self.folder / "gate", up_to)

    def done(self) -> dict[int, int]:
        """How many steps each trial that has begun has executed."""
        return {number: len(steps) for number, steps in executed(self._executed).items()}

    def wait_for_step(self, step: int, within: float = 60.0, trials: int | None = None) -> None:
        """Wait until `trials` trials (all by default) have executed `step` steps."""
        wanted = self.trials if trials is None else trials

        def has_come() -> bool:
            assert self._thread.is_alive() or self.error is None, self.error
            return sum(count >= step for count in self.done().values()) >= wanted

        eventually(has_come, within=within, message=self.state)

    def continues(self, since: float, within: float = 60.0, steps: int = 2) -> float:
        """Wait until a new command has run in every running trial; return the seconds it took.

        In lock-step a trial executes only the steps that the scheduler has ordered, and of the
        steps that begin after ``since`` only the first may have been ordered before.
        """
        before = self.done()
        running = {number for number, count in before.items() if count < self.steps - steps}
        eventually(
            lambda: all(self.done()[number] >= before[number] + steps for number in running),
            within=within,
            message=self.state,
        )
        return time.monotonic() - since

    def wait_for_silence(self, quiet_s: float = 0.5, within: float = 60.0) -> None:
        """Wait until no trial has executed a step for so long: all wait for commands."""
        last, since = self.done(), time.monotonic()

        def is_silent() -> bool:
            nonlocal last, since
            if (now := self.done()) != last:
                last, since = now, time.monotonic()
            return time.monotonic() - since > quiet_s

        eventually(is_silent, within=within, message=self.state)

    def watch(self, step_within: float = 20.0) -> list[float]:
        """Look on until it ends; returns how long each step of each trial took to come.

        Fails when no trial has executed a step for ``step_within`` seconds.
        """
        newest = time.monotonic()
        waits: list[float] = []
        seen: dict[int, tuple[int, float]] = {}
        while self._thread.is_alive():
            now = time.monotonic()
            for number, count in self.done().items():
                before, since = seen.get(number, (0, now))
                if count != before:
                    if before:
                        waits.append(now - since)
                    seen[number] = (count, now)
                    newest = now
            assert now < newest + step_within, self.state()
            self._thread.join(0.005)
        return waits

    def ends_well(self, within: float = 150.0) -> None:
        """Wait for its end: whatever went wrong meanwhile, results are as if nothing had."""
        self._thread.join(within)
        assert not self._thread.is_alive(), self.state()
        if self.error is not None:
            raise self.error
        assert self.results is not None
        assert len(self.results) == self.trials
        for result in self.results:
            assert result.error is None, (result.error, self.state())
            steps = [line["training_iteration"] for line in result.history]
            assert steps == list(range(1, self.steps + 1))
            assert result.metrics["chain"] == expected(result.config, self.steps)

    def ends(self, within: float = 150.0) -> None:
        """Wait for its end, and check that nothing was lost, repeated or mixed up."""
        self.ends_well(within)
        wanted = list(range(1, self.steps + 1))
        for number, steps in executed(self._executed).items():
            assert steps == wanted, (number, steps, "a step was repeated, so a trial process died")
        strange = [
            event for event in self.events() if isinstance(event, m.TrialProcessDied | m.NodeLost)
        ]
        assert not strange, (strange, self.state())

    def events(self) -> list[m.Event]:
        """All events in its journal."""
        return [entry.event for entry in read_records(self.folder / "search" / FILE_NAME)]

    def leaves_no_key(self) -> None:
        """Check that after it, and after the nodes, no key is left without an expiry."""
        for node in self.farm.nodes:
            node.end()
        left = self.farm.ownerless_keys()
        assert not left, left

    def state(self) -> str:
        """For messages."""
        return f"{self.done()} {self.error!r} {self.told}\n{self.farm.logs()}"


class Listener(ProgressReporter):
    """Record the lines that a user would see."""

    def __init__(self, told: list[str]) -> None:
        self._told = told

    def report(self, trials: Any, done: bool, *sys_info: str) -> None:
        self._told += [line for line in sys_info if line not in self._told]


def padded_chain(config: dict[str, Any]) -> None:
    """A chain that reports ``payload`` bytes of padding with each result."""
    number, value = int(tune.get_context().get_trial_id().rpartition("_")[2]), ""
    for step in range(1, config["steps"] + 1):
        wait_at_gate(config, step)
        time.sleep(config["step_s"])  # the step's work
        value = link(value, config, step)
        note(config, number, step)
        padding = random.Random(step).randbytes(config["payload"] // 2).hex()
        tune.report({"chain": value, "score": step, "padding": padding})


@pytest.fixture
def farm(monkeypatch: pytest.MonkeyPatch) -> Iterator[Callable[..., OwnFarm]]:
    """Makes the farm on which the test's searches run; takes the arguments of `OwnFarm`."""
    with made_to_search_on(OwnFarm, monkeypatch) as make:
        yield make


@contextlib.contextmanager
def made_to_search_on(
    kind: type[_F], monkeypatch: pytest.MonkeyPatch
) -> Iterator[Callable[..., _F]]:
    """Yield a function that creates farms of this kind for searches; it ends them at the end."""
    with contextlib.ExitStack() as stack:

        def make(**how: Any) -> _F:
            return stack.enter_context(searches_run_on(kind(**how), monkeypatch))

        yield make


@contextlib.contextmanager
def searches_run_on(farm: _F, monkeypatch: pytest.MonkeyPatch) -> Iterator[_F]:
    """Have searches of this process run on ``farm``, while the context lasts."""

    @contextlib.contextmanager
    def this_one(*_: Any, **__: Any) -> Iterator[_F]:
        yield farm

    monkeypatch.setattr(run_experiment, "embedded_farm", this_one)
    monkeypatch.syspath_prepend(
        str(_REPOSITORY)
    )  # trial processes import tests.support.searches.chain
    try:
        yield farm
    finally:
        farm.close()
