"""A farm's API on a real Redis, with fake experiments and nodes."""

from __future__ import annotations

import threading
import time
from collections.abc import Iterator
from concurrent.futures import Future
from contextlib import contextmanager, suppress
from pathlib import Path

import redis

from tunemq_scheduler.api import farm_answer_types as a
from tunemq_scheduler.api.farm_answer_types import ExperimentState as State
from tunemq_scheduler.farm.common.unknown_names import unknown_name
from tunemq_scheduler.farm.monitoring.farm_announcement import announcing, described
from tunemq_scheduler.farm.service.deferred_answer import DeferredAnswer
from tunemq_scheduler.farm.service.done_requests import DoneRequests
from tunemq_scheduler.farm.service.experiment_queue import ExperimentQueue
from tunemq_scheduler.farm.service.farm_api import FarmApi
from tunemq_scheduler.farm.service.queue_entry import QueueEntry
from tunemq_scheduler.farm.service.request_server import RequestServer
from tunemq_shared.base.errors import RedisUnavailable
from tunemq_shared.broker import redis_keys
from tunemq_shared.protocol.farm_requests import ScriptCode
from tunemq_shared.protocol.node_orders import BlobRef
from tunemq_shared.signing.live_keys import LiveKeys

CODE = ScriptCode(bundle=BlobRef("0" * 64, 1, ""), script="train.py")


class FakeExperimentControl:
    """Experiments that run because a test says so; records the calls."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.running: set[str] = set()
        self.told: list[tuple[str, ...]] = []
        self.trials = ("aaaaa_00000", "aaaaa_00001")
        #: Answers to `show` that are still owed.
        self.owed: list[DeferredAnswer[a.ExperimentDetail]] = []
        self.answers_later = False
        #: The place in the store of which `remove_files` tells.
        self.stored_at = ""

    def has(self, name: str) -> bool:
        return name in self.running

    def counts(self, entry: QueueEntry) -> tuple[dict[str, int], int | None]:
        return ({"RUNNING": 2, "TERMINATED": 1}, 8) if self.has(entry.name) else ({}, None)

    def detail(self, name: str, trials: int, row: a.ExperimentRow):
        if not self.has(name):
            return a.ExperimentDetail(experiment=row)
        if self.answers_later:
            self.owed.append(DeferredAnswer())
            return self.owed[-1]
        return detail(name, self.trials[:trials])

    def stop(self, name: str, reason: str) -> None:
        self.told.append(("stop", name, reason))

    def stop_again(self, name: str) -> str:
        self.told.append(("stop_again", name))
        return "its process is killed in 3 s unless it ends"

    def places(self) -> str:
        return ""

    def pause(self, name: str, reason: str) -> None:
        self.told.append(("pause", name, reason))

    def resume(self, name: str) -> None:
        self.told.append(("resume", name))

    def stop_trial(self, name: str, trial: str, reason: str) -> a.RequestDone:
        self._check(trial)
        self.told.append(("stop_trial", name, trial, reason))
        return a.RequestDone(text=f"{trial} is being stopped")

    def retry(self, name: str, trial: str) -> a.RequestDone:
        self.told.append(("retry", name, trial))
        return a.RequestDone(text="continues")

    def why(self, name: str, trial: str) -> a.Explanation:
        if trial:
            self._check(trial)
        return a.Explanation(lines=(f"{trial or name} waits: no node has 1 gpu free",))

    def explain_ended(self, name: str, trial: str) -> None:
        """As of an experiment without a journal."""

    def log(self, name: str, trial: str) -> Path | None:
        if trial:
            self._check(trial)
        return self.folder / (f"{name}-{trial}.log" if trial else f"{name}.log")

    def trouble(self, name: str) -> str:
        return ""

    def store_troubles(self) -> tuple[a.StoreTroubleRow, ...]:
        return ()

    def forget(self, name: str) -> None:
        self.told.append(("forget", name))

    def remove_files(self, name: str) -> Future[str]:
        self.told.append(("remove_files", name))
        done: Future[str] = Future()
        done.set_result(self.stored_at)
        return done

    def _check(self, trial: str) -> None:
        if trial not in self.trials:
            raise unknown_name("trial", trial, self.trials)


def detail(name: str, trials: tuple[str, ...]) -> a.ExperimentDetail:
    """A fake answer of an experiment's process."""
    rows = tuple(
        a.TrialRow(
            trial=trial,
            name=f"train_{trial}",
            status="RUNNING",
            step=3,
            metric=0.5,
            config={"x": 1},
        )
        for trial in trials
    )
    of_nobody = a.ExperimentRow(
        name=name, id="", owner="", priority=0, state=State.RUNNING, submitted=0
    )
    return a.ExperimentDetail(
        experiment=of_nobody, metric="loss", mode="min", best=rows[0] if rows else None, trials=rows
    )


