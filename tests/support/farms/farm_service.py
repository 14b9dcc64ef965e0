"""A farm's service as users run it: command line only, a separate home per machine.

    with farm_service(folder) as farm:
        farm.add_worker("one", cpus=2)
        farm.submit(Search("first", trials=3))
        farm.wait_for("first", "FINISHED")

Machines are processes here, or hosts of `tests.support.farms.network_namespaces`.
"""

from __future__ import annotations

import contextlib
import inspect
import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path
from typing import Any, Final, Protocol, TypeVar

import msgspec

from tests.integration.farm_support import is_alive, process_tree_of
from tests.support.farms.farm_processes import TcpRedis, whole_lines
from tests.support.farms.network_namespaces import Hosts
from tests.support.searches import chain
from tests.support.searches.chain import executed, expected, open_gate, waiting_at_gate
from tests.support.searches.killed_searches import JournalTail
from tests.support.waiting import eventually
from tests.support.warm_commands import WarmCommands
from tunemq_scheduler.api import farm_answer_types as a
from tunemq_scheduler.api.farm_client import FarmClient
from tunemq_scheduler.embedded.redis_command import find_redis_server
from tunemq_shared.base.errors import NoScheduler, RedisUnavailable, TuneError
from tunemq_shared.protocol import farm_requests as r
from tunemq_shared.protocol import messages as m

_A = TypeVar("_A", bound=a.FarmAnswer)
_E = TypeVar("_E", bound=m.Event)
#: A scheduler that runs answers after so long, on a machine that stood still, too.
_ANSWERS_WITHIN_S: Final = 30.0
#: In the scheduler's log, when it serves the farm.
_SERVES: Final = "Serving the farm on"
#: The exit codes of a command that found no Redis, and no scheduler.
_NOBODY_ANSWERS: Final = frozenset({69, 75})
_ROOT: Final = Path(__file__).parents[3]
#: Messages of a replaced scheduler, which notices by its lease or at the next read of requests.
SUPERSEDED: Final = "another one took its place|has a newer scheduler"
_SEARCH: Final = """
import tunemq as tune
import work

OPTIONS = {options!r}
{code}
tuner = tune.Tuner(
    tune.with_resources({trainable}, {resources!r}),
    param_space={{"own": {space}, **OPTIONS}},
    tune_config=tune.TuneConfig(metric="score", mode="max", {tune}),
    run_config=tune.RunConfig(
        failure_config=tune.FailureConfig(max_failures={failures}, {policy}),
        verbose=1,
        {run}
    ),
)
"""


@dataclass(frozen=True, kw_only=True)
class Search:
    """A search of the chains of `tests.support.searches.chain`.

    Attributes:
        name: of the experiment.
        step_s: seconds that a step takes.
        save_every: steps between two checkpoints; functions only.
        trainable: an expression; ``work`` is `tests.support.searches.chain`.
        space: an expression for the parameter ``own``; by default there is a trial for each number.
        code: before the Tuner in the script.
        tune, run: further arguments of TuneConfig and RunConfig.
        has_gate: steps wait for `FarmService.open_gate`.
        failures: failures allowed per trial; -1: no limit.
        policy: further arguments of FailureConfig.
    """

    name: str
    trials: int = 2
    space: str = ""
    steps: int = 10
    step_s: float = 0.02
    save_every: int = 1
    trainable: str = "work.chain"
    resources: dict[str, float] = field(default_factory=lambda: {"cpu": 1})
    code: str = ""
    tune: str = ""
    run: str = ""
    has_gate: bool = False
    failures: int = -1
    policy: str = ""


class Machine(Protocol):
    """Where processes run: `Here`, or one of `TrialSupervisor`."""

    processes: list[subprocess.Popen[Any]]

    def start(
        self, command: Sequence[str], environ: Mapping[str, str], log: Path
    ) -> subprocess.Popen[bytes]:
        """Start a program; its output goes to ``log``."""

    def commands(self, environ: Mapping[str, str]) -> WarmCommands:
        """The runner of `tunemq` commands on this machine, in this environment."""

    def kill(self) -> None:
        """Kill all that was started."""


