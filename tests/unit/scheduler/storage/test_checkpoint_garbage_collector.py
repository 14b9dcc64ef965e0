"""Expired checkpoints are deleted beside the loop, with retries until they are gone."""

from __future__ import annotations

import threading
import time
from types import SimpleNamespace
from typing import Any

import pytest

from tests.support.waiting import eventually
from tunemq_scheduler.core.commands import DeleteCheckpoint, DeleteObjects
from tunemq_scheduler.storage import checkpoint_garbage_collector as module
from tunemq_scheduler.storage.checkpoint_garbage_collector import CheckpointGarbageCollector
from tunemq_shared.base.errors import RunSuperseded, StoreError


class WaitingStore:
    """Deletes when the test allows it; some deletions may always fail."""

    def __init__(self) -> None:
        self.removed: list[Any] = []
        self.rejected: list[Any] = []
        self.is_away = False
        self.never: set[str] = set()
        self.may_continue = threading.Event()
        self.may_continue.set()

    def delete_checkpoint(self, key: str, keep: tuple[str, ...] = ()) -> None:
        self._remove((key, keep), key)

    def delete_objects(self, keys: tuple[str, ...]) -> None:
        self._remove(keys, keys[0])

    def _remove(self, what: Any, name: str) -> None:
        assert self.may_continue.wait(60)
        if self.is_away or name in self.never:
            self.rejected.append(what)
            raise StoreError("the store is away.")
        self.removed.append(what)


@pytest.fixture
def store() -> WaitingStore:
    return WaitingStore()


@pytest.fixture
def collector(store, monkeypatch):
    monkeypatch.setattr(module, "FIRST_PAUSE_S", 0.01)
    collector = CheckpointGarbageCollector(store)
    yield collector
    store.may_continue.set()
    collector.finish(0.0)


def condemned(n: int, keep: tuple[str, ...] = ()) -> DeleteCheckpoint:
    return DeleteCheckpoint("t0", f"t0/checkpoint_1-{n:06d}", keep)


@pytest.mark.parity(111)
def test_deletions_run_in_order_in_the_background(collector, store):
    store.may_continue.clear()
    before = time.monotonic()
    collector.discard(condemned(1, keep=("abc",)))
    collector.discard(DeleteObjects(("t0/checkpoint_1-000001/abc",)))
    assert time.monotonic() - before < 30  # the store takes longer
    assert store.removed == []
    store.may_continue.set()
    assert collector.finish(60) == []
    assert store.removed == [
        ("t0/checkpoint_1-000001", ("abc",)),
        ("t0/checkpoint_1-000001/abc",),
    ]
    assert collector.notices() == []


def test_failed_deletion_is_reported_once_and_retried_until_it_succeeds(collector, store):
    store.is_away = True
    collector.discard(condemned(1))
    collector.discard(condemned(2))
    eventually(lambda: len(store.rejected) > 3)
    (told,) = collector.notices()
    assert "the store is away" in told
    store.is_away = False
    assert collector.finish(60) == []
    assert sorted(key for key, _ in store.removed) == [
        "t0/checkpoint_1-000001",
        "t0/checkpoint_1-000002",
    ]
    assert collector.notices() == []


def test_deletion_that_always_fails_does_not_block_the_others(collector, store):
    store.never = {"t0/checkpoint_1-000001"}
    collector.discard(condemned(1))
    collector.discard(condemned(2))
    eventually(lambda: store.removed == [("t0/checkpoint_1-000002", ())])
    rejections = len(store.rejected)
    eventually(lambda: len(store.rejected) > rejections)  # the first has left the list, too
    assert collector.finish(0.0) == ["t0/checkpoint_1-000001"]


def test_finish_waits_no_longer_than_its_limit_and_names_the_rest(store, monkeypatch):
    monkeypatch.setattr(module, "FIRST_PAUSE_S", 60.0)
    collector = CheckpointGarbageCollector(store)
    store.is_away = True
    collector.discard(condemned(1))
    collector.discard(DeleteObjects(("t0/checkpoint_1-000000/abc",)))
    eventually(lambda: store.rejected)
    began = time.monotonic()
    left = collector.finish(0.2)
    assert 0.2 <= time.monotonic() - began < 30  # its next retry would be later
    assert sorted(left) == ["t0/checkpoint_1-000000/abc", "t0/checkpoint_1-000001"]


def test_finish_waits_for_a_slow_store_while_it_makes_progress(monkeypatch):
    clock = SimpleNamespace(now=0.0, monotonic=lambda: clock.now)
    monkeypatch.setattr(module, "time", clock)
    looks = threading.Semaphore(0)

    class SlowStore(WaitingStore):
        def _remove(self, what: Any, name: str) -> None:
            assert looks.acquire(timeout=60)
            super()._remove(what, name)
            clock.now += 0.75

    def is_enough() -> bool:
        looks.release()  # one more for each check during the wait for the end
        return False

    store = SlowStore()
    collector = CheckpointGarbageCollector(store)
    for n in range(12):
        collector.discard(condemned(n))
    assert collector.finish(60, is_enough, without_success=1.0) == []
    assert clock.now == 12 * 0.75
    assert len(store.removed) == 12


def test_finish_does_not_wait_for_a_store_that_deletes_nothing(collector, store):
    store.is_away = True
    collector.discard(condemned(1))
    began = time.monotonic()
    assert collector.finish(60, without_success=0.2) == ["t0/checkpoint_1-000001"]
    assert time.monotonic() - began < 30


def test_finish_retries_waiting_deletions_at_once(store, monkeypatch):
    monkeypatch.setattr(module, "FIRST_PAUSE_S", 60.0)
    collector = CheckpointGarbageCollector(store)
    store.is_away = True
    collector.discard(condemned(1))
    eventually(lambda: store.rejected)
    store.is_away = False
    began = time.monotonic()
    assert collector.finish(50) == []
    assert time.monotonic() - began < 30


def test_finish_ends_when_the_user_interrupts_it(collector, store):
    store.is_away = True
    collector.discard(condemned(1))
    assert collector.finish(60, is_enough=lambda: True) == ["t0/checkpoint_1-000001"]


def test_search_that_keeps_all_checkpoints_starts_no_thread(store):
    before = set(threading.enumerate())  # some of them may just be ending
    collector = CheckpointGarbageCollector(store)
    assert collector.finish(1) == []
    assert collector._thread is None
    assert set(threading.enumerate()) <= before


def test_superseded_run_deletes_nothing_and_leaves_nothing_to_do(store):
    def check() -> None:
        raise RunSuperseded

    collector = CheckpointGarbageCollector(store, check)
    for n in range(3):
        collector.discard(condemned(n))
    assert collector.finish(60.0) == []
    assert store.removed == []
