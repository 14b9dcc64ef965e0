"""The consumer process with a real Redis and Celery's own publisher."""

from __future__ import annotations

import os
import signal
import socket
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.integration.farm_support import RedisServer, children_of, is_alive
from tests.integration.node_fixtures import scheduler, server
from tests.support.waiting import eventually
from tunemq_shared.broker import redis_keys
from tunemq_workers.broker.consumer_launcher import (
    COMMAND,
    READY,
    REJECTED,
    fork_consumer,
    start_forkserver,
)
from tunemq_workers.broker.node_signing import NodeSigning
from tunemq_workers.processes.child_process import ChildProcess
from tunemq_workers.runtime.frames import FrameDecoder
from tunemq_workers.trials.assignment_filter import AssignmentFilter

__all__ = ["scheduler", "server"]

pytestmark = pytest.mark.integration


class ForkedConsumer:
    """A consumer, and the frames that it sends."""

    def __init__(self, forkserver: ChildProcess):
        self.forkserver, self.sock = forkserver, None
        self.is_forked_again()

    def is_forked_again(self):
        """Fork a new consumer in place of the old one."""
        if self.sock is not None:
            self.sock.close()
        self.sock = fork_consumer(self.forkserver)
        self.sock.settimeout(60)
        self.decoder = FrameDecoder()
        self.frames = []

    @property
    def pid(self):
        (pid,) = children_of(self.forkserver.pid)
        return pid

    def next(self):
        while not self.frames:
            data = self.sock.recv(2**16)
            if not data:
                raise EOFError
            self.frames += self.decoder.feed(data)
        return self.frames.pop(0)

    def ended(self):
        return not is_alive(self.pid)

    def close(self):
        self.sock.close()
        self.forkserver.sock.close()
        os.waitpid(self.forkserver.pid, 0)


@pytest.fixture
def consumer(server: RedisServer, tmp_path: Path) -> Iterator[ForkedConsumer]:
    consumer = ForkedConsumer(start_forkserver(server.url, "inc", str(tmp_path / "consumer.log")))
    assert consumer.next() == (READY, b"")
    yield consumer
    consumer.close()


def test_consumer_passes_on_messages_unread_and_in_order(consumer, scheduler):
    versions = [scheduler.assign("inc") for _ in range(20)]
    box = AssignmentFilter("inc", NodeSigning("inc"))
    for version in versions:
        kind, send_assignment = consumer.next()
        assert kind == COMMAND
        assert box.open(send_assignment).version == version


def test_consumer_receives_messages_sent_before_it_started(server, scheduler, tmp_path):
    scheduler.assign("early")
    consumer = ForkedConsumer(start_forkserver(server.url, "early", str(tmp_path / "consumer.log")))
    try:
        assert [consumer.next()[0], consumer.next()[0]] == [READY, COMMAND]
    finally:
        consumer.close()


def test_a_consumer_leaves_nothing_in_redis(consumer, scheduler):
    before = set(scheduler.client.keys())
    scheduler.assign("inc")
    assert consumer.next()[0] == COMMAND
    eventually(lambda: set(scheduler.client.keys()) == before)


def test_consumer_rejects_foreign_task_and_continues(consumer, scheduler):
    before = consumer.pid
    scheduler.client.lpush(redis_keys.queue("inc"), '{"body": "", "headers": {}, "properties": {}}')
    scheduler.client.lpush(redis_keys.queue("inc"), "nonsense")
    scheduler.assign("inc")
    assert [consumer.next(), consumer.next()] == 2 * [(REJECTED, b"unreadable")]
    assert consumer.next()[0] == COMMAND
    assert consumer.pid == before


def test_a_consumer_ends_when_redis_does(consumer, server):
    server.kill()
    eventually(consumer.ended)
    server.start()


def test_a_consumer_ends_when_its_connection_is_cut(consumer, server):
    eventually(lambda: server.client.info("clients")["blocked_clients"])
    server.client.execute_command("CLIENT", "KILL", "TYPE", "normal", "SKIPME", "yes")
    eventually(consumer.ended)


def test_a_consumer_ends_when_its_node_closes_the_socket(consumer):
    consumer.sock.close()
    eventually(consumer.ended)


@pytest.mark.parametrize("how", [signal.SIGKILL, signal.SIGSTOP])
def test_dead_or_hanging_consumer_is_replaced(consumer, scheduler, how):
    before = consumer.pid
    os.kill(before, how)
    consumer.is_forked_again()
    assert consumer.next() == (READY, b"")
    assert not is_alive(before)
    assert consumer.pid != before
    scheduler.assign("inc")
    assert consumer.next()[0] == COMMAND


def test_forked_consumer_imports_nothing_more(server):
    code = f"""
import socket, sys
from celery import signals
from tunemq_workers.broker import celery_consumer as consumer
imported = set(sys.modules)
def tell(**_):
    theirs = {{"celery", "kombu", "redis", "billiard", "vine", "amqp"}}
    late = [name for name in set(sys.modules) - imported if name.partition(".")[0] in theirs]
    print(sorted(late), flush=True)
    sys.exit()
signals.worker_ready.connect(tell)
node, ours = socket.socketpair()
consumer._listen({server.url!r}, "inc", ours)
"""
    ended = subprocess.run([sys.executable, "-c", code], timeout=60, check=False, stdout=-1)
    assert ended.stdout == b"[]\n"


def test_a_consumer_dies_with_its_node(server, tmp_path):
    node = f"""
import time
from tunemq_workers.broker.consumer_launcher import fork_consumer, start_forkserver
from tunemq_shared.system.processes import children_of
forkserver = start_forkserver({server.url!r}, "inc", {str(tmp_path / "consumer.log")!r})
consumer = fork_consumer(forkserver)  # without this end of it, it has no node
consumer.recv(100)
print(*children_of(forkserver.pid), flush=True)
time.sleep(600)
"""
    process = subprocess.Popen([sys.executable, "-c", node], stdout=subprocess.PIPE, text=True)
    assert process.stdout is not None
    with process.stdout:
        pid = int(process.stdout.readline())
    was_alive = is_alive(pid)
    process.kill()
    process.wait()
    assert was_alive
    eventually(lambda: not is_alive(pid))


def test_a_consumer_whose_event_loop_has_no_socket_ends():
    ours, theirs = socket.socketpair()
    hung = f"""
import socket
from types import SimpleNamespace
from tunemq_workers.broker import celery_consumer
hub, consumer = SimpleNamespace(readers={{}}), SimpleNamespace(restart_count=1)
worker = SimpleNamespace(hub=hub, consumer=consumer)
celery_consumer._watch(socket.socket(fileno={theirs.fileno()}), worker)
"""
    with ours, theirs:
        command = [sys.executable, "-c", hung]
        ended = subprocess.run(command, pass_fds=[theirs.fileno()], timeout=60, check=False)
    assert ended.returncode == 70


def test_a_users_own_celery_settings_do_not_reach_the_consumer(server, tmp_path, monkeypatch):
    monkeypatch.setenv("CELERY_BROKER_URL", "redis://somewhere.invalid:1/0")
    monkeypatch.setenv("CELERY_CONFIG_MODULE", "no_such_module")
    monkeypatch.setenv("DJANGO_SETTINGS_MODULE", "no_such_settings")
    consumer = ForkedConsumer(start_forkserver(server.url, "inc", str(tmp_path / "consumer.log")))
    try:
        assert consumer.next() == (READY, b"")
    finally:
        consumer.close()
