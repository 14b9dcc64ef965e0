"""How long the runner places no trial on a node where trials keep failing."""

from __future__ import annotations

import random
from typing import Any

import pytest

from tests.unit.scheduler.scripted_runner import Story
from tunemq.testing.comparable_state import comparable
from tunemq.testing.journal_replay import replay
from tunemq_scheduler.core import commands as c
from tunemq_scheduler.core.nodes import failing_nodes
from tunemq_scheduler.core.nodes.failing_nodes import (
    FIRST_PAUSE_S,
    LAST_NODE_PAUSE_S,
    MAX_PAUSE_S,
    TRIALS_IN_A_ROW,
    FailingNodes,
    NodeFailures,
)
from tunemq_scheduler.core.placement.placement import holds_when_empty
from tunemq_scheduler.core.runner_snapshot import dump, restore
from tunemq_scheduler.core.trial_runner import TrialRunner
from tunemq_shared.protocol import messages as m


class Farm(Story):
    """Nodes ``bad`` and optionally ``good``, with many trials that may each fail often."""

    def __init__(self, *, alone: bool = False, cpus: float = 4.0, **settings: Any) -> None:
        super().__init__(max_failures=-1, max_storage_failures=-1, **settings)
        self.lose()
        self.cpus = cpus
        self.join_as("bad.1")
        if not alone:
            self.join_as("good.1")
        self.number = 0

    def join_as(self, instance_id: str) -> None:
        node = instance_id.partition(".")[0]
        resources = {"cpu": self.cpus}
        self.tell(m.NodeJoined(instance_id, node, f"{node}-host", "127.0.0.1", resources))

    def place(self) -> tuple[str, str]:
        """Start a new trial and return it and its node."""
        self.number += 1
        trial = f"t{self.number}"
        return trial, self.start(trial).instance_id

    def place_on_bad(self) -> str:
        """Start a new trial on the bad node; trials placed elsewhere end at once."""
        while True:
            trial, node = self.place()
            if node.startswith("bad"):
                return trial
            self.finish(trial)
            self.free(trial)

    def fail_there(self, kind: str = "died") -> c.WarnFailingNode | None:
        """Start a new trial on the bad node, let it fail and return the notices."""
        trial = self.place_on_bad()
        if kind == "died":
            fact: m.Event = m.TrialProcessDied(trial, 1, 1, 9, None, 0.0)
        else:
            fact = m.TrialFailed(trial, 1, kind, f"the {kind} trouble", "", 0.0)
        told = [one for one in self.tell(fact) if isinstance(one, c.WarnFailingNode)]
        self.free(trial)
        self.tell(m.StopRequested(trial, "it is not to be tried again"))
        return told[0] if told else None

    def wait(self, seconds: float) -> None:
        self.tell(m.Tick(self.runner.elapsed + seconds))

    def is_used(self) -> bool:
        """Return whether the runner places a trial on the bad node now."""
        free = self.runner.placement.fit({"cpu": 1.0}, "bad.1")
        return free == "bad.1"


@pytest.mark.parametrize("kind", ["died", "start", "fetch", "disk", "storage", "restore"])
def test_f22_node_with_three_failed_trials_in_a_row_is_set_aside_for_a_minute(
    kind: str,
) -> None:
    farm = Farm()
    assert [farm.fail_there(kind) for _ in range(TRIALS_IN_A_ROW - 1)] == [None, None]
    assert farm.is_used()
    told = farm.fail_there(kind)
    assert told is not None
    assert (told.node, told.hostname, told.trials, told.pause_s) == ("bad", "bad-host", 3, 60.0)
    assert told.reason == ("death of its process" if kind == "died" else f"the {kind} trouble")
    assert not farm.is_used()
    assert {farm.place()[1] for _ in range(4)} == {"good.1"}
    assert farm.runner.aside == {"bad.1": FIRST_PAUSE_S}
    assert farm.runner.next_wake() == FIRST_PAUSE_S
    farm.wait(FIRST_PAUSE_S - 0.1)
    assert not farm.is_used()
    farm.wait(0.1)
    assert farm.is_used()
    assert farm.runner.next_wake() is None


