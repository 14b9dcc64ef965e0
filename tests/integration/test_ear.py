"""The ear as a process, with a real Redis and Celery's own publisher."""

from __future__ import annotations

import os
import signal
import socket
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.integration.farm_support import RedisServer, is_alive
from tests.integration.node_fixtures import scheduler, server
from tests.support import eventually
from tunemq_shared import wire
from tunemq_workers.child_process import ChildProcess
from tunemq_workers.ear_process import MAIL, READY, start_ear
from tunemq_workers.frames import FrameDecoder
from tunemq_workers.mail import Mailbox

__all__ = ["scheduler", "server"]

pytestmark = pytest.mark.integration


class Ear:
    """An ear, and what it sends."""

    def __init__(self, process: ChildProcess):
        self.pid, self.sock = process
        self.sock.settimeout(10)
        self.decoder = FrameDecoder()
        self.frames = []
        self.exit_code = None

    def next(self):
        while not self.frames:
            data = self.sock.recv(2**16)
            if not data:
                raise EOFError
            self.frames += self.decoder.feed(data)
        return self.frames.pop(0)

    def ended(self):
        if self.exit_code is None:
            pid, status = os.waitpid(self.pid, os.WNOHANG)
            self.exit_code = os.waitstatus_to_exitcode(status) if pid else None
        return self.exit_code is not None

    def close(self):
        self.sock.close()
        if not self.ended():
            os.kill(self.pid, signal.SIGKILL)
            os.waitpid(self.pid, 0)


@pytest.fixture
def ear(server: RedisServer, tmp_path: Path) -> Iterator[Ear]:
    ear = Ear(start_ear(server.url, "inc", str(tmp_path / "ear.log")))
    assert ear.next() == (READY, b"")
    yield ear
    ear.close()


def test_an_ear_hands_on_mail_unread_and_in_order(ear, scheduler):
    versions = [scheduler.assign("inc") for _ in range(20)]
    box = Mailbox("inc")
    for version in versions:
        kind, mail = ear.next()
        assert kind == MAIL
        assert box.open(mail).version == version


def test_mail_that_came_before_the_ear_is_heard(server, scheduler, tmp_path):
    scheduler.assign("early")
    ear = Ear(start_ear(server.url, "early", str(tmp_path / "ear.log")))
    try:
        assert [ear.next()[0], ear.next()[0]] == [READY, MAIL]
    finally:
        ear.close()


def test_an_ear_leaves_nothing_in_redis(ear, scheduler):
    before = set(scheduler.client.keys())
    scheduler.assign("inc")
    assert ear.next()[0] == MAIL
    assert set(scheduler.client.keys()) == before


def test_what_is_no_task_of_ours_is_dropped(ear, scheduler):
    scheduler.client.lpush(wire.queue("inc"), '{"body": "", "headers": {}, "properties": {}}')
    scheduler.client.lpush(wire.queue("inc"), "nonsense")
    # An ear that cannot go on after nonsense ends, and its node starts another.
    scheduler.assign("inc")
    try:
        assert ear.next()[0] == MAIL
    except (EOFError, ConnectionResetError):
        eventually(ear.ended)


def test_an_ear_ends_when_redis_does(ear, server):
    server.kill()
    eventually(ear.ended, within=2)
    server.start()


def test_an_ear_ends_when_its_connection_is_cut(ear, server):
    eventually(lambda: server.client.info("clients")["blocked_clients"])
    server.client.execute_command("CLIENT", "KILL", "TYPE", "normal", "SKIPME", "yes")
    eventually(ear.ended, within=2)


def test_an_ear_ends_when_its_node_closes_the_socket(ear):
    ear.sock.close()
    eventually(ear.ended, within=2)
    assert ear.exit_code == 0


def test_an_ear_dies_with_its_node(server, tmp_path):
    node = f"""
import time
from tunemq_workers.ear_process import start_ear
ear = start_ear({server.url!r}, "inc", {str(tmp_path / "ear.log")!r})
ear.sock.recv(100)
print(ear.pid, flush=True)
time.sleep(60)
"""
    process = subprocess.Popen([sys.executable, "-c", node], stdout=subprocess.PIPE, text=True)
    assert process.stdout is not None
    with process.stdout:
        pid = int(process.stdout.readline())
    assert is_alive(pid)
    process.kill()
    process.wait()
    eventually(lambda: not is_alive(pid), within=2)


def test_an_ear_whose_event_loop_has_no_socket_ends():
    ours, theirs = socket.socketpair()
    deaf = f"""
import socket
from types import SimpleNamespace
from tunemq_workers import ear
hub, consumer = SimpleNamespace(readers={{}}), SimpleNamespace(restart_count=1)
worker = SimpleNamespace(hub=hub, consumer=consumer)
ear._watch(socket.socket(fileno={theirs.fileno()}), worker)
"""
    with ours, theirs:
        command = [sys.executable, "-c", deaf]
        ended = subprocess.run(command, pass_fds=[theirs.fileno()], timeout=20, check=False)
    assert ended.returncode == 70


def test_a_users_own_celery_settings_do_not_reach_the_ear(server, tmp_path, monkeypatch):
    monkeypatch.setenv("CELERY_BROKER_URL", "redis://somewhere.invalid:1/0")
    monkeypatch.setenv("CELERY_CONFIG_MODULE", "no_such_module")
    monkeypatch.setenv("DJANGO_SETTINGS_MODULE", "no_such_settings")
    ear = Ear(start_ear(server.url, "inc", str(tmp_path / "ear.log")))
    try:
        assert ear.next() == (READY, b"")
    finally:
        ear.close()
