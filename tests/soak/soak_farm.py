"""The farm of `make soak`: six parts, all real processes, each of which can be harmed."""

from __future__ import annotations

import inspect
import json
import os
import shutil
import signal
import subprocess
import sys
import time
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Final, Self

from tests.integration.farm_support import RedisServer
from tests.support.proxies.tcp_proxy import TcpProxy
from tests.support.searches import chain
from tests.support.stores.object_servers import MinioServer
from tests.support.waiting import eventually

_REPOSITORY: Final = Path(__file__).parents[2]

#: The search: trials at once per node, steps per trial, seconds per step.
SLOTS_A_NODE: Final = 2
STEPS: Final = 20
STEP_S: Final = 0.2
NAME: Final = "soak"
ENDED: Final = {"FINISHED", "FAILED", "STOPPED"}
#: Seconds until a component that has ended restarts, as by a service manager.
_RESTART_S: Final = 0.5
_POLL_INTERVAL_S: Final = 0.02

#: How long a trial takes on average, as a multiple of its steps alone: the trial schedulers that
#: stop trials early do so at their first rungs, and a trial that takes over a state starts again.
SHARES: Final = {"fifo": 1.0, "asha": 0.25, "hyperband": 0.45, "pbt": 1.3}

_SCRIPT: Final = """
import tunemq as tune
from work import chain

about = ABOUT
schedulers = {
    "fifo": None,
    "asha": tune.schedulers.ASHAScheduler(max_t=about["steps"], grace_period=3, reduction_factor=3),
    "hyperband": tune.schedulers.HyperBandScheduler(max_t=about["steps"], reduction_factor=3),
    "pbt": tune.schedulers.PopulationBasedTraining(
        time_attr="training_iteration",
        perturbation_interval=about["config"]["save_every"],
        hyperparam_mutations={"seed": tune.randint(0, 10**9)},
    ),
}
tuner = tune.Tuner(
    chain,
    param_space={**about["config"], "seed": tune.randint(0, 10**9)},
    tune_config=tune.TuneConfig(
        metric="score",
        mode="max",
        num_samples=about["trials"],
        seed=about["seed"],
        scheduler=schedulers[about["algorithm"]],
    ),
    run_config=tune.RunConfig(
        checkpoint_config=tune.CheckpointConfig(num_to_keep=2),
        # Nodes die by chance here, on a busy machine again before a trial got on: none is to blame.
        failure_config=tune.FailureConfig(max_failures=-1, max_node_losses=-1),
    ),
)
"""


class Part:
    """One component: its faults, and how it restarts.

    Attributes:
        name: for people.
        faults: functions that harm it, by name.
    """

    def __init__(
        self, name: str, faults: dict[str, tuple[Callable[[], None], Callable[[], None]]]
    ) -> None:
        self.name = name
        self.faults = list(faults)
        self._faults = faults
        self._back: Callable[[], None] | None = None
        self._back_at = 0.0

    @property
    def is_away(self) -> bool:
        """Whether it was harmed and is not back."""
        return self._back is not None

    def harm(self, what: str, away_s: float) -> None:
        """Harm it; `look` brings it back."""
        begin, self._back = self._faults[what]
        begin()
        self._back_at = time.monotonic() + away_s

    def look(self, *, now: bool = False) -> None:
        """Bring it back if its time has come, or ``now``."""
        if self._back is not None and (now or time.monotonic() >= self._back_at):
            back, self._back = self._back, None
            back()


class Program:
    """A process of a farm that is started again whenever it ends by itself.

    Attributes:
        ends: how often it ended by itself, by exit status.
    """

    def __init__(self, command: list[str], environ: dict[str, str], log: Path) -> None:
        self._command, self._environ, self.log = command, environ, log
        self.process: subprocess.Popen[bytes] | None = None
        self.ends: Counter[int] = Counter()
        self._start_at = 0.0
        self._is_wanted = False

    def start(self) -> None:
        """Have it run."""
        self._is_wanted = True
        with self.log.open("ab") as log:
            self.process = subprocess.Popen(
                self._command,
                env=self._environ,
                cwd=self.log.parent,
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=log,
                start_new_session=True,
            )

    def look(self) -> int | None:
        """Start it again if it ended; its exit status, once, if it has."""
        if not self._is_wanted:
            return None
        if self.process is None:
            if time.monotonic() >= self._start_at:
                self.start()
            return None
        status = self.process.poll()
        if status is not None:
            self.ends[status] += 1
            self.process = None
            self._start_at = time.monotonic() + _RESTART_S
        return status

    def kill(self) -> None:
        """SIGKILL; it stays away until `start`."""
        self._is_wanted = False
        if self.process is not None:
            self.process.kill()
            self.process.wait()
            self.process = None

    def stop(self) -> None:
        """SIGSTOP."""
        if self.process is not None:
            self.process.send_signal(signal.SIGSTOP)

    def resume(self) -> None:
        """SIGCONT."""
        if self.process is not None:
            self.process.send_signal(signal.SIGCONT)

    def end(self, within: float) -> None:
        """Have it end in good order."""
        self._is_wanted = False
        if self.process is None:
            return
        self.process.send_signal(signal.SIGCONT)
        self.process.terminate()
        try:
            self.process.wait(within)
        except subprocess.TimeoutExpired:
            self.process.kill()
            self.process.wait()
            raise AssertionError(f"{self._command} did not end within {within:g} s") from None
        finally:
            self.process = None


