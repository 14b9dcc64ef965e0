"""The journal waits while the disk is full; any other error ends the search."""

from __future__ import annotations

from collections.abc import Sequence

import pytest

from tests.unit.scheduler.scripted_loop import NODE, Loop, ScriptedExecutor
from tunemq_scheduler.experiment import experiment_loop
from tunemq_shared.base.errors import JournalError, JournalFull
from tunemq_shared.protocol import messages as m


class FullJournal:
    """A journal that is full for a number of tries and calls ``then`` at each of them."""

    def __init__(self, loop: Loop, tries: int) -> None:
        self._append, self._left = loop.journal.append, tries
        self.tries = 0
        self.then = lambda: None

    def append(self, journal_records: Sequence[m.JournalRecord]) -> None:
        self.tries += 1
        self.then()
        if self.tries <= self._left:
            raise JournalFull("the disk has no space for /j (7 bytes are free).")
        self._append(journal_records)

    def close(self) -> None:
        pass


class Clock:
    """A clock that only ``sleep`` advances, even on a slow machine."""

    def __init__(self) -> None:
        self.now = 100.0

    def monotonic(self) -> float:
        return self.now

    def sleep(self, seconds: float) -> None:
        self.now += seconds


@pytest.fixture(autouse=True)
def no_pause(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(experiment_loop, "RETRY_S", 2.0)
    clock = Clock()
    monkeypatch.setattr(experiment_loop, "time", clock)
    monkeypatch.setattr(ScriptedExecutor, "pause", clock.sleep)


def with_full_journal(tries: int) -> tuple[Loop, FullJournal]:
    loop = Loop()
    loop.loop.journal = journal = FullJournal(loop, tries)
    return loop, journal


def test_turn_on_a_full_disk_is_written_and_acted_upon_once_there_is_space() -> None:
    loop, journal = with_full_journal(3)
    log = loop.turn(NODE)
    names = ["notices", "journal", "notices", "start", "NotifyTrialAdded", "acknowledge"]
    assert [line[0] for line in log] == names
    assert log[0][1].startswith("degraded: the disk has no space for /j (7 bytes are free).")
    assert "the disk has space again after 6 s" in log[2][1]
    assert journal.tries == 4


def test_interrupted_search_does_not_wait_for_disk_space() -> None:
    loop, journal = with_full_journal(1000)
    journal.then = lambda: loop.loop.interrupt("Ctrl-C") if journal.tries == 5 else None
    with pytest.raises(JournalFull):
        loop.turn(NODE)
    assert journal.tries == 5
    assert [line[0] for line in loop.log] == ["notices"]


def test_other_disk_error_ends_the_search_at_once() -> None:
    loop = Loop()
    loop.journal.is_full = True
    with pytest.raises(JournalError, match="no space"):
        loop.turn(NODE)
    assert loop.log == []
