"""Messages to a service manager through a socket like systemd's."""

from __future__ import annotations

import os
import uuid
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.support.service_manager import ServiceManager
from tunemq_shared.health.service_health import ServiceHealth
from tunemq_shared.health.systemd_notify import SystemdNotifier, watchdog_s


@pytest.fixture(params=["path", "abstract"])
def manager(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[ServiceManager]:
    is_path = request.param == "path"
    one = ServiceManager(str(tmp_path / "notify") if is_path else f"@tunemq-{uuid.uuid4()}")
    yield one
    one.close()


@pytest.fixture
def notifier(manager: ServiceManager) -> Iterator[SystemdNotifier]:
    one = SystemdNotifier(manager.address)
    yield one
    one.close()


def test_ready_is_sent_once_and_the_status_when_it_changes(manager, notifier):
    health = ServiceHealth("worker", notifier=notifier)
    for is_ready, status in ((False, "a"), (True, "a"), (True, "a"), (False, "b"), (True, "b")):
        health.beat(is_ready=is_ready, status=status)
    assert manager.messages() == ["STATUS=a\nEXTEND_TIMEOUT_USEC=60000000", "READY=1", "STATUS=b"]


def test_stopping_is_sent_once(manager, notifier):
    health = ServiceHealth("worker", notifier=notifier)
    health.stopping()
    health.stopping()
    assert manager.messages() == ["STOPPING=1"]


def test_service_that_stops_before_it_was_ready_does_not_send_ready(manager, notifier):
    health = ServiceHealth("worker", notifier=notifier)
    health.stopping()
    health.beat(is_ready=True, status="stopping")
    assert manager.messages() == ["STOPPING=1", "STATUS=stopping"]


def test_status_is_one_line_whatever_its_text(manager, notifier):
    health = ServiceHealth("worker", notifier=notifier)
    health.beat(is_ready=False, status="a\nMAINPID=1\n b")
    assert manager.lines()[0] == "STATUS=a MAINPID=1 b"


def test_watchdog_is_notified_a_few_times_per_period(manager, notifier, monkeypatch):
    now = 1000.0
    monkeypatch.setattr("time.monotonic", lambda: now)
    health = ServiceHealth("worker", notifier=notifier, watchdog_s=20.0)
    told = []
    for _ in range(21):
        health.beat(is_ready=True, status="")
        told += [now for message in manager.messages() if "WATCHDOG=1" in message.split("\n")]
        now += 1.0
    assert told == [1000.0, 1005.0, 1010.0, 1015.0, 1020.0]


def test_status_that_changes_often_does_not_keep_the_watchdog_from_its_messages(
    manager, notifier, monkeypatch
):
    now = 1000.0
    monkeypatch.setattr("time.monotonic", lambda: now)
    health = ServiceHealth("worker", notifier=notifier, watchdog_s=20.0)
    told_at = now
    for trials in range(60):
        health.beat(is_ready=True, status=f"trials: {trials}")
        if any("WATCHDOG=1" in message for message in manager.messages()):
            told_at = now
        assert now - told_at <= 5.0
        now += 1.0


def test_service_that_waits_for_its_start_extends_the_timeout_until_it_is_ready_or_stops(
    manager, notifier, monkeypatch
):
    now = 1000.0
    monkeypatch.setattr("time.monotonic", lambda: now)
    health = ServiceHealth("scheduler", notifier=notifier, watchdog_s=60.0)
    for _ in range(31):
        health.beat(is_ready=False, status="Redis is full")
        now += 1.0
    assert manager.lines().count("EXTEND_TIMEOUT_USEC=60000000") == 3
    health.beat(is_ready=True, status="")
    now += 60.0
    health.beat(is_ready=False, status="Redis is away")
    assert manager.lines().count("EXTEND_TIMEOUT_USEC=60000000") == 3
    other = ServiceHealth("scheduler", notifier=notifier)
    other.stopping()
    other.beat(is_ready=False, status="ending")
    assert manager.lines().count("EXTEND_TIMEOUT_USEC=60000000") == 3


def test_restarted_manager_gets_later_messages(manager, notifier):
    manager.close()
    assert not notifier.tell("STATUS=no manager reads it")
    manager.listen()
    assert notifier.tell("STATUS=back")
    assert manager.messages() == ["STATUS=back"]


def test_undelivered_message_is_sent_again(manager, notifier):
    health = ServiceHealth("worker", notifier=notifier)
    manager.close()
    health.beat(is_ready=True, status="here")
    manager.listen()
    health.beat(is_ready=True, status="here")
    assert manager.messages() == ["READY=1\nSTATUS=here"]


def test_manager_that_does_not_read_blocks_no_service(manager, notifier):
    said = 0
    while notifier.tell(f"STATUS={'x' * 1000}"):
        said += 1
        assert said < 10_000, "the socket is never full"
    manager.messages()
    assert notifier.tell("STATUS=after")


@pytest.mark.parametrize(
    "address", ["", "@", "vsock:2:9999", "relative", "/nowhere/at/all", "/" + "x" * 300, "@a\0b"]
)
def test_invalid_address_does_no_harm(address):
    notifier = SystemdNotifier(address)
    assert not notifier.tell("READY=1")
    notifier.close()


@pytest.mark.parametrize(
    ("variables", "wanted"),
    [
        ({}, None),
        ({"WATCHDOG_USEC": "60000000"}, 60.0),
        ({"WATCHDOG_USEC": "60000000", "WATCHDOG_PID": str(os.getpid())}, 60.0),
        ({"WATCHDOG_USEC": "60000000", "WATCHDOG_PID": "1"}, None),
        ({"WATCHDOG_USEC": "0"}, None),
        ({"WATCHDOG_USEC": "soon"}, None),
        ({"WATCHDOG_USEC": "²"}, None),
    ],
)
def test_watchdog_belongs_to_this_process_or_to_none(variables, wanted):
    assert watchdog_s(variables) == wanted
