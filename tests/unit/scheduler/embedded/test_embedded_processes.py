"""How the watchdog kills processes, and how long it waits for their end."""

from __future__ import annotations

import itertools
import signal
from types import SimpleNamespace

import pytest

from tunemq_scheduler.embedded import bound_processes

PARENT, ORPHAN = 11, 12
WITHIN_S = 0.8


@pytest.fixture
def killed(monkeypatch: pytest.MonkeyPatch) -> list[tuple[int, int]]:
    """Record the killed processes instead of killing them."""
    killed: list[tuple[int, int]] = []
    kernel = SimpleNamespace(
        kill=lambda pid, number: killed.append((pid, number)), getpid=lambda: 1
    )
    monkeypatch.setattr(bound_processes, "os", kernel)
    return killed


def looks_are_apart(monkeypatch: pytest.MonkeyPatch, seconds: float) -> None:
    ticks = itertools.count(0.0, seconds)
    clock = SimpleNamespace(monotonic=lambda: next(ticks), sleep=lambda _seconds: None)
    monkeypatch.setattr(bound_processes, "time", clock)


def test_watchdog_on_a_stalled_machine_does_not_give_up(monkeypatch, killed):
    looks_are_apart(monkeypatch, 3.0)
    # The parent has not been scheduled to die yet; its children become ours only afterwards.
    there = iter([{PARENT}, {PARENT}, {ORPHAN}, {ORPHAN}])
    ended = iter([[], [(PARENT, 9)], [], [(ORPHAN, 9)]])
    monkeypatch.setattr(bound_processes, "children_of", lambda _: next(there, set()))
    monkeypatch.setattr(bound_processes, "reap", lambda: next(ended, []))

    told: list[int] = []
    bound_processes.kill_children((), WITHIN_S, lambda pid, _status: told.append(pid))

    assert told == [PARENT, ORPHAN]
    assert (ORPHAN, signal.SIGKILL) in killed


def test_watchdog_gives_up_an_unkillable_process_in_time(monkeypatch, killed):
    looks_are_apart(monkeypatch, 0.01)
    monkeypatch.setattr(bound_processes, "children_of", lambda _: {PARENT})
    monkeypatch.setattr(bound_processes, "reap", list)

    bound_processes.kill_children((), WITHIN_S)

    assert len(killed) == pytest.approx(WITHIN_S / 0.01, abs=2)