class Here:
    """The machine that runs the tests; see `Machine`.

    Args:
        before: prefix of all commands, such as a program that drops privileges.
    """

    def __init__(self, before: Sequence[str] = ()) -> None:
        self._before = before
        self.processes: list[subprocess.Popen[Any]] = []

    def start(
        self, command: Sequence[str], environ: Mapping[str, str], log: Path
    ) -> subprocess.Popen[bytes]:
        """Start a program in a new session; its output goes to ``log``."""
        with log.open("ab") as file:
            process = subprocess.Popen(
                [*self._before, *command],
                env=dict(environ),
                cwd=log.parent,
                stdin=subprocess.DEVNULL,
                stdout=file,
                stderr=file,
                start_new_session=True,
            )
        self.processes.append(process)
        return process

    def commands(self, environ: Mapping[str, str]) -> WarmCommands:
        """The runner of `tunemq` commands on this machine, in this environment."""
        return WarmCommands(environ, self._before)

    def kill(self) -> None:
        """Kill all that was started, with all that it has started."""
        # Another process may have the number of one that was waited for.
        running = [process.pid for process in self.processes if process.poll() is None]
        pids = [member for pid in running for member in process_tree_of(pid)]
        for pid in pids:
            with contextlib.suppress(ProcessLookupError):  # ended with one that was killed before
                os.kill(pid, signal.SIGKILL)
        for process in self.processes:
            process.wait()
        self.processes.clear()
        eventually(lambda: not any(map(is_alive, pids)))