class FakeNodeControl:
    """Two fake nodes; records the calls."""

    def __init__(self) -> None:
        self.trouble_lines: list[str] = []
        self.told: list[tuple[str, ...]] = []

    def troubles(self) -> Iterator[str]:
        yield from self.trouble_lines

    def rows(self) -> tuple[a.NodeRow, ...]:
        gpu = a.GpuRow(uuid="GPU-1", model="H100", memory=80 * 2**30, used=0.5)
        return (
            a.NodeRow(
                node="alpha",
                instance_id="alpha-1",
                state="ready",
                total={"cpu": 8, "gpu": 1, "memory": 2**34},
                used={"cpu": 3, "gpu": 0.5},
                gpus=(gpu,),
                trials=2,
                version="0.1",
                since=time.time() - 60,
            ),
            a.NodeRow(
                node="beta",
                instance_id="beta-1",
                state="draining",
                health="1 of 3 GPUs set aside",
                total={"cpu": 4},
                gpus=(
                    a.GpuRow(uuid="GPU-2", model="T4", withheld="XID 79"),
                    a.GpuRow(uuid="GPU-3", model="T4", foreign="process 12 (python) holds 1 GiB"),
                    a.GpuRow(uuid="MIG-4", model="H100 MIG 1g.10gb"),
                ),
            ),
        )

    def rejected(self) -> tuple[a.RejectionRow, ...]:
        return (a.RejectionRow(kind="registration", reason="unsigned", times=2),)

    def asked(self) -> tuple[str, ...]:
        return ("beta", "delta")

    def drain(self, attempt: str, reason: str) -> str:
        self.told.append(("drain", attempt, reason))
        return f"{attempt} is drained"

    def resume(self, attempt: str) -> str:
        self.told.append(("resume", attempt))
        return f"{attempt} is used again"

    def retire(self, attempt: str, reason: str) -> str:
        self.told.append(("retire", attempt, reason))
        return f"{attempt} is retired"


class ServedApi:
    """A farm API that answers the requests of one Redis in a thread, as a scheduler does."""

    def __init__(self, url: str, folder: Path, term: int = 7, keys: LiveKeys | None = None) -> None:
        self.url, self.folder, self.term = url, folder, term
        self.keys = keys or LiveKeys.none()
        #: Rejected messages: kind, reason, and the notice about them.
        self.rejected: list[tuple[str, str, str]] = []
        self.queue = ExperimentQueue(folder / ".farm" / "experiments")
        self.experiments, self.nodes = FakeExperimentControl(folder), FakeNodeControl()
        farm = described(str(folder / "store"), "a test", str(folder))
        self.farm_api = FarmApi(self.queue, self.experiments, self.nodes, folder, farm)
        self.server = RequestServer(
            url,
            self.farm_api,
            DoneRequests(folder / ".farm" / "requests"),
            lambda: term,
            self.keys,
            lambda *rejected: self.rejected.append(rejected),
        )
        self.turns = 0
        #: Guards the objects that the thread works with.
        self.lock = threading.Lock()
        self._is_closed = False
        self.error: BaseException | None = None
        self._thread = threading.Thread(target=self._run, daemon=True)

    def announce(self, client: redis.Redis) -> None:
        """Take the lease, and announce the farm to submitters."""
        client.set(redis_keys.TERM, self.term)
        client.set(redis_keys.SCHEDULER, f"{self.term}:token:0:{{}}")
        client.execute_command(*announcing(self.term))

    def run(self, name: str) -> None:
        """Have a queued experiment run."""
        with self.lock:
            self.queue.move(name, State.RUNNING)
            self.experiments.running.add(name)

    def end(self, name: str, state: State, reason: str = "") -> None:
        """Have an experiment be over."""
        with self.lock:
            self.experiments.running.discard(name)
            self.queue.move(name, state, reason)

    def _run(self) -> None:
        try:
            while not self._is_closed:
                with self.lock, suppress(RedisUnavailable):
                    self.keys.look()
                    self.server.turn()
                self.turns += 1
                time.sleep(0.002)  # a supervisor waits for its sockets
        except BaseException as error:  # noqa: BLE001  looked at by `close`
            self.error = error

    def __enter__(self):
        self._thread.start()
        return self

    def __exit__(self, *_exception: object) -> None:
        self._is_closed = True
        self._thread.join(30)
        self.server.close()
        if self.error is not None:
            raise self.error


@contextmanager
def served(
    url: str, client: redis.Redis, folder: Path, term: int = 7, keys: LiveKeys | None = None
) -> Iterator[ServedApi]:
    """Serve and announce a farm API."""
    with ServedApi(url, folder, term, keys) as api:
        api.announce(client)
        yield api
