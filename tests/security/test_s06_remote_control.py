"""S06: Celery's remote control, with which any client of the broker commands workers, is off."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from pathlib import Path

import psutil
import pytest
from celery import Celery

from tests.integration.farm_support import process_tree_of
from tests.support.farms.farm_service import FarmService, Search, farm_service
from tests.support.waiting import eventually
from tunemq_scheduler.security.redis_probes import REMOTE_CONTROL, probe

pytestmark = [pytest.mark.integration, pytest.mark.security]

#: Commands that every Celery worker knows, and their arguments.
_COMMANDS = {
    "shutdown": {},
    "pool_restart": {"reload": True},
    "pool_shrink": {"n": 1},
    "revoke": {"task_id": "x", "terminate": True, "signal": "SIGKILL"},
    "cancel_consumer": {"queue": "x"},
    "rate_limit": {"task_name": "tunemq.run_steps", "rate_limit": "1/h"},
    "time_limit": {"task_name": "tunemq.run_steps", "hard": 1},
}


@pytest.fixture
def farm(tmp_path: Path) -> Iterator[FarmService]:
    with farm_service(tmp_path) as farm:  # its Redis gives all rights to every client
        yield farm


@pytest.fixture
def attacker(farm: FarmService) -> Iterator[Celery]:
    with Celery(broker=farm.url, set_as_current=False) as app:
        yield app


def test_s06_celery_broadcast_does_nothing_to_a_farm(farm: FarmService, attacker: Celery):
    farm.add_worker("one")
    farm.has_nodes("one")
    farm.submit(Search(name="first", steps=20, has_gate=True))
    farm.open_gate("first", 5)
    farm.wait_for_steps("first", 2, 5)
    consumers = _consumers(farm)
    assert len(consumers) == 1
    assert attacker.control.ping(timeout=1.0) == []  # no process answers
    queue = f"consumer@{_instance_id(farm)}"
    for command, arguments in _COMMANDS.items():
        attacker.control.broadcast(command, arguments=arguments)
        attacker.control.broadcast(command, arguments=arguments, destination=[queue])
    farm.open_gate("first", 20)
    farm.wait_for("first", "FINISHED")
    farm.check_results("first")
    farm.check_steps("first")
    assert _consumers(farm) == consumers
    (finding,) = (one for one in probe(farm.url) if one.check == REMOTE_CONTROL)
    assert not finding.fix, finding


def test_s06_plain_celery_worker_is_ended_by_the_same_broadcast(
    farm: FarmService, attacker: Celery, tmp_path: Path
):
    (tmp_path / "others.py").write_text(
        f"from celery import Celery\napp = Celery(broker={farm.url!r})\n"
    )
    line = [sys.executable, "-m", "celery", "-A", "others", "worker", "--pool=solo", "-n", "me@it"]
    log = tmp_path / "celery.log"
    process = farm.head.start(line, {**farm.environ("head"), "PYTHONPATH": str(tmp_path)}, log)
    eventually(lambda: attacker.control.ping(timeout=1.0), within=60, message=log.read_text)
    (finding,) = (one for one in probe(farm.url) if one.check == REMOTE_CONTROL)
    assert finding.fix
    assert "me@it" in finding.what
    attacker.control.broadcast("shutdown")
    assert process.wait(60) == 0


def _consumers(farm: FarmService) -> list[int]:
    """The processes of Celery's workers."""
    pids = process_tree_of(farm.workers["one"].pid)
    return [pid for pid in pids if _name(pid) == "tunemq-consumer"]


def _name(pid: int) -> str:
    """The name of a process; empty if it has just ended with its trial."""
    try:
        return psutil.Process(pid).name()
    except psutil.NoSuchProcess:
        return ""


def _instance_id(farm: FarmService) -> str:
    return farm.nodes()["one"].instance_id