class SoakFarm:
    """Redis, MinIO, three workers and a scheduler, to which a search is submitted.

    Args:
        algorithm: one of `SHARES`.
        least_s: how long the search takes undisturbed, at least.
    """

    def __init__(self, folder: Path, *, algorithm: str, least_s: float, nodes: int = 3) -> None:
        self.folder = folder
        self.algorithm = algorithm
        slots = nodes * SLOTS_A_NODE
        trial_s = STEPS * STEP_S
        share = SHARES[algorithm]
        self.trials = max(2 * slots, round(least_s * slots / (trial_s * share)))
        self.undisturbed_s = self.trials * trial_s * share / slots
        self.redis = RedisServer(_made(folder / "redis"), "--appendonly", "yes")
        self.minio = MinioServer(_made(folder / "minio"))
        self.to_store = TcpProxy(("127.0.0.1", self.minio.port))
        self.bucket = ""
        self.to_scheduler = TcpProxy(self.redis.path)
        self.to_nodes = [TcpProxy(self.redis.path) for _ in range(nodes)]
        self.results = _made(folder / "results")
        self.executed = _made(folder / "executed")
        self.harmed: Counter[str] = Counter()
        self.is_searching = False
        self.scheduler: Program
        self.workers: list[Program] = []
        self.parts: list[Part] = []

    @property
    def experiment(self) -> Path:
        """The experiment's folder."""
        return self.results / NAME

    @property
    def script(self) -> Path:
        """The script that is submitted, in a folder with nothing else of the farm."""
        return self.folder / "submitted" / "search.py"

    @property
    def state(self) -> str:
        """Of the search, as the scheduler's queue has it on the disk."""
        queued = self.results / ".farm" / "experiments" / f"{NAME}.json"
        return str(json.loads(queued.read_bytes())["state"])

    @property
    def environ(self) -> dict[str, str]:
        """The variables of all its processes."""
        return {
            **os.environ,
            **self.minio.environ,
            "TUNEMQ_S3_ENDPOINT": self.to_store.url.replace("redis://", "http://").rstrip("/0"),
            "TUNEMQ_RESULTS": str(self.results),
        }

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    # --- its life ---------------------------------------------------------------------------------

    def start(self) -> None:
        """Start everything; returns when the search runs."""
        self.minio.start()
        self.bucket = self.minio.create_bucket()
        endpoint = f"http://127.0.0.1:{self.to_store.port}"
        store = f"s3://{self.bucket}/kept?endpoint={endpoint}&region=us-east-1"
        about = {
            "algorithm": self.algorithm,
            "seed": 7,
            "steps": STEPS,
            "trials": self.trials,
            "config": self.config,
        }
        self.script.parent.mkdir()
        self.script.with_name("work.py").write_text(inspect.getsource(chain))
        self.script.write_text(_SCRIPT.replace("ABOUT", repr(about)))
        environ = {**self.environ, "TUNEMQ_S3_ENDPOINT": endpoint}
        tunemq = [sys.executable, "-m", "tunemq"]
        for number, proxy in enumerate(self.to_nodes):
            workdir = self.folder / f"node{number}"
            command = [
                *(*tunemq, "worker", "--redis", proxy.url, "--name", f"node{number}"),
                *("--workdir", str(workdir), "--cpus", str(SLOTS_A_NODE)),
            ]
            self.workers.append(Program(command, environ, self.folder / f"node{number}.log"))
        self.scheduler = Program(
            [
                *(*tunemq, "scheduler", "--redis", self.to_scheduler.url),
                *("--results", str(self.results), "--store", store),
            ],
            environ,
            self.folder / "scheduler.log",
        )
        self.parts = self._parts()
        for program in (*self.workers, self.scheduler):
            program.start()
        eventually(
            lambda: "Serving the farm on" in self.scheduler.log.read_text(), message=self.story
        )
        submit = [*tunemq, "submit", "--redis", self.to_scheduler.url, "--name", NAME, "--detach"]
        subprocess.run([*submit, str(self.script)], env=environ, check=True, timeout=120)
        self.is_searching = True
        deadline = time.monotonic() + 60
        while not any(self.executed.iterdir()):
            assert time.monotonic() < deadline, self.story()
            self.look()

    @property
    def config(self) -> dict[str, object]:
        """The settings of every trial's configuration except its seed."""
        return {
            "executed": str(self.executed),
            "steps": STEPS,
            "save_every": 5,
            "payload": 20_000,
            "step_s": STEP_S,
        }

    def look(self) -> None:
        """Restart the components that are due, and those that ended by themselves."""
        for part in self.parts:
            part.look()
        for worker in self.workers:
            worker.look()
        self.scheduler.look()
        self.is_searching = self.is_searching and self.state not in ENDED
        time.sleep(_POLL_INTERVAL_S)  # faults come at random or by the clock

    def live_until(self, moment: float) -> None:
        """Let it live until ``moment`` of the monotonic clock, or the end of its search."""
        while time.monotonic() < moment and self.is_searching:
            self.look()

    def harm(self, part: Part, what: str, away_s: float) -> None:
        """Harm a part, for so long."""
        part.harm(what, away_s)
        self.harmed[f"{part.name.rstrip('0123456789')}-{what}"] += 1

    def heal(self) -> None:
        """Bring everything back."""
        for part in self.parts:
            part.look(now=True)

    def wait_for_the_end(self, within: float) -> float:
        """Wait until the search ends; return the seconds since its script was written."""
        begun = self._begun()
        while self.is_searching:
            assert time.monotonic() - begun < within, f"no end after {within:.0f} s {self.story()}"
            self.look()
        return time.monotonic() - begun

    def _begun(self) -> float:
        age = time.time() - self.script.stat().st_mtime
        return time.monotonic() - age

    def files_of_workers(self) -> list[Path]:
        """The files in the workers' folders except logs, and files of trials on killed nodes.

        The next node there keeps the latter for some days: they may be in no store.
        """
        files = [
            Path(at, name)
            for number in range(len(self.workers))
            for at, _folders, names in os.walk(self.folder / f"node{number}")
            for name in names
            if "/trials/unsent-" not in at
        ]
        return [file for file in files if ".log" not in file.suffixes]

    def end(self) -> None:
        """End workers and scheduler in order; keep Redis and MinIO for inspection.

        With its next lease each worker learns that the search has ended, and deletes its files.
        """
        deadline = time.monotonic() + 60
        while any(file.name != "lock" for file in self.files_of_workers()):
            if time.monotonic() > deadline:
                break  # the check of files names them
            self.look()
        for program in (*self.workers, self.scheduler):
            program.end(within=20)

    def close(self) -> None:
        """End all of it, however it is."""
        for part in self.parts:
            part.look(now=True)
        for program in (*self.workers, self.scheduler) if self.parts else ():
            program.kill()
        for proxy in (self.to_store, self.to_scheduler, *self.to_nodes):
            proxy.close()
        self.redis.end()
        self.minio.kill()

    def story(self) -> str:
        """The ends of its logs, for messages."""
        logs = [self.scheduler.log, *(worker.log for worker in self.workers)]
        return "".join(f"\n--- {log.name}\n{_tail(log)}" for log in logs if log.exists())

    # --- its parts --------------------------------------------------------------------------------

    def _parts(self) -> list[Part]:
        scheduler = self.scheduler
        parts = [
            Part(
                "scheduler",
                {
                    "kill": (scheduler.kill, self._start_scheduler),
                    "stop": (scheduler.stop, scheduler.resume),
                    "cut": (self.to_scheduler.hold, self.to_scheduler.heal),
                },
            ),
            Part(
                "redis",
                {
                    "kill": (self.redis.kill, self.redis.start),
                    "stop": (self._stop_redis, self._continue_redis),
                    "wipe": (self._wipe_redis, self.redis.start),
                    "cut": (self._cut_redis, self._heal_redis),
                },
            ),
            Part(
                "minio",
                {
                    "kill": (self.minio.kill, self.minio.start),
                    "stop": (self.minio.freeze, self.minio.thaw),
                    "cut": (self.to_store.hold, self.to_store.heal),
                },
            ),
        ]
        for number, (worker, proxy) in enumerate(zip(self.workers, self.to_nodes, strict=True)):
            workdir = self.folder / f"node{number}"

            def wipe(worker: Program = worker, workdir: Path = workdir) -> None:
                worker.kill()
                shutil.rmtree(workdir, ignore_errors=True)

            parts.append(
                Part(
                    f"node{number}",
                    {
                        "kill": (worker.kill, worker.start),
                        "stop": (worker.stop, worker.resume),
                        "wipe": (wipe, worker.start),
                        "cut": (proxy.hold, proxy.heal),
                    },
                )
            )
        return parts

    def _start_scheduler(self) -> None:
        if self.is_searching:
            self.scheduler.start()

    def _wipe_redis(self) -> None:
        self.redis.kill()
        for name in ("appendonlydir", "dump.rdb"):
            path = self.folder / "redis" / name
            shutil.rmtree(path, ignore_errors=True)
            path.unlink(missing_ok=True)

    def _stop_redis(self) -> None:
        assert self.redis.process is not None
        self.redis.process.send_signal(signal.SIGSTOP)

    def _continue_redis(self) -> None:
        assert self.redis.process is not None
        self.redis.process.send_signal(signal.SIGCONT)

    def _cut_redis(self) -> None:
        for proxy in (self.to_scheduler, *self.to_nodes):
            proxy.cut(stay=True)

    def _heal_redis(self) -> None:
        for proxy in (self.to_scheduler, *self.to_nodes):
            proxy.heal()


def _made(folder: Path) -> Path:
    folder.mkdir(parents=True)
    return folder


def _tail(log: Path) -> str:
    return log.read_bytes()[-3000:].decode(errors="replace")