@pytest.mark.parametrize("kind", ["user", "metric", "load", "memory", "cuda_memory", "time_limit"])
def test_failures_of_the_trials_own_code_do_not_count_against_the_node(kind: str) -> None:
    farm = Farm()
    assert [farm.fail_there(kind) for _ in range(5)] == [None] * 5
    assert farm.is_used()


def test_node_pause_doubles_with_each_further_failure_up_to_ten_minutes() -> None:
    farm = Farm()
    farm.fail_there()
    farm.fail_there()
    pauses = []
    for _ in range(6):
        told = farm.fail_there()
        assert told is not None
        pauses.append(told.pause_s)
        farm.wait(told.pause_s)
    assert pauses == [60, 120, 240, 480, MAX_PAUSE_S, MAX_PAUSE_S]


def test_first_new_result_of_a_trial_started_on_the_node_clears_it() -> None:
    farm = Farm()
    farm.fail_there()
    farm.fail_there()
    good = farm.place_on_bad()
    farm.report(good, 1)
    assert farm.fail_there() is None
    farm.report(good, 2)
    farm.fail_there()
    assert farm.fail_there() is not None, "a later result does not clear the node"
    assert not farm.is_used()


def test_first_result_on_a_node_that_is_set_aside_brings_it_back_at_once() -> None:
    farm = Farm()
    slow = farm.place_on_bad()
    for _ in range(3):
        farm.fail_there()
    assert not farm.is_used()
    farm.report(slow, 1)
    assert farm.is_used()
    assert not farm.runner.health


def test_one_trial_that_fails_repeatedly_does_not_count_against_its_node() -> None:
    farm = Farm()
    trial = farm.place_on_bad()
    for attempt in range(1, 10):
        farm.die(trial, attempt)
        farm.free(trial, attempt)
        farm.wait(60)
        farm.choose(trial)
    assert farm.is_used()


def test_failures_on_a_node_that_is_set_aside_do_not_extend_its_pause() -> None:
    farm = Farm(cpus=8.0)
    placed = [farm.place_on_bad() for _ in range(6)]
    told = [command for trial in placed for command in farm.die(trial)]
    assert len([one for one in told if isinstance(one, c.WarnFailingNode)]) == 1
    assert farm.runner.aside == {"bad.1": FIRST_PAUSE_S}


def test_restarted_node_stays_set_aside() -> None:
    farm = Farm()
    for _ in range(3):
        farm.fail_there()
    farm.tell(m.NodeLost("bad.1", "its node was started again", is_dead=True))
    farm.join_as("bad.2")
    assert farm.runner.aside == {"bad.2": FIRST_PAUSE_S}
    assert farm.runner.placement.fit({"cpu": 1.0}, "bad.2") == "good.1"


def test_f22_last_node_is_set_aside_for_a_moment_and_never_for_ever() -> None:
    farm = Farm(alone=True)
    farm.fail_there()
    farm.fail_there()
    told = farm.fail_there()
    assert told is not None
    assert told.pause_s == LAST_NODE_PAUSE_S
    for _ in range(20):
        assert not farm.is_used()
        assert farm.runner.placement.why_never({"cpu": 4.0}) is None
        farm.wait(LAST_NODE_PAUSE_S)
        assert farm.is_used()
        assert [farm.fail_there() for _ in range(3)] == [None] * 3, "the warning was already given"


def test_nodes_that_all_fail_are_each_treated_as_the_last_one() -> None:
    farm = Farm()
    for _ in range(3):
        farm.fail_there()
    for _ in range(3):
        trial, node = farm.place()
        assert node == "good.1"
        farm.die(trial)
        farm.free(trial)
    farm.wait(LAST_NODE_PAUSE_S)
    assert farm.runner.aside == {}
    assert farm.place()[1] in {"bad.1", "good.1"}


