"""The health that a node reports from its loop."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from tunemq_shared.broker import redis_keys
from tunemq_shared.health.service_health import ServiceHealth
from tunemq_workers.node.worker_health import WorkerHealth
from tunemq_workers.runtime.reactor import Reactor


class Clock:
    """A monotonic clock that a test sets."""

    def __init__(self) -> None:
        self.now = 1000.0

    def __call__(self) -> float:
        return self.now


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> Clock:
    clock = Clock()
    monkeypatch.setattr("time.monotonic", clock)
    return clock


def said(path: Path) -> str:
    """Return the state and the status in the file."""
    return path.read_text().rstrip().split(" ", 4)[4]


def test_node_is_ready_while_its_lease_was_confirmed_recently(tmp_path, clock):
    path = tmp_path / "health"
    node = WorkerHealth(ServiceHealth("worker", str(path)), Reactor())
    node.start(lambda: 2)
    assert said(path) == "waiting Redis has not confirmed the lease; trials: 2"
    node.confirmed(has_scheduler=False)  # a service manager waits for the first report
    assert said(path) == "ready no scheduler is there; trials: 2"
    node.confirmed(has_scheduler=True)
    clock.now += redis_keys.LEASE_TTL_S - 0.1
    node._say()
    assert said(path) == "ready trials: 2"
    clock.now += 0.2
    node._say()
    assert said(path) == "waiting Redis has not confirmed the lease; trials: 2"
    node.confirmed(has_scheduler=True)
    node._say()
    assert said(path) == "ready trials: 2"
    node.stopping()
    assert said(path) == "stopping trials: 2"


def test_running_loop_is_reported_and_a_loop_without_a_supervisor_is_not(tmp_path, clock):
    reactor = Reactor()
    WorkerHealth(ServiceHealth("worker"), reactor).start(lambda: 0)
    assert reactor._until_due() is None
    path = tmp_path / "health"
    WorkerHealth(ServiceHealth("worker", str(path)), reactor).start(lambda: 0)
    before = path.read_text()
    assert reactor._until_due() == 1.0
    clock.now += 1.0
    reactor._call_due()
    assert path.read_text() != before
    assert reactor._until_due() == 1.0


_AS_ANOTHER = """
import os, sys
from tunemq_shared.health.service_health import ServiceHealth
from tunemq_workers.system.trial_user import UserAccount, act_for, own_files
from tunemq_workers.node.worker_health import WorkerHealth
from tunemq_workers.runtime.reactor import Reactor

path = sys.argv[1]
health = ServiceHealth("worker", path)
node = WorkerHealth(health, Reactor())
act_for(UserAccount("trials", 1500, 1500, (1500,), "/"))
try:
    os.unlink(path)
except PermissionError:
    with own_files():
        os.unlink(path)
node.start(lambda: 0)
with own_files():
    about = os.stat(path)
    print(about.st_uid, oct(about.st_mode & 0o777))
"""


@pytest.mark.skipif(os.geteuid() != 0, reason="only root has nodes whose trials are another user's")
def test_health_file_belongs_to_the_node_if_trials_run_as_another_user(tmp_path):
    tmp_path.chmod(0o700)
    done = subprocess.run(
        [sys.executable, "-c", _AS_ANOTHER, str(tmp_path / "health")],
        capture_output=True,
        text=True,
        check=True,
    )
    assert done.stdout == "0 0o600\n"
