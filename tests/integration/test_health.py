"""How a real scheduler and a real worker report their health, and how checks find failures."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from collections.abc import Iterator, Mapping
from contextlib import closing
from pathlib import Path

import msgspec
import pytest

from tests.integration.farm_support import RedisServer, Scheduler
from tests.integration.node_fixtures import scheduler, server
from tests.support.farms.farm_processes import Command, TcpRedis
from tests.support.farms.farm_service import FarmService, Search
from tests.support.service_manager import ServiceManager, variable_of
from tests.support.waiting import descendants, eventually
from tunemq_scheduler.base.lease_holder import LeaseHolder
from tunemq_shared.broker import redis_keys

__all__ = ["scheduler", "server"]

pytestmark = pytest.mark.integration

_THEIRS = ("NOTIFY_SOCKET", "WATCHDOG_USEC", "TUNEMQ_HEALTH")


def asked(file: Path, *more: str) -> tuple[int, str]:
    """Run `tunemq health` as a container's check does; return its exit code and output."""
    done = subprocess.run(
        [sys.executable, "-m", "tunemq", "health", *more, str(file)],
        capture_output=True,
        text=True,
        check=False,
    )
    return done.returncode, done.stdout + done.stderr


def becomes(code: int, file: Path, *more: str, within: float = 60.0) -> str:
    """Wait until the check has this exit code; return its output then."""
    said: list[tuple[int, str]] = []

    def is_so() -> bool:
        said[:] = [asked(file, *more)]
        return said[0][0] == code

    eventually(is_so, within=within, every=0.1, message=lambda: f"{said} {more}")
    return said[0][1]


@pytest.fixture
def manager(tmp_path: Path) -> Iterator[ServiceManager]:
    one = ServiceManager(str(tmp_path / "notify"))
    yield one
    one.close()


class Watched(Command):
    """A worker that reports its health."""

    def __init__(
        self, server: RedisServer | TcpRedis, folder: Path, given: Mapping[str, str]
    ) -> None:
        self.file = folder / "health"
        line = ["worker", "--redis", server.url, "--name", "one", "--workdir", str(folder / "w")]
        variables = {"TUNEMQ_HEALTH": str(self.file), **given}
        super().__init__(*line, "--cpus", "1", log=folder / "worker.log", variables=variables)


@pytest.fixture
def worker(
    server: RedisServer, scheduler: Scheduler, manager: ServiceManager, tmp_path: Path
) -> Iterator[Watched]:
    worker = Watched(server, tmp_path, manager.variables)
    yield worker
    worker.kill()


def test_worker_reports_ready_while_it_serves_and_stopping_when_it_stops(worker, manager):
    assert "worker (process " in becomes(0, worker.file, "--ready")
    eventually(lambda: "READY=1" in manager.lines())
    eventually(lambda: manager.lines().count("WATCHDOG=1") >= 3)
    assert "STATUS=no scheduler is there; trials: 0" in manager.lines()
    assert "STOPPING=1" not in manager.lines()

    worker.send(signal.SIGTERM)
    assert worker.ends() == 0
    lines = manager.lines()
    assert "STOPPING=1" in lines
    assert lines.count("READY=1") < lines.count("WATCHDOG=1")  # not at every look
    assert manager.speakers() == {worker.process.pid}  # what systemd takes from its main process
    assert not worker.file.exists()


def test_hanging_worker_is_found_and_continued_worker_is_healthy(worker, manager):
    becomes(0, worker.file, "--ready")
    eventually(lambda: "READY=1" in manager.lines())
    worker.send(signal.SIGSTOP)
    said = becomes(1, worker.file, "--within", "2")
    assert "hangs, or is gone" in said
    manager.messages()
    assert asked(worker.file)[0] == 0  # not yet, by the usual measure
    assert manager.messages() == []
    worker.send(signal.SIGCONT)
    becomes(0, worker.file, "--ready", "--within", "2")


def test_killed_worker_is_found(worker):
    becomes(0, worker.file, "--ready")
    worker.kill()
    becomes(1, worker.file, "--within", "1")