def test_health_check_of_a_thousand_failing_nodes_looks_at_each_once(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    names = [f"n{number}" for number in range(1_000)]
    nodes = {name: m.NodeJoined(name, name, "host", "127.0.0.1", {"cpu": 4.0}) for name in names}
    health = FailingNodes()
    health.load((name, NodeFailures(times=1, request={"cpu": 1.0})) for name in names)
    comparisons = []
    monkeypatch.setattr(
        failing_nodes,
        "holds_when_empty",
        lambda *about: comparisons.append(about) or holds_when_empty(*about),
    )
    assert len(health.aside(nodes, 0.5)) == 1_000
    assert health.aside(nodes, LAST_NODE_PAUSE_S) == {}
    assert len(comparisons) <= 1_000


def test_node_that_is_set_aside_returns_early_when_the_others_leave() -> None:
    farm = Farm()
    for _ in range(3):
        farm.fail_there()
    farm.wait(5)
    assert not farm.is_used()
    farm.tell(m.NodeLost("good.1", "it was taken away", is_dead=True))
    assert farm.is_used()


def test_only_node_that_meets_a_request_is_the_last_one_for_that_trial() -> None:
    farm = Farm(alone=True)
    farm.tell(m.NodeJoined("small.1", "small", "small-host", "127.0.0.1", {"cpu": 0.5}))
    for _ in range(3):
        farm.fail_there()
    farm.wait(LAST_NODE_PAUSE_S)
    assert farm.is_used()


def test_node_health_is_restored_from_the_journal_and_from_a_dump() -> None:
    farm = Farm()
    for _ in range(3):
        farm.fail_there()
    farm.place()
    # The journal does not record turns without events.
    farm.runner.handle(m.Tick(30.0))
    again = replay(farm.settings, farm.journal_records)
    assert comparable(again) == comparable(farm.runner)
    read = TrialRunner(farm.settings)
    restore(read, dump(again), again.finished)
    for runner in (again, read, farm.runner):
        runner.handle(m.Tick(FIRST_PAUSE_S - 1))
        assert runner.placement.fit({"cpu": 1.0}, "bad.1") == "good.1"
        runner.handle(m.Tick(FIRST_PAUSE_S))
        assert runner.placement.fit({"cpu": 1.0}, "bad.1") == "bad.1"


@pytest.mark.parametrize("seed", range(30))
def test_random_failures_set_no_node_aside_for_ever_and_leave_one_within_a_second(
    seed: int,
) -> None:
    rng = random.Random(seed)
    farm = Farm()
    lives = {"bad": 1, "good": 1}
    for _ in range(80):
        trial, _node = farm.place()
        match rng.randrange(5):
            case 0:
                farm.report(trial, 1)
                farm.finish(trial)
            case 1:
                name = rng.choice(sorted(lives))
                farm.tell(m.NodeLost(f"{name}.{lives[name]}", "it ended", is_dead=True))
                lives[name] += 1
                farm.join_as(f"{name}.{lives[name]}")
            case _:
                farm.die(trial)
        farm.tell(m.StopRequested(trial, "one try is enough"))
        farm.free(trial)
        farm.wait(rng.choice((0.0, 0.1, 5.0, 100.0)))
        if farm.runner.placement.fit({"cpu": 1.0}) is None:
            wake = farm.runner.next_wake()
            assert wake is not None
            assert wake - farm.runner.elapsed <= LAST_NODE_PAUSE_S
            farm.tell(m.Tick(wake))
        assert farm.runner.placement.fit({"cpu": 1.0}) is not None
    assert comparable(replay(farm.settings, farm.journal_records)) == comparable(farm.runner)
    farm.wait(MAX_PAUSE_S)
    assert not farm.runner.aside


def test_f16_results_do_not_clear_a_node_that_fails_to_keep_checkpoints() -> None:
    farm = Farm()
    for _ in range(TRIALS_IN_A_ROW - 1):
        farm.fail_there("storage")
    trial = farm.place_on_bad()
    farm.report(trial, 1)
    told = [
        one
        for one in farm.tell(m.TrialFailed(trial, 1, "storage", "no space left", "", 0.0))
        if isinstance(one, c.WarnFailingNode)
    ]
    assert told
    assert not farm.is_used()


def test_f16_kept_checkpoint_clears_a_node_that_failed_to_keep_checkpoints() -> None:
    farm = Farm()
    for _ in range(TRIALS_IN_A_ROW - 1):
        farm.fail_there("storage")
    trial = farm.place_on_bad()
    farm.report(trial, 1)
    farm.tell(m.CheckpointCommitted(trial, 1, 1, 1, f"x_{trial}/checkpoint_1-000001", "s", 9, ()))
    assert not farm.runner.health
