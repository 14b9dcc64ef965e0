"""`tunemq worker` as a process: the options that it rejects, its output, and its end."""

from __future__ import annotations

import contextlib
import os
import shutil
import signal
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.integration.farm_support import (
    RedisServer,
    Scheduler,
    command_line,
    is_alive,
    order,
    process_tree_of,
)
from tests.integration.node_fixtures import scheduler, server
from tests.support.farms.farm_processes import Command, TcpRedis
from tests.support.farms.farm_service import Here, farm_service
from tests.support.waiting import eventually
from tunemq_shared.broker import redis_keys
from tunemq_shared.protocol.messages import (
    ResultReported,
    SlotFreed,
    TrialFailed,
    TrialPaused,
    TrialProcessDied,
)

__all__ = ["scheduler", "server"]

pytestmark = pytest.mark.integration


def without_end(config):
    import time

    from tunemq_shared.trial.session import report

    while True:
        report({"loss": 0.5})
        time.sleep(0.01)


def hung(config):
    import time

    from tunemq_shared.trial.session import report

    report({"loss": 0.5})
    while True:
        time.sleep(600)


class Worker(Command):
    def __init__(self, server: RedisServer, folder: Path, *more: str, name: str = "one") -> None:
        self.workdir = folder / f"workdir-{name}"
        line = ["worker", "--redis", server.url, "--name", name, "--workdir", str(self.workdir)]
        super().__init__(*line, "--cpus", "2", *more, log=folder / f"{name}.log")

    def instance_id(self, scheduler: Scheduler, after: str = "") -> str:
        found: list[str] = []

        def is_registered() -> bool:
            found[:] = [
                registration.instance_id
                for registration in scheduler.registrations()
                if registration.pid == self.process.pid and registration.instance_id != after
            ]
            return bool(found)

        eventually(is_registered, message=lambda: f"no registration\n{self.said}")
        return found[-1]


@pytest.fixture
def worker(server: RedisServer, scheduler: Scheduler, tmp_path: Path) -> Iterator[Worker]:
    # Half of the grace period passes; then the trial is paused, and has the other half to save.
    worker = Worker(server, tmp_path, "--grace", "10")
    yield worker
    worker.kill()


@pytest.fixture
def command(tmp_path: Path) -> Iterator[object]:
    running: list[Command] = []

    def start(*arguments: str) -> Command:
        running.append(Command("worker", *arguments, log=tmp_path / f"{len(running)}.log"))
        return running[-1]

    yield start
    for one in running:
        one.kill()


def test_a_worker_without_an_address_says_how_to_give_it(command):
    rejected = command("--name", "one")
    assert rejected.ends() == 64
    assert "--redis redis://host:6379/0" in rejected.said


def test_worker_with_an_invalid_address_shows_a_valid_example(command):
    rejected = command("--redis", "http://somewhere")
    assert rejected.ends() == 64
    assert "redis://user:password@host:6379/0" in rejected.said


def test_worker_waits_for_a_missing_redis_with_a_notice(command, tmp_path):
    waiting = command("--redis", "redis://127.0.0.1:1/0", "--workdir", str(tmp_path / "w"))
    waiting.says("127.0.0.1:1 cannot be reached")
    waiting.send(signal.SIGINT)
    assert waiting.ends() == 130


def test_s07_worker_with_default_store_keys_does_not_start(tmp_path):
    redis = TcpRedis(tmp_path)
    variables = {"AWS_ACCESS_KEY_ID": "minioadmin", "AWS_SECRET_ACCESS_KEY": "minioadmin"}
    line = ("worker", "--redis", redis.url, "--workdir", str(tmp_path / "w"))
    rejected = Command(*line, log=tmp_path / "refused.log", variables=variables)
    insecure = Command(*line, "--insecure", log=tmp_path / "insecure.log", variables=variables)
    try:
        assert rejected.ends() == 64
        assert "which are public" in rejected.said
        assert "deploy/minio" in rejected.said
        insecure.says("It offers")
        assert "which are public" in insecure.said
    finally:
        rejected.kill()
        insecure.kill()
        redis.end()


