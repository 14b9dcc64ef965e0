"""Whether the kernel's counter shows a recent out-of-memory kill."""

from __future__ import annotations

import pytest

from tests.unit.workers.fakes import Clock
from tunemq_workers.system.oom_kills import PERIOD_S, OomKills


@pytest.fixture
def counter(tmp_path):
    file = tmp_path / "memory.events"
    file.write_text("low 0\noom 0\noom_kill 7\noom_group_kill 0\n")
    return file


def begin(*files):
    clock = Clock()
    kills = OomKills(clock, [str(file) for file in files])
    kills.start()
    return clock, kills


def test_kills_counted_before_are_ignored(counter):
    _, kills = begin(counter)
    assert not kills.is_recent()


def test_kill_is_recent_for_a_while(counter):
    clock, kills = begin(counter)
    counter.write_text("oom_kill 8\n")
    assert kills.is_recent()
    clock.advance(PERIOD_S)
    assert kills.is_recent()
    clock.advance(PERIOD_S)
    assert not kills.is_recent()


def test_first_file_that_has_the_counter_is_read(tmp_path, counter):
    without = tmp_path / "memory.oom_control"
    without.write_text("under_oom 0\n")
    _, kills = begin(tmp_path / "none", without, counter)
    counter.write_text("oom_kill 8\n")
    assert kills.is_recent()


def test_without_a_counter_no_death_is_blamed_on_memory(tmp_path):
    clock, kills = begin(tmp_path / "none")
    assert not kills.is_recent()
    assert not clock.timers


def test_this_machine_has_a_counter():
    assert OomKills(Clock())._file is not None
