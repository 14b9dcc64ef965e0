"""A trial that keeps failing on one node is tried on another node that can hold it."""

from __future__ import annotations

from typing import Any

from tests.unit.scheduler.scripted_runner import Story
from tunemq_scheduler.core.runner_state import ELSEWHERE_S
from tunemq_scheduler.core.trials.trial import FAILURES_ON_A_NODE
from tunemq_shared.protocol import messages as m


class Farm(Story):
    """A node ``bad``, which fits trials best and is always tried first; all others are larger."""

    def __init__(self, *others: str, **settings: Any) -> None:
        super().__init__(max_failures=-1, max_storage_failures=-1, **settings)
        self.lose()
        for name in ("bad", *others):
            resources = {"cpu": 1.0 if name == "bad" else 4.0}
            self.tell(m.NodeJoined(f"{name}.1", name, name, "127.0.0.1", resources))
        self.add("a")
        self.trial = self.runner.live["a"]

    def pass_on(self, seconds: float) -> None:
        self.tell(m.Tick(self.runner.elapsed + seconds))

    def try_once(self) -> str:
        """Place the trial as soon as allowed, let it fail and return its node."""
        self.pass_on(max(0.0, self.trial.not_before - self.runner.elapsed))
        order = self.choose("a")
        attempt = self.trial.attempt
        self.tell(m.TrialFailed("a", attempt, "storage", "no room", "", 0.0))
        self.tell(m.SlotFreed("a", attempt))
        return order.instance_id

    def fail_often(self) -> None:
        for _ in range(FAILURES_ON_A_NODE):
            assert self.try_once() == "bad.1"


def test_trial_that_failed_often_on_a_node_is_placed_on_another_one() -> None:
    farm = Farm("good")
    farm.fail_often()
    assert farm.try_once() == "good.1"


def test_trial_that_failed_often_on_the_only_node_is_placed_there_again() -> None:
    farm = Farm()
    farm.fail_often()
    assert farm.try_once() == "bad.1"


def test_trial_that_finds_no_other_node_with_room_goes_back_after_a_while() -> None:
    farm = Farm("good")
    farm.fail_often()
    farm.add("b", cpus=4.0)
    assert farm.choose("b").instance_id == "good.1"
    farm.pass_on(farm.trial.not_before + 1.0 - farm.runner.elapsed)
    assert farm.runner.place_of(farm.trial) is None
    [wanted] = farm.runner.usage().wants
    assert wanted.excluded == ("bad.1",)
    farm.pass_on(ELSEWHERE_S)
    assert farm.runner.place_of(farm.trial) == "bad.1"
    [wanted] = farm.runner.usage().wants
    assert wanted.excluded == ()


def test_trial_that_failed_often_keeps_no_other_trial_from_the_node() -> None:
    farm = Farm("good")
    farm.fail_often()
    farm.pass_on(farm.trial.not_before + 1.0 - farm.runner.elapsed)
    farm.add("b", cpus=4.0)
    assert farm.choose("b").instance_id == "good.1"
    farm.add("c")
    assert farm.choose("c").instance_id == "bad.1"


def test_trial_that_failed_often_does_not_wait_behind_one_that_never_goes_to_the_node() -> None:
    farm = Farm("good")
    farm.fail_often()
    farm.add("never")
    farm.runner.live["never"].excluded.append("bad")
    farm.runner.queue.regroup()
    farm.add("full", cpus=4.0)
    assert farm.choose("full").instance_id == "good.1"
    farm.pass_on(farm.trial.not_before + ELSEWHERE_S + 1.0)
    assert "a" in [one.trial_id for one in farm.runner.waiting()]