class FarmService:
    """A scheduler's service, its workers and its users.

    Args:
        url: of Redis, as all of them reach it.
        head, laptop: the machines of the scheduler and of the users.
    """

    def __init__(
        self, folder: Path, url: str, head: Machine | None = None, laptop: Machine | None = None
    ) -> None:
        self.folder, self.url = folder, url
        #: Where it is a process of this machine.
        self.redis: TcpRedis | None = None
        self.head, self.laptop = head or Here(), laptop or Here()
        self.results = folder / "head" / "tunemq_results"
        #: How often to look: from another machine it costs a process each time.
        self.every = 0.05 if isinstance(self.laptop, Here) else 0.5
        #: The machine of Redis, if the farm has several machines.
        self.redis_host: Machine | None = None
        self.add_machine: Callable[[str], Machine] = lambda _name: Here()
        #: Further options of the scheduler and the workers.
        self.options: tuple[str, ...] = ()
        #: By home, further environment variables of its processes.
        self.of_home: dict[str, Mapping[str, str]] = {}
        self.workers: dict[str, subprocess.Popen[bytes]] = {}
        #: How often the scheduler's log says that it serves the farm, once it does; 0: do not wait.
        self._awaited = 0
        self._machines = [self.head, self.laptop]
        self._searches: dict[str, Search] = {}
        self._journals: dict[Path, JournalTail] = {}
        for name in ("head", "laptop"):
            (folder / name).mkdir()

    # --- its processes ----------------------------------------------------------------------------

    def start_scheduler(
        self, *more: str, variables: Mapping[str, str] | None = None
    ) -> subprocess.Popen[bytes]:
        """Start `tunemq scheduler`; commands of users wait for it, see `await_scheduler`."""
        is_replaced = "scheduler" not in vars(self) or self.scheduler.poll() is not None
        self._awaited = self._times_served() + 1 if is_replaced else 0
        home = self.folder / "head"
        if (home / "farm.toml").exists():
            more = ("--settings", str(home / "farm.toml"), *more)
        self.scheduler = self.head.start(
            [*self.command("scheduler"), *self.options, *more],
            self.environ("head", variables),
            home / "scheduler.log",
        )
        return self.scheduler

    def await_scheduler(self) -> None:
        """Return once the scheduler that was started serves the farm, has ended, or needs long.

        Only that: one that waits for another one to end is not waited for.
        """
        deadline = time.monotonic() + _ANSWERS_WITHIN_S
        while self._times_served() < self._awaited and time.monotonic() < deadline:
            if self.scheduler.poll() is not None:
                break
            time.sleep(0.02)  # between two looks
        self._awaited = 0

    def _times_served(self) -> int:
        log = self.folder / "head" / "scheduler.log"
        return self.said().count(_SERVES) if log.exists() else 0

    def kill_scheduler(self) -> None:
        """`kill -9`, of it alone."""
        self.scheduler.kill()
        self.scheduler.wait()
        self.head.processes.remove(self.scheduler)

    def add_worker(
        self, name: str, cpus: int = 2, *more: str, machine: Machine | None = None
    ) -> subprocess.Popen[bytes]:
        """Start `tunemq worker`."""
        home = self.folder / name
        home.mkdir(exist_ok=True)
        machine = machine or self.add_machine(name)
        self._machines.append(machine)
        line = self.command("worker", "--name", name, "--cpus", str(cpus), *self.options, *more)
        self.workers[name] = machine.start(line, self.environ(name), home / "worker.log")
        return self.workers[name]

    @staticmethod
    def command(*arguments: str) -> list[str]:
        """``tunemq``, as a command line."""
        return [sys.executable, "-m", "tunemq", *arguments]

    def environ(self, home: str, variables: Mapping[str, str] | None = None) -> dict[str, str]:
        """The environment of a process on a machine with this home."""
        scripts = Path(sys.executable).parent
        return {
            "PATH": f"{scripts}:{os.environ['PATH']}",
            "HOME": str(self.folder / home),
            "PYTHONPATH": str(_ROOT),
            "COLUMNS": "200",
            "TUNEMQ_REDIS": self.url,
            **self.of_home.get(home, {}),
            **(variables or {}),
        }

    # --- its users --------------------------------------------------------------------------------

    def run(
        self, *arguments: str, variables: Mapping[str, str] | None = None
    ) -> subprocess.CompletedProcess[str]:
        """A command of a user, to its end."""
        self.await_scheduler()
        environ = self.environ("laptop", variables)
        return self._commands.run(arguments, environ, self.folder / "laptop")

    @cached_property
    def _commands(self) -> WarmCommands:
        return self.laptop.commands(self.environ("laptop"))

    def tunemq(self, *arguments: str) -> str:
        """Run a command that must succeed; return its output."""
        done = self.run(*arguments)
        assert done.returncode == 0, f"{arguments}: {done.returncode}\n{done.stdout}{done.stderr}"
        return done.stdout

    def json(self, *arguments: str) -> Any:
        """Run a command with ``--json``; return the decoded output."""
        return json.loads(self.tunemq(*arguments, "--json"))

    def write(self, search: Search) -> Path:
        """Write the script of a search into a new folder."""
        folder = self.folder / "laptop" / search.name
        folder.mkdir()
        done = self.folder / "executed" / search.name
        done.mkdir(parents=True)
        options: dict[str, Any] = {
            "executed": str(done),
            "steps": search.steps,
            "save_every": search.save_every,
            "payload": 64,
            "step_s": search.step_s,
        }
        if search.has_gate:
            options["gate"] = str(self._gate(search.name))
            self.open_gate(search.name, 0)
        (folder / "work.py").write_text(inspect.getsource(chain))
        script = folder / "search.py"
        about = {name: getattr(search, name) for name in ("trainable", "resources", "failures")}
        about |= {name: getattr(search, name) for name in ("code", "tune", "run", "policy")}
        space = search.space or f"tune.grid_search(list(range({search.trials})))"
        script.write_text(_SEARCH.format(options=options, space=space, **about))
        self._searches[search.name] = search
        return script

    def submit(self, search: Search, *more: str) -> None:
        """Hand in a search, and leave it to the farm."""
        self.tunemq("submit", str(self.write(search)), "--name", search.name, "--detach", *more)

    def open_gate(self, name: str, up_to: int) -> None:
        """Let the trials of a search do the steps up to this one."""
        open_gate(self._gate(name), up_to)

    def wait_for_gate(self, name: str, step: int, processes: int) -> None:
        """Wait until this number of processes of a search have waited to do this step."""
        eventually(
            lambda: waiting_at_gate(self._gate(name), step) >= processes,
            within=90,
            message=lambda: f"{name}: {self.steps(name)}{self}",
        )

    def _gate(self, name: str) -> Path:
        return self.folder / f"gate-{name}"

    # --- how tests observe it ---------------------------------------------------------------------

    def rows(self) -> dict[str, a.ExperimentRow]:
        """All experiments, as the scheduler lists them; nothing while it does not answer."""
        found = self._ask(r.ListExperiments(), a.ExperimentList, "ls")
        return {} if found is None else {row.name: row for row in found.experiments}

    def nodes(self) -> dict[str, a.NodeRow]:
        """All nodes that are there."""
        found = self._ask(r.ListNodes(), a.NodeList, "nodes")
        if found is None:
            return {}
        return {row.node: row for row in found.nodes if row.state != "gone"}

    def _ask(self, request: r.FarmRequest, kind: type[_A], command: str) -> _A | None:
        """Send a request; retry for a while if a running scheduler does not answer in time."""
        deadline = time.monotonic() + _ANSWERS_WITHIN_S
        while True:
            answer, is_heard = self._ask_once(request, kind, command)
            if answer is not None or is_heard or time.monotonic() > deadline:
                return answer
            if "scheduler" not in vars(self) or self.scheduler.poll() is not None:
                return None
            time.sleep(self.every)  # between two looks

    def _ask_once(
        self, request: r.FarmRequest, kind: type[_A], command: str
    ) -> tuple[_A | None, bool]:
        """Send a request from this process, if it can reach Redis.

        Returns:
            The answer, and whether the scheduler has received the request.
        """
        if isinstance(self.laptop, Here):
            try:
                with FarmClient(self.url) as client:
                    return client.ask(request, kind), True
            except (NoScheduler, RedisUnavailable):
                return None, False
            except TuneError:
                return None, True
        done = self.run(command, "--json")
        if done.returncode:
            return None, done.returncode not in _NOBODY_ANSWERS
        return msgspec.json.decode(done.stdout, type=kind), True

    def has_nodes(self, *names: str) -> None:
        """Wait until these nodes are there, and ready."""

        def are_ready() -> bool:
            nodes = self.nodes()
            return all(name in nodes and nodes[name].state == "ready" for name in names)

        eventually(
            are_ready, within=90, every=self.every, message=lambda: f"not ready: {names}{self}"
        )

    def wait_for(self, name: str, state: str, within: float = 120.0) -> a.ExperimentRow:
        """Wait until an experiment is in a state; its row."""
        found: list[a.ExperimentRow] = []

        def is_there() -> bool:
            row = self.rows().get(name)
            found[:] = [row] if row is not None else []
            if row is not None and row.state.is_over:
                assert row.state == state, f"{row}{self}"
            return row is not None and row.state == state

        eventually(
            is_there,
            within=within,
            every=self.every,
            message=lambda: f"not {state}: {found}{self}",
        )
        return found[0]

    def steps(self, name: str) -> dict[int, list[int]]:
        """By trial, the steps of a search that were executed, in their order."""
        return executed(self.folder / "executed" / name)

    def wait_for_steps(self, name: str, trials: int, steps: int, within: float = 90.0) -> None:
        """Wait until `trials` trials have executed `steps` steps each."""

        def have_begun() -> bool:
            begun = [done for done in self.steps(name).values() if len(done) >= steps]
            return len(begun) >= trials

        eventually(have_begun, within=within, message=lambda: f"{name}: {self.steps(name)}{self}")

    def recorded(self, name: str) -> dict[int, list[dict[str, Any]]]:
        """By trial, the lines of its result.json."""
        return {
            int(path.parent.name.rpartition("_")[2]): list(map(json.loads, whole_lines(path)))
            for path in sorted(self.results.glob(f"{name}/*/result.json"))
        }

    def check_results(self, name: str) -> None:
        """Check that each result of an undisturbed run exists once."""
        search, found = self._searches[name], self.recorded(name)
        assert sorted(found) == list(range(search.trials)), f"{sorted(found)}{self}"
        for number, lines in found.items():
            steps = [line["training_iteration"] for line in lines]
            assert steps == list(range(1, search.steps + 1)), f"{name} {number}: {steps}{self}"
            assert lines[-1]["chain"] == expected({"own": number}, search.steps), f"{number}{self}"

    def check_steps(self, name: str) -> None:
        """Check that each step of a search was executed once."""
        for number, steps in self.steps(name).items():
            wanted = list(range(1, self._searches[name].steps + 1))
            assert steps == wanted, f"{name} {number}: {steps}{self}"

    def events(self, name: str, kind: type[_E]) -> list[_E]:
        """All events of a kind in a search's journal."""
        journal = self.results / name / "journal"
        tail = self._journals.setdefault(journal, JournalTail(journal))
        return [seen.event for seen in tail.read() if isinstance(seen.event, kind)]

    def said(self) -> str:
        """The scheduler's log."""
        return (self.folder / "head" / "scheduler.log").read_text(errors="replace")

    def __str__(self) -> str:
        logs = [
            *self.folder.glob("*/logs/*.log"),
            *self.folder.glob("*/*.log"),
            *self.results.glob("*/experiment.*"),
        ]
        logs += [path for path in self.results.glob("*/*/error.txt") if path.is_file()]
        return "\n" + "\n".join(f"--- {path}\n{path.read_text()[-1500:]}" for path in logs)

    def close(self) -> None:
        """End all of it, whatever became of it."""
        if "_commands" in vars(self):
            self._commands.close()
        for machine in self._machines:
            machine.kill()