@pytest.mark.slow
def test_a_worker_whose_redis_is_away_is_alive_and_not_ready(worker, server, manager):
    becomes(0, worker.file, "--ready")
    server.kill()
    said = becomes(1, worker.file, "--ready")
    assert "Redis has not confirmed the lease" in said
    assert asked(worker.file, "--within", "15")[0] == 0
    told = manager.lines().count("WATCHDOG=1")
    eventually(lambda: manager.lines().count("WATCHDOG=1") > told)
    server.start()
    becomes(0, worker.file, "--ready")


@pytest.mark.slow
def test_a_worker_whose_redis_hangs_is_alive_and_not_ready(worker, server):
    becomes(0, worker.file, "--ready")
    server.process.send_signal(signal.SIGSTOP)
    try:
        becomes(1, worker.file, "--ready")
        assert asked(worker.file, "--within", "15")[0] == 0
    finally:
        server.process.send_signal(signal.SIGCONT)
    becomes(0, worker.file, "--ready")


def test_fenced_worker_keeps_reporting_and_does_not_report_stopping(worker, manager, scheduler):
    becomes(0, worker.file, "--ready")
    eventually(scheduler.registrations)
    registration = scheduler.registrations()[0]  # the worker says so again if Redis answered late
    scheduler.reply(registration.instance_id, "f", "its trials run elsewhere")
    eventually(lambda: manager.lines().count("READY=1") >= 2)
    becomes(0, worker.file, "--ready")
    assert "STOPPING=1" not in manager.lines()
    assert manager.speakers() == {worker.process.pid}


def test_a_worker_whose_file_cannot_be_made_says_so(server, tmp_path):
    worker = Watched(server, tmp_path, {"TUNEMQ_HEALTH": "/proc/nowhere"})
    assert worker.ends() == 64
    assert "$TUNEMQ_HEALTH is /proc/nowhere, which cannot be written" in worker.said


# --- a farm ---------------------------------------------------------------------------------------


@pytest.fixture
def redis(tmp_path: Path) -> Iterator[TcpRedis]:
    redis = TcpRedis(tmp_path)
    yield redis
    redis.end()


@pytest.fixture
def farm(tmp_path: Path, redis: TcpRedis, manager: ServiceManager) -> Iterator[FarmService]:
    farm = FarmService(tmp_path, redis.url)
    file = str(tmp_path / "head" / "health")
    farm.start_scheduler(variables={"TUNEMQ_HEALTH": file, **manager.variables})
    yield farm
    farm.close()


def test_hanging_scheduler_is_found_and_stopping_scheduler_says_so(farm, manager):
    file = farm.folder / "head" / "health"
    assert "scheduler (process " in becomes(0, file, "--ready")
    eventually(lambda: "READY=1" in manager.lines())
    eventually(lambda: manager.lines().count("WATCHDOG=1") >= 2)
    farm.scheduler.send_signal(signal.SIGSTOP)
    becomes(1, file, "--within", "2")
    farm.scheduler.send_signal(signal.SIGCONT)
    becomes(0, file, "--ready", "--within", "2")
    manager.lines()  # empty its socket: the service does not wait for a full one
    farm.scheduler.terminate()
    assert farm.scheduler.wait(60) == 0
    assert "STOPPING=1" in manager.lines()
    assert manager.speakers() == {farm.scheduler.pid}
    assert not file.exists()


def test_a_scheduler_whose_redis_hangs_is_alive_and_not_ready(farm, redis):
    file = farm.folder / "head" / "health"
    becomes(0, file, "--ready")
    redis.process.send_signal(signal.SIGSTOP)
    try:
        assert "Redis is away" in becomes(1, file, "--ready")
        assert asked(file)[0] == 0
    finally:
        redis.process.send_signal(signal.SIGCONT)
    becomes(0, file, "--ready")