def test_worker_rejected_by_redis_says_so_at_once(command, tmp_path):
    redis = TcpRedis(tmp_path, password="right")
    try:
        url = redis.url.replace("right", "wrong")
        rejected = command("--redis", url, "--workdir", str(tmp_path / "w"))
        assert rejected.ends() == 69
        assert "WRONGPASS" in rejected.said
        assert "wrong@" not in rejected.said
        bare = command("--redis", url.replace(":wrong@", ""), "--workdir", str(tmp_path / "w"))
        assert bare.ends() == 69
        assert "NOAUTH" in bare.said
    finally:
        redis.end()


def test_two_workers_do_not_share_a_working_folder(worker, server, scheduler, tmp_path):
    worker.instance_id(scheduler)
    second = Worker(server, tmp_path)
    assert second.ends() == 64
    assert f"process {worker.process.pid}" in second.said
    assert "--name" in second.said


def test_worker_whose_workdir_is_removed_ends_and_names_the_folder(worker, scheduler):
    worker.instance_id(scheduler)
    shutil.rmtree(worker.workdir)
    assert worker.ends() == 70
    assert f"its --workdir {worker.workdir} was removed" in worker.said


def test_ctrl_c_ends_an_idle_worker_at_once_and_deregisters(worker, scheduler):
    instance_id = worker.instance_id(scheduler)
    process_tree = process_tree_of(worker.process.pid)
    worker.send(signal.SIGINT)
    assert worker.ends() == 0
    assert scheduler.deregistrations() == [instance_id]
    assert scheduler.lease(instance_id) == []
    assert "Ended" in worker.said
    assert ("Trials run as root" in worker.said) == (os.geteuid() == 0)
    eventually(lambda: not any(map(is_alive, process_tree)))


def test_trials_of_a_stopping_worker_save_and_exit(worker, scheduler):
    instance_id = worker.instance_id(scheduler)
    scheduler.assign(instance_id, order("t1", scheduler.start(without_end)))
    eventually(lambda: scheduler.said(ResultReported))
    worker.says("Trial t1 runs")
    worker.send(signal.SIGTERM)
    eventually(lambda: scheduler.said(SlotFreed))
    assert [type(one) for one in scheduler.events()[-2:]] == [TrialPaused, SlotFreed]
    scheduler.journal(instance_id, len(scheduler.events()))
    assert worker.ends() == 0
    worker.says("Trial t1 has left")
    assert scheduler.deregistrations() == [instance_id]


def test_trial_that_outlives_the_grace_period_is_killed_and_not_blamed(server, scheduler, tmp_path):
    worker = Worker(server, tmp_path, "--grace", "0.5")
    try:
        instance_id = worker.instance_id(scheduler)
        scheduler.assign(instance_id, order("t1", scheduler.start(hung)))
        eventually(lambda: scheduler.said(ResultReported))
        scheduler.journal(instance_id, 2)
        worker.send(signal.SIGTERM)
        assert worker.ends() == 0
        for kind in (TrialFailed, TrialProcessDied, SlotFreed):
            assert not scheduler.said(kind)
        assert scheduler.deregistrations() == [instance_id]
    finally:
        worker.kill()


def test_a_password_in_the_environment_is_in_no_list_of_processes(tmp_path):
    redis = TcpRedis(tmp_path, password="s3cret")
    line = ["worker", "--workdir", str(tmp_path / "w"), "--cpus", "1"]
    worker = Command(*line, log=tmp_path / "log", variables={"TUNEMQ_REDIS": redis.url})

    def command_lines() -> list[bytes]:
        return [command_line(pid) for pid in process_tree_of(worker.process.pid)]

    try:
        eventually(
            lambda: any(b"tunemq_workers.broker.celery_consumer" in one for one in command_lines())
        )
        assert not any(b"s3cret" in one for one in command_lines())
        redis.client.set(redis_keys.GENERATION, "g")
        eventually(lambda: redis.client.xlen(redis_keys.NODES), message=lambda: worker.said)
    finally:
        worker.kill()
        redis.end()