@contextmanager
def farm_service(
    folder: Path,
    *,
    password: str = "",
    head: Machine | None = None,
    settings: str = "",
    starts: bool = True,
    redis_options: Sequence[str] = (),
) -> Iterator[FarmService]:
    """A farm on this machine, with its scheduler, unless it is to be started later, and no worker.

    Args:
        settings: the text of the scheduler's file.
        redis_options: more of redis-server's command line.
    """
    redis = TcpRedis(folder, password, redis_options)
    farm = FarmService(folder, redis.url, head)
    farm.redis = redis
    try:
        if settings:
            (folder / "head" / "farm.toml").write_text(settings)
        if starts:
            farm.start_scheduler()
        yield farm
    finally:
        farm.close()
        redis.end()


def on_hosts(folder: Path, hosts: Hosts) -> FarmService:
    """A farm with separate machines for scheduler, Redis and user; starts no process."""
    server, head, laptop = hosts.add("redis"), hosts.add("head"), hosts.add("laptop")
    farm = FarmService(folder, f"redis://{server.address}:6379/0", head, laptop)
    farm.redis_host, farm.add_machine = server, hosts.add
    farm.options = ("--insecure",)  # it is off the loopback, and open
    (folder / "redis").mkdir()
    line = [str(find_redis_server()), "--bind", server.address, "--protected-mode", "no"]
    server.start([*line, "--save", ""], farm.environ("redis"), folder / "redis" / "redis.log")
    return farm
