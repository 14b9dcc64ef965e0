"""Limits on the number and the bytes of the best checkpoints of all trials together."""

from __future__ import annotations

import itertools
import sys

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tests.support.waiting import without_collections
from tunemq_scheduler.core.checkpoint_limits import ExperimentLimits
from tunemq_scheduler.core.trials.kept_checkpoints import RetentionPolicy, TrialCheckpoint
from tunemq_shared.protocol.messages import CheckpointCommitted


class Limits(ExperimentLimits):
    def __init__(self, **rule: int) -> None:
        super().__init__(RetentionPolicy(**rule))
        self._orders = itertools.count()

    def commit(self, key: str, score: float, size: int = 1) -> None:
        event = CheckpointCommitted("t", 1, 1, 1, key, "hash", size)
        self.add(TrialCheckpoint(next(self._orders), score, key, 1, 1, "", "", event))

    def dropped(self) -> list[str]:
        return [one.key for one in self.drop_surplus()]


def test_experiment_limit_keeps_the_best_checkpoints_up_to_the_number() -> None:
    limits = Limits(in_experiment=2)
    for key, score in (("a", 1.0), ("b", 3.0), ("c", 2.0)):
        limits.commit(key, score)
    assert limits.dropped() == []
    for key in "abc":
        limits.let_go(key)
    assert limits.dropped() == ["a"]
    limits.commit("d", 2.0)
    limits.let_go("d")
    assert limits.dropped() == ["c"], "the newer of two equally good checkpoints stays"


def test_over_the_quota_the_worst_checkpoint_is_dropped_first_and_the_best_stays() -> None:
    limits = Limits(max_bytes=10)
    for key, score, size in (("best", 9.0, 20), ("bad", 1.0, 4), ("worse", 0.0, 4)):
        limits.commit(key, score, size)
        limits.let_go(key)
    assert limits.dropped() == ["worse", "bad"]
    assert limits.dropped() == []
    limits.commit("better", 10.0, 2)
    assert limits.dropped() == ["best"], "another checkpoint is the best now"


def test_checkpoint_that_is_held_back_stays_and_counts() -> None:
    limits = Limits(max_bytes=2)
    for key, score in (("a", 1.0), ("b", 2.0), ("c", 3.0)):
        limits.commit(key, score)
    limits.let_go("a")
    limits.hold_back("a")
    assert limits.dropped() == []
    limits.let_go("b")
    assert limits.dropped() == ["b"]


def test_damaged_best_checkpoint_is_replaced_by_the_next_best() -> None:
    limits = Limits(max_bytes=1)
    for key, score in (("a", 1.0), ("b", 2.0), ("c", 3.0)):
        limits.commit(key, score)
    limits.let_go("a")
    limits.let_go("b")
    limits.remove("c")
    assert limits.dropped() == ["a"]
    assert "b" in limits


def test_experiment_without_limits_tracks_no_checkpoint() -> None:
    limits = Limits()
    limits.commit("a", 1.0)
    assert "a" not in limits


@given(
    st.lists(st.tuples(st.integers(0, 9), st.integers(0, 5), st.sampled_from("+-~x")), max_size=60),
    st.sampled_from([{"in_experiment": 2}, {"max_bytes": 9}, {"in_experiment": 3, "max_bytes": 7}]),
)
def test_kept_checkpoints_equal_those_of_a_full_sort(
    actions: list[tuple[int, int, str]], rule: dict[str, int]
) -> None:
    limits, kept, free = Limits(**rule), dict[str, tuple[int, int, int]](), set[str]()
    for number, (score, size, action) in enumerate(actions):
        if action == "+" or not kept:
            kept[f"{number}"] = score, number, size
            limits.commit(f"{number}", score, size)
            continue
        key = sorted(kept)[score % len(kept)]
        if action == "-":
            limits.let_go(key)
            free.add(key)
        elif action == "~":
            limits.hold_back(key)
            free.discard(key)
        else:
            limits.remove(key)
            free.discard(key)
            del kept[key]
        dropped = limits.dropped()
        for gone in dropped:
            assert gone == min(free, key=lambda one: kept[one][:2])
            free.discard(gone)
            del kept[gone]
        best = max(kept, key=lambda one: kept[one][:2], default=None)
        if "in_experiment" in rule:
            assert len(free) <= rule["in_experiment"]
        if "max_bytes" in rule and free - {best}:
            assert sum(size for *_, size in kept.values()) <= rule["max_bytes"]


def test_adding_a_checkpoint_costs_the_same_among_ten_and_ten_thousand() -> None:
    limits, numbers = Limits(in_experiment=20_000, max_bytes=10_000), itertools.count()

    def calls(times: int) -> float:
        counted = 0

        def count(_frame: object, event: str, _argument: object) -> None:
            nonlocal counted
            counted += event in {"call", "c_call"}

        with without_collections():
            sys.setprofile(count)
            try:
                for _ in range(times):
                    number = next(numbers)
                    key = f"{number}"
                    limits.commit(key, float(number * 7919 % 1000))
                    limits.let_go(key)
                    limits.dropped()
            finally:
                sys.setprofile(None)
        return counted / times

    calls(10)
    few = calls(100)
    calls(12_000)
    assert calls(1_000) < 2 * few, "the cost grows at most logarithmically"


@pytest.mark.parametrize("rounds", [1, 50])
def test_holding_back_and_releasing_checkpoints_leaves_no_entries_behind(rounds: int) -> None:
    limits = Limits(in_experiment=1)
    limits.commit("a", 1.0)
    for _ in range(rounds * 100):
        limits.let_go("a")
        limits.hold_back("a")
    assert len(limits._worst) < 200