def test_a_second_ctrl_c_ends_a_worker_at_once(server, scheduler, tmp_path):
    worker = Worker(server, tmp_path, "--grace", "600")
    instance_id = worker.instance_id(scheduler)
    scheduler.assign(instance_id, order("t1", scheduler.start(hung)))
    eventually(lambda: scheduler.said(ResultReported))
    process_tree = process_tree_of(worker.process.pid)
    worker.send(signal.SIGINT)
    worker.says("Stopping (SIGINT)")
    time.sleep(1.0)  # one that follows within half a second counts as the first
    worker.send(signal.SIGINT)
    try:
        assert worker.ends() == 0
    finally:
        worker.kill()
    eventually(lambda: not any(map(is_alive, process_tree)))


def test_two_signals_at_once_leave_trials_the_grace(server, scheduler, tmp_path):
    worker = Worker(server, tmp_path, "--grace", "1")
    try:
        instance_id = worker.instance_id(scheduler)
        scheduler.assign(instance_id, order("t1", scheduler.start(hung)))
        eventually(lambda: scheduler.said(ResultReported))
        for number in (signal.SIGSTOP, signal.SIGTERM, signal.SIGINT, signal.SIGCONT):
            worker.send(number)
        assert worker.ends() == 0
        assert scheduler.deregistrations() == [instance_id]
    finally:
        worker.kill()


def test_fenced_worker_starts_again_in_the_same_process(worker, scheduler):
    first = worker.instance_id(scheduler)
    scheduler.reply(first, "f", "its trials run elsewhere")
    second = worker.instance_id(scheduler, after=first)
    assert second != first
    assert worker.process.poll() is None
    worker.says("its trials run elsewhere")
    eventually(
        lambda: all(map(is_alive, process_tree_of(worker.process.pid))),
        message="what the first one left was not waited for",
    )


def test_worker_whose_name_was_taken_over_ends(worker, scheduler):
    instance_id = worker.instance_id(scheduler)
    scheduler.reply(instance_id, "f", redis_keys.STARTED_AGAIN)
    assert worker.ends() == 76
    assert redis_keys.STARTED_AGAIN in worker.said


def test_worker_with_a_blocked_terminal_continues(server, scheduler, tmp_path):
    """Its terminal is a full pipe without a reader."""
    reader, writer = os.pipe()
    os.set_blocking(writer, False)
    try:
        with contextlib.suppress(BlockingIOError):
            while True:
                os.write(writer, bytes(65536))
        os.set_blocking(writer, True)
        (tmp_path / "one.log").symlink_to(f"/proc/{os.getpid()}/fd/{writer}")
        worker = Worker(server, tmp_path)
        instance_id = worker.instance_id(scheduler)
        scheduler.assign(instance_id, order("t1", scheduler.start(without_end)))
        eventually(lambda: scheduler.said(ResultReported))
        worker.send(signal.SIGTERM)
        eventually(lambda: scheduler.said(SlotFreed))
        scheduler.journal(instance_id, len(scheduler.events()))
        assert worker.ends() == 0
    finally:
        os.close(reader)
        os.close(writer)
        worker.kill()


def test_second_worker_with_the_same_cache_is_refused(tmp_path: Path):
    """It would remove the checkpoints that the first has not uploaded yet."""
    cache = str(tmp_path / "cache")
    with farm_service(tmp_path) as farm:
        farm.add_worker("one", 2, "--cache", cache, machine=Here())
        farm.has_nodes("one")
        second = farm.add_worker("two", 2, "--cache", cache, machine=Here())
        assert second.wait(60) == 64
        said = (tmp_path / "two" / "worker.log").read_text()
        assert f"another worker uses --cache {cache}, and would lose checkpoints there" in said
        farm.workers["one"].kill()
        farm.workers["one"].wait()
        farm.add_worker("three", 2, "--cache", cache, machine=Here())
        farm.has_nodes("three")
