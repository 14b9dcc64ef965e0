"""Which checkpoints of a trial are kept."""

from __future__ import annotations

import math

import pytest

from tunemq_scheduler.core.kept_checkpoints import KeepRule, KeptCheckpoints
from tunemq_shared.messages import CheckpointCommitted, ResultReported


def checkpoint(key: str, step: int) -> CheckpointCommitted:
    return CheckpointCommitted("t", 1, step, step, key, "hash", 1)


def result(step: int, **metrics: float) -> ResultReported:
    return ResultReported("t", 1, step, metrics, 0.0, 1.0, 1.0, 1.0, step)


def keys(kept: KeptCheckpoints) -> list[str]:
    return [one.key for one in kept.kept()]


@pytest.mark.parity(104)
def test_the_newest_is_the_one_that_came_last_whatever_its_step() -> None:
    kept = KeptCheckpoints(KeepRule(num_to_keep=1))
    kept.add(checkpoint("late", 9), result(9))
    kept.add(checkpoint("exploited", 4), result(4))
    newest = kept.newest()
    assert newest is not None
    assert (newest.key, newest.step) == ("exploited", 4)
    assert keys(kept) == ["exploited"]


@pytest.mark.parity(107, 110)
@pytest.mark.parametrize(("higher_is_better", "best"), [(True, "c"), (False, "a")])
def test_of_equally_good_ones_the_newer_is_kept(higher_is_better: bool, best: str) -> None:
    rule = KeepRule(num_to_keep=1, score_attribute="acc", higher_is_better=higher_is_better)
    kept = KeptCheckpoints(rule)
    for step, (key, score) in enumerate([("old", 2.0), ("c", 2.0), ("a", 1.0), ("z", 1.5)]):
        kept.add(checkpoint(key, step), result(step, acc=score))
    assert keys(kept) == [best, "z"]


@pytest.mark.parity(109)
@pytest.mark.parametrize("metrics", [{}, {"acc": math.nan}])
def test_one_without_its_score_is_kept_as_the_newest_only(metrics: dict[str, float]) -> None:
    kept = KeptCheckpoints(KeepRule(num_to_keep=1, score_attribute="acc"))
    kept.add(checkpoint("scored", 1), result(1, acc=-5.0))
    assert kept.add(checkpoint("unscored", 2), result(2, **metrics)) == []
    dropped = kept.add(checkpoint("worse", 3), result(3, acc=-9.0))
    assert [one.key for one in dropped] == ["unscored"]
    assert keys(kept) == ["scored", "worse"]


@pytest.mark.parity(112)
def test_one_that_is_stated_twice_is_not_dropped_as_its_own_predecessor() -> None:
    kept = KeptCheckpoints(KeepRule(num_to_keep=1))
    kept.add(checkpoint("k", 1), result(1))
    assert kept.add(checkpoint("k", 1), result(1)) == []
    assert keys(kept) == ["k"]
