"""What is kept no longer is removed beside the loop, again and again until it is gone."""

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
from tunemq_shared.base.errors import StoreError


class PatientStore:
    """Carries out removals when it is let; some may fail for ever."""

    def __init__(self) -> None:
        self.removed: list[Any] = []
        self.refused: list[Any] = []
        self.is_away = False
        self.never: set[str] = set()
        self.may_go_on = threading.Event()
        self.may_go_on.set()

    def delete_checkpoint(self, key: str, keep: tuple[str, ...] = ()) -> None:
        self._remove((key, keep), key)

    def delete_objects(self, keys: tuple[str, ...]) -> None:
        self._remove(keys, keys[0])

    def _remove(self, what: Any, name: str) -> None:
        assert self.may_go_on.wait(60)
        if self.is_away or name in self.never:
            self.refused.append(what)
            raise StoreError("the store is away.")
        self.removed.append(what)


@pytest.fixture
def store() -> PatientStore:
    return PatientStore()


@pytest.fixture
def keeper(store):
    keeper = CheckpointGarbageCollector(store, first_pause_s=0.01)
    yield keeper
    store.may_go_on.set()
    keeper.finish(0.0)


def condemned(n: int, keep: tuple[str, ...] = ()) -> DeleteCheckpoint:
    return DeleteCheckpoint("t0", f"t0/checkpoint_1-{n:06d}", keep)


@pytest.mark.parity(111)
def test_removals_are_carried_out_in_their_order_without_keeping_anybody_waiting(keeper, store):
    store.may_go_on.clear()
    before = time.monotonic()
    keeper.discard(condemned(1, keep=("abc",)))
    keeper.discard(DeleteObjects(("t0/checkpoint_1-000001/abc",)))
    assert time.monotonic() - before < 30  # the store takes longer
    assert store.removed == []
    store.may_go_on.set()
    assert keeper.finish(60) == []
    assert store.removed == [
        ("t0/checkpoint_1-000001", ("abc",)),
        ("t0/checkpoint_1-000001/abc",),
    ]
    assert keeper.news() == []


def test_what_fails_is_told_once_and_tried_again_until_it_is_done(keeper, store):
    store.is_away = True
    keeper.discard(condemned(1))
    keeper.discard(condemned(2))
    eventually(lambda: len(store.refused) > 3)
    (told,) = keeper.news()
    assert "the store is away" in told
    store.is_away = False
    assert keeper.finish(60) == []
    assert sorted(key for key, _ in store.removed) == [
        "t0/checkpoint_1-000001",
        "t0/checkpoint_1-000002",
    ]
    assert keeper.news() == []


def test_one_that_can_never_be_removed_keeps_no_other_waiting(keeper, store):
    store.never = {"t0/checkpoint_1-000001"}
    keeper.discard(condemned(1))
    keeper.discard(condemned(2))
    eventually(lambda: store.removed == [("t0/checkpoint_1-000002", ())])
    refusals = len(store.refused)
    eventually(lambda: len(store.refused) > refusals)  # behind it: now it is off the list, too
    assert keeper.finish(0.0) == ["t0/checkpoint_1-000001"]


def test_the_end_waits_no_longer_than_it_may_and_says_what_is_left(store):
    keeper = CheckpointGarbageCollector(store, first_pause_s=60.0)
    store.is_away = True
    keeper.discard(condemned(1))
    keeper.discard(DeleteObjects(("t0/checkpoint_1-000000/abc",)))
    eventually(lambda: store.refused)
    began = time.monotonic()
    left = keeper.finish(0.2)
    assert 0.2 <= time.monotonic() - began < 30  # its next try would be later
    assert sorted(left) == ["t0/checkpoint_1-000000/abc", "t0/checkpoint_1-000001"]


def test_the_end_waits_for_a_slow_store_as_long_as_that_gets_on(monkeypatch):
    clock = SimpleNamespace(now=0.0, monotonic=lambda: clock.now)
    monkeypatch.setattr(module, "time", clock)
    looks = threading.Semaphore(0)

    class SlowStore(PatientStore):
        def _remove(self, what: Any, name: str) -> None:
            assert looks.acquire(timeout=60)
            super()._remove(what, name)
            clock.now += 0.75

    def is_enough() -> bool:
        looks.release()  # one more for each look of whoever waits for the end
        return False

    store = SlowStore()
    keeper = CheckpointGarbageCollector(store)
    for n in range(12):
        keeper.discard(condemned(n))
    assert keeper.finish(60, is_enough, without_success=1.0) == []
    assert clock.now == 12 * 0.75
    assert len(store.removed) == 12


def test_the_end_does_not_wait_for_a_store_that_removes_nothing(keeper, store):
    store.is_away = True
    keeper.discard(condemned(1))
    began = time.monotonic()
    assert keeper.finish(60, without_success=0.2) == ["t0/checkpoint_1-000001"]
    assert time.monotonic() - began < 30


def test_the_end_tries_at_once_what_waited_for_its_next_try(store):
    keeper = CheckpointGarbageCollector(store, first_pause_s=60.0)
    store.is_away = True
    keeper.discard(condemned(1))
    eventually(lambda: store.refused)
    store.is_away = False
    began = time.monotonic()
    assert keeper.finish(50) == []
    assert time.monotonic() - began < 30


def test_whoever_has_no_patience_is_let_go(keeper, store):
    store.is_away = True
    keeper.discard(condemned(1))
    assert keeper.finish(60, is_enough=lambda: True) == ["t0/checkpoint_1-000001"]


def test_a_search_that_keeps_everything_has_no_thread(store):
    before = set(threading.enumerate())  # of which some may just be ending
    keeper = CheckpointGarbageCollector(store)
    assert keeper.finish(1) == []
    assert keeper._thread is None
    assert set(threading.enumerate()) <= before
