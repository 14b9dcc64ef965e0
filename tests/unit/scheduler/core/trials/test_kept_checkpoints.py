"""Which checkpoints of a trial are kept, and from which it may resume."""

from __future__ import annotations

import itertools
import math

import pytest

from tunemq_scheduler.core.trials.kept_checkpoints import (
    MOST_CANDIDATES,
    CheckpointManager,
    RetentionPolicy,
)
from tunemq_shared.protocol.messages import (
    CheckpointCommitted,
    CheckpointRef,
    CheckpointWritten,
    ResultReported,
)

NODE = "node.1"


def committed(key: str, step: int) -> CheckpointCommitted:
    return CheckpointCommitted("t", 1, step, step, key, f"store-{key}", 1)


def written(key: str, step: int) -> CheckpointWritten:
    return CheckpointWritten("t", 1, step, step, key, f"disk-{key}", 1)


def result(step: int, **metrics: float) -> ResultReported:
    return ResultReported("t", 1, step, metrics, 0.0, 1.0, 1.0, 1.0, step)


class Trial:
    """A trial's checkpoints, numbered in the order in which they are added."""

    def __init__(self, **rule: object) -> None:
        self.kept = CheckpointManager(RetentionPolicy(**rule))
        self._orders = itertools.count()

    def write(self, key: str, step: int, node: str = NODE, **metrics: float) -> None:
        found = result(step, **metrics)
        self.kept.add(written(key, step), found, order=next(self._orders), node=node)

    def commit(self, key: str, step: int, **metrics: float) -> list[str]:
        """Commit a checkpoint, written or not, and return the keys of those that are dropped."""
        event = committed(key, step)
        if key in self.kept:
            self.kept.commit(event)
        else:
            order = next(self._orders)
            self.kept.add(event, result(step, **metrics), order=order)
        return [one.key for one in self.kept.drop_surplus()]

    @property
    def keys(self) -> list[str]:
        return [one.key for one in self.kept.kept()]


@pytest.mark.parity(104)
def test_newest_checkpoint_is_the_last_added_whatever_its_step() -> None:
    trial = Trial(num_to_keep=1)
    trial.commit("late", 9)
    trial.commit("exploited", 4)
    assert trial.kept.refs("") == (CheckpointRef("exploited", "store-exploited", 4),)
    assert trial.keys == ["exploited"]


@pytest.mark.parity(107, 110)
@pytest.mark.parametrize(("higher_is_better", "best"), [(True, "c"), (False, "a")])
def test_newer_of_equally_good_checkpoints_is_kept(higher_is_better: bool, best: str) -> None:
    trial = Trial(num_to_keep=1, score_attribute="acc", higher_is_better=higher_is_better)
    for step, (key, score) in enumerate([("old", 2.0), ("c", 2.0), ("a", 1.0), ("z", 1.5)]):
        trial.commit(key, step, acc=score)
    assert trial.keys == [best, "z"]


@pytest.mark.parity(109)
@pytest.mark.parametrize("metrics", [{}, {"acc": math.nan}, {"acc": math.inf}, {"acc": -math.inf}])
def test_checkpoint_without_a_score_is_kept_only_as_the_newest(metrics: dict[str, float]) -> None:
    trial = Trial(num_to_keep=1, score_attribute="acc")
    trial.commit("scored", 1, acc=-5.0)
    assert trial.commit("unscored", 2, **metrics) == []
    assert trial.commit("worse", 3, acc=-9.0) == ["unscored"]
    assert trial.keys == ["scored", "worse"]


@pytest.mark.parity(114)
def test_uncommitted_checkpoint_is_neither_dropped_nor_counted() -> None:
    trial = Trial(num_to_keep=1)
    trial.commit("a", 1)
    for step in (2, 3, 4):
        trial.write(f"w{step}", step)
    assert (trial.keys, trial.kept.uploading) == (["a"], 3)
    assert trial.commit("w2", 2) == ["a"]
    assert (trial.keys, trial.kept.uploading) == (["w2"], 2)


@pytest.mark.parametrize("order", list(itertools.permutations(("a", "b", "c"))))
def test_kept_checkpoints_do_not_depend_on_the_order_of_uploads(order: tuple[str]) -> None:
    trial = Trial(num_to_keep=1, score_attribute="acc")
    for step, (key, score) in enumerate([("a", 1.0), ("b", 3.0), ("c", 2.0)], start=1):
        trial.write(key, step, acc=score)
    for key in order:
        trial.commit(key, {"a": 1, "b": 2, "c": 3}[key])
    assert trial.keys == ["b", "c"]


@pytest.mark.parity(103)
def test_trial_process_on_the_same_node_may_resume_from_an_uncommitted_checkpoint() -> None:
    trial = Trial()
    trial.write("a", 1)
    trial.commit("a", 1)
    trial.write("b", 2)
    a, b = CheckpointRef("a", "store-a", 1, "disk-a"), CheckpointRef("b", "", 2, "disk-b")
    assert trial.kept.refs(NODE) == (b, a)
    assert trial.kept.refs("another") == (a,)
    assert trial.kept.node == NODE


def test_resume_candidates_are_limited_to_the_newest() -> None:
    trial = Trial()
    for step in range(20):
        trial.commit(f"c{step}", step)
    refs = trial.kept.refs(NODE)
    assert [ref.step for ref in refs] == list(range(19, 19 - MOST_CANDIDATES, -1))


def test_lost_or_damaged_checkpoint_is_no_resume_candidate() -> None:
    trial = Trial()
    trial.write("a", 1)
    trial.write("b", 2)
    trial.write("c", 3)
    trial.kept.remove("c")
    unwanted = trial.kept.get("b")
    assert unwanted is not None
    unwanted.is_wanted = False
    assert [ref.key for ref in trial.kept.refs(NODE)] == ["a"]
    assert trial.kept.uploading == 2