def test_scheduler_whose_redis_is_full_is_alive_and_not_ready_and_says_so(farm, redis):
    file = farm.folder / "head" / "health"
    becomes(0, file, "--ready")
    redis.client.config_set("maxmemory", "500000")
    assert "Redis is full; searches: 0 run" in becomes(1, file, "--ready")
    assert asked(file)[0] == 0
    redis.client.config_set("maxmemory", "0")
    becomes(0, file, "--ready")


_EXTENDS = "EXTEND_TIMEOUT_USEC=60000000"


def test_scheduler_that_starts_while_redis_is_full_is_alive_and_extends_its_start(
    tmp_path, redis, manager
):
    redis.client.config_set("maxmemory", "500000")
    file = tmp_path / "head" / "health"
    with closing(FarmService(tmp_path, redis.url)) as farm:
        farm.start_scheduler(variables={"TUNEMQ_HEALTH": str(file), **manager.variables})
        eventually(lambda: manager.lines().count(_EXTENDS) >= 3, message=lambda: str(farm))
        assert "STATUS=Redis is full; waiting for room" in manager.lines()
        assert "READY=1" not in manager.lines()
        assert "(waiting): Redis is full; waiting for room" in becomes(1, file, "--ready")
        assert asked(file, "--within", "15")[0] == 0
        redis.client.config_set("maxmemory", "0")
        becomes(0, file, "--ready")
        eventually(lambda: "READY=1" in manager.lines())
        assert manager.speakers() == {farm.scheduler.pid}


def test_scheduler_that_waits_for_the_lease_of_another_says_so(tmp_path, redis, manager):
    another = msgspec.structs.replace(LeaseHolder.this_process(), host="elsewhere", place="there")
    lease = b"1:abcd:1:" + msgspec.json.encode(another)
    redis.client.set(redis_keys.SCHEDULER, lease, px=10_000)
    with closing(FarmService(tmp_path, redis.url)) as farm:
        farm.start_scheduler(variables=manager.variables)
        eventually(lambda: "READY=1" in manager.lines(), message=lambda: str(farm))
    status = "STATUS=another scheduler had this farm; waiting until its lease runs out"
    assert manager.lines().index(status) < manager.lines().index("READY=1")


def test_worker_that_starts_while_redis_is_full_is_ready_to_join(tmp_path, redis, manager):
    redis.client.config_set("maxmemory", "500000")
    worker = Watched(redis, tmp_path, manager.variables)
    try:
        eventually(lambda: "READY=1" in manager.lines(), message=lambda: worker.said)
    finally:
        worker.kill()


_NAMES = """
import os

def names(config):
    import os
    tune.report({"names": sorted(os.environ), "score": 1})

print("names of the search:", *sorted(os.environ))
"""


def test_trials_searches_and_helpers_cannot_report_for_the_service(farm, manager):
    farm.of_home["one"] = {"TUNEMQ_HEALTH": str(farm.folder / "h1"), **manager.variables}
    worker = farm.add_worker("one", cpus=1)
    farm.has_nodes("one")
    farm.submit(Search(name="exp", trials=1, steps=1, trainable="names", code=_NAMES))
    farm.wait_for("exp", "FINISHED")

    (line,) = farm.recorded("exp")[0]
    assert "HOME" in line["names"]
    assert not set(_THEIRS) & set(line["names"])
    printed = (farm.results / "exp" / "experiment.out").read_text()
    assert "names of the search: " in printed
    assert not any(name in printed for name in _THEIRS)
    services = {worker.pid, farm.scheduler.pid}
    helpers = {pid for service in services for pid in descendants(service)}
    assert helpers
    if os.geteuid() == 0:  # others may not look into them, nor may a trial
        # In this order: one that ends meanwhile has neither.
        assert all(variable_of(pid, "PATH") or not variable_of(pid, "HOME") for pid in helpers)
        assert [variable_of(pid, name) for pid in helpers for name in _THEIRS] == [None] * (
            len(helpers) * len(_THEIRS)
        )
    # The socket holds ten: the scheduler's messages may have filled it before the worker's.
    eventually(lambda: manager.speakers() >= services)
    assert manager.speakers() == services
