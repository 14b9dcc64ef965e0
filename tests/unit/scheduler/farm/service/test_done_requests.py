"""Completed requests are remembered, even if a crash truncated the file."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from tunemq_scheduler.farm.service.done_requests import DoneRequests
from tunemq_shared.base.errors import JournalError
from tunemq_shared.broker import redis_keys


class Clock:
    """A clock that a test sets."""

    seconds = 0.0

    def __call__(self) -> float:
        return self.seconds


def test_answer_is_remembered_by_the_next_process(tmp_path):
    done = DoneRequests(tmp_path / "requests")
    done.add("a", b"answer of a")
    done.add("b", b"")

    again = DoneRequests(tmp_path / "requests")

    assert again.get("a") == b"answer of a"
    assert again.get("b") == b""
    assert again.get("c") is None


def test_file_cut_at_any_byte_keeps_the_complete_records_before(tmp_path):
    path = tmp_path / "requests"
    done, ends = DoneRequests(path), []
    for number in range(4):
        done.add(f"r{number}", b"x" * number)
        ends.append(path.stat().st_size)
    whole = path.read_bytes()
    for size in range(len(whole) + 1):
        path.write_bytes(whole[:size])
        again = DoneRequests(path)
        known = [again.get(f"r{number}") is not None for number in range(4)]
        assert known == [end <= size for end in ends]
        again.add("new", b"1")
        assert DoneRequests(path).get("new") == b"1"


def test_damaged_record_ends_the_trusted_part(tmp_path):
    path = tmp_path / "requests"
    done = DoneRequests(path)
    done.add("a", b"1")
    first = path.stat().st_size
    done.add("b", b"2")
    data = bytearray(path.read_bytes())
    data[first + 11] ^= 0xFF
    path.write_bytes(data)

    again = DoneRequests(path)

    assert again.get("a") == b"1"
    assert again.get("b") is None


def test_file_is_bounded_and_keeps_the_newest(tmp_path):
    path = tmp_path / "requests"
    now = Clock()
    done = DoneRequests(path, kept=10, clock=now)
    for number in range(100):
        now.seconds += 3600
        done.add(f"r{number}", b"answer")

    again = DoneRequests(path, kept=10)

    assert path.stat().st_size < 20 * 40
    assert all(again.get(f"r{number}") == b"answer" for number in range(90, 100))
    assert again.get("r0") is None


def test_s03_no_request_is_forgotten_while_it_could_be_repeated(tmp_path, monkeypatch):
    monkeypatch.setattr(os, "fsync", lambda _: None)  # do not measure the disk's speed
    path, now = tmp_path / "requests", Clock()
    done = DoneRequests(path, kept=10, clock=now)
    void = redis_keys.REQUEST_TTL_S + redis_keys.CLOCK_TOLERANCE_S
    for number in range(200):
        now.seconds = number * void / 200
        done.add(f"r{number}", b"answer")
    assert all(done.get(f"r{number}") for number in range(200))
    again = DoneRequests(path, kept=10, clock=now)  # it does not know their ages
    for number in range(500):
        now.seconds += 0.001
        again.add(f"flood{number}", b"")
    assert all(again.get(f"r{number}") for number in range(200))
    for number in range(800):
        now.seconds += void / 20
        again.add(f"later{number}", b"")
    assert not any(again.get(f"r{number}") for number in range(200))
    assert path.stat().st_size < 100 * 40


def test_failing_disk_is_reported(tmp_path):
    done = DoneRequests(tmp_path / "missing" / "requests")
    with pytest.raises(JournalError, match="cannot be written"):
        done.add("a", b"1")
    assert done.get("a") is None
    assert not Path(tmp_path / "missing").exists()
