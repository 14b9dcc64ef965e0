"""Cleanup of the store at the end of a search."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import msgspec
import pytest

from tests.support.searches.plans import PLAN
from tunemq_scheduler.experiment.final_cleanup import SHORT_TIMEOUT_S, TIMEOUT_S, settle_store
from tunemq_shared.base.errors import RunSuperseded, StoreError
from tunemq_shared.base.retrying import CancelToken


class End:
    """The parts of a search that determine how it ended."""

    def __init__(self, cache: Path, **changes: Any) -> None:
        state = {
            "interrupted": "",
            "uploading": 0,
            "is_finished": True,
            "stale": 0,
            "live_checkpoints": lambda: {"t/checkpoint_1-1": "0" * 64},
            "is_busy": lambda _key: False,
        }
        address = "s3://bucket/x?endpoint=http://host:9000"
        plan = msgspec.structs.replace(PLAN, store=address, cache=str(cache))
        self.runner = SimpleNamespace(**{**state, **changes})
        self.loop = SimpleNamespace(
            runner=self.runner, plan=plan, has_leftovers=True, is_all_journalled=True
        )
        self.left: list[str] = []
        self.told: list[str] = []
        self.done: list[Any] = []
        self.error: StoreError | None = None
        self.is_enough = self.has_much_to_do = self.is_superseded = False

    def finish(self, within: float, is_enough: Any, *, without_success: float) -> list[str]:
        self.within = min(within, without_success), within
        self.done.append("removals")
        return self.left

    def notices(self) -> list[str]:
        return []

    def collect(self, live: Any, is_busy: Any, cancel: CancelToken) -> None:
        self.done.append(("collect", live))
        while self.has_much_to_do:
            self.is_enough = True
            cancel.check()
        if self.error is not None:
            raise self.error

    def check(self, _cancel: CancelToken) -> None:
        if self.is_superseded:
            raise RunSuperseded("another run has the store.")

    def close(self) -> None:
        self.done.append("close")

    def settle(self) -> list[Any]:
        loop, both = self.loop, self
        settle_store(loop, both, both, self.told.append, lambda: self.is_enough, self.check)  # type: ignore[arg-type]
        return self.done


COLLECTED = ("collect", {"t/checkpoint_1-1": "0" * 64})


@pytest.fixture
def cache(tmp_path):
    folder = tmp_path / ".cache"
    folder.mkdir()
    return folder


def test_cleanup_after_a_failure_collects_leftovers_after_the_deletions(cache):
    end = End(cache)
    assert end.settle() == ["removals", COLLECTED, "close"]
    assert end.told == []
    assert not cache.exists()


def test_end_of_a_superseded_run_collects_nothing_and_says_so(cache):
    end = End(cache)
    end.is_superseded = True
    assert end.settle() == ["removals", "close"]
    assert end.told == ["another run has the store."]


def test_cleanup_without_a_failure_does_not_search_the_store(cache):
    end = End(cache)
    end.loop.has_leftovers = False
    assert end.settle() == ["removals", "close"]


def test_cleanup_waits_for_a_slow_store_unless_the_search_was_interrupted(cache):
    end = End(cache)
    end.settle()
    assert end.within == (TIMEOUT_S, PLAN.sync_timeout_s)
    end = End(cache, interrupted="SIGINT")
    end.settle()
    assert end.within == (SHORT_TIMEOUT_S, SHORT_TIMEOUT_S)


@pytest.mark.parametrize(
    "changes", [{"interrupted": "SIGINT"}, {"uploading": 2}, {"is_finished": False}]
)
def test_cleanup_collects_nothing_while_uploads_may_be_in_flight(cache, changes):
    assert COLLECTED not in End(cache, **changes).settle()


def test_cleanup_keeps_checkpoints_missing_in_the_store_in_the_cache_and_names_both(cache):
    end = End(cache, interrupted="SIGINT", uploading=2)
    end.settle()
    (told,) = end.told
    assert "2 checkpoints have not reached s3://bucket/x, and can be found in" in told
    assert str(cache) in told
    assert cache.exists()


def test_cleanup_names_the_first_few_failed_deletions(cache):
    end = End(cache)
    end.left = [f"t/checkpoint_1-{n}" for n in range(9)]
    assert end.settle() == ["removals", "close"]
    (told,) = end.told
    assert "t/checkpoint_1-4, ..." in told
    assert "t/checkpoint_1-5" not in told


def test_cleanup_whose_collection_fails_does_not_fail_the_search(cache):
    end = End(cache)
    end.error = StoreError("the store is away.")
    assert end.settle()[-1] == "close"
    (told,) = end.told
    assert "s3://bucket/x could not be removed: the store is away" in told


def test_cleanup_interrupted_by_the_user_skips_the_collection(cache):
    end = End(cache)
    end.is_enough = True
    assert end.settle() == ["removals", "close"]


def test_cleanup_interrupted_during_a_long_collection_cancels_it(cache):
    end = End(cache)
    end.has_much_to_do = True
    assert end.settle() == ["removals", COLLECTED, "close"]
    (told,) = end.told
    assert "Leftovers of broken uploads in s3://bucket/x were not removed" in told


def test_cleanup_after_an_unjournalled_turn_does_not_delete_for_it(cache):
    end = End(cache)
    end.loop.is_all_journalled = False
    assert end.settle() == ["removals", "close"]
    assert cache.exists()
