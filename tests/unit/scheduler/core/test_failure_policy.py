"""How often, and after which pause, a trial is retried for each class of failure."""

from __future__ import annotations

from typing import Any

import pytest

from tests.unit.scheduler.scripted_runner import Story, kinds
from tunemq.testing.comparable_state import comparable
from tunemq.testing.journal_replay import replay
from tunemq_scheduler.core import commands as c
from tunemq_scheduler.core.failure_policy import CLASSES, classify
from tunemq_scheduler.core.runner_snapshot import dump
from tunemq_scheduler.core.trial_runner import TrialRunner
from tunemq_shared.protocol import messages as m

COUNTED = ["user", "metric", "load", "start", "died", "memory", "time_limit", "stalled"]


def failing(
    kind: str, trial: str = "a", attempt: int = 1, *, is_shared: bool = False
) -> m.TrialFailed | m.TrialProcessDied:
    """Return a failure event of this class."""
    if kind == "died":
        return m.TrialProcessDied(trial, attempt, 1, 9, None, 0.0)
    error = f"{kind}: it went wrong"
    return m.TrialFailed(trial, attempt, kind, error, "", 0.0, is_shared=is_shared)


class Tries(Story):
    """One trial that fails again and again."""

    def __init__(self, **settings: Any) -> None:
        super().__init__(**settings)
        self.add("a")

    def fail_once(self, kind: str, new_results: int = 0) -> c.NotifyFailure:
        """Start the trial as soon as allowed, let it report and fail."""
        self.tell(m.Tick(self.runner.next_wake() or self.runner.elapsed))
        self.choose("a")
        trial = self.runner.live["a"]
        for _ in range(new_results):
            self.report("a", trial.last_step + 1, attempt=trial.attempt)
        commands = self.tell(failing(kind, attempt=trial.attempt))
        self.free("a", trial.attempt)
        (record,) = [one for one in commands if isinstance(one, c.NotifyFailure)]
        return record

    @property
    def status(self) -> str:
        return self.runner.summary("a").status


def test_each_failure_kind_has_a_class_and_an_unknown_one_counts_as_the_users() -> None:
    stated = {
        *COUNTED,
        "fetch",
        "disk",
        "restore",
        "storage",
        "cuda_memory",
        "trial_limit",
        "forkserver",
    } - {"died"}
    for kind in stated:
        assert classify(failing(kind)) is CLASSES[kind]
    assert classify(failing("of a newer node")).kind == "user"
    assert classify(m.TrialProcessDied("a", 1, 1, 9, None, 0.0)).kind == "died"
    assert classify(m.TrialProcessDied("a", 1, 1, 9, None, 0.0, "memory")).kind == "memory"


@pytest.mark.parity(94, 95)
@pytest.mark.parametrize("kind", COUNTED)
def test_failure_of_the_trial_counts_towards_max_failures_and_states_its_number(kind: str) -> None:
    tries = Tries(max_failures=2)
    told = [tries.fail_once(kind, new_results=1) for _ in range(3)]
    assert [one.retried for one in told] == [True, True, False]
    assert [one.told for one in told] == [f"failure {n} of at most 3" for n in (1, 2, 3)]
    assert {one.kind for one in told} == {kind}
    assert tries.status == "ERROR"
    summary = tries.runner.summary("a")
    assert (summary.num_failures, summary.failures) == (3, {kind: 3})
    assert summary.reason == f"{CLASSES[kind].description}: failure 3 of at most 3"


def test_failures_of_different_classes_share_max_failures() -> None:
    tries = Tries(max_failures=2)
    assert tries.fail_once("user").retried
    assert tries.fail_once("died").retried
    assert tries.fail_once("stalled").told == "failure 3 of at most 3"
    assert tries.runner.summary("a").failures == {"user": 1, "died": 1, "stalled": 1}


@pytest.mark.parametrize("kind", ["fetch", "storage", "restore"])
def test_checkpoint_failures_have_a_separate_budget_that_a_new_result_renews(
    kind: str,
) -> None:
    tries = Tries(max_failures=0, max_storage_failures=1)
    assert tries.fail_once(kind).told == f"{kind} failure 1 of at most 2 in a row"
    for _ in range(5):
        assert tries.fail_once(kind, new_results=1).retried
    assert tries.fail_once(kind).told == f"{kind} failure 2 of at most 2 in a row"
    assert tries.status == "ERROR"
    assert tries.runner.summary("a").failures == {kind: 7}


def test_failed_saves_and_failed_restores_are_counted_separately_and_not_as_errors() -> None:
    tries = Tries(max_failures=0, max_storage_failures=1)
    assert tries.fail_once("storage").retried
    assert tries.fail_once("restore").retried
    assert tries.fail_once("user").told == "failure 1 of at most 1"


def test_failure_of_the_nodes_disk_never_counts_against_the_trial() -> None:
    tries = Tries(max_failures=0, max_storage_failures=0)
    told = {(one.retried, one.told) for one in (tries.fail_once("disk") for _ in range(5))}
    assert told == {(True, "not counted, because the disk of its node is the cause")}
    assert tries.fail_once("user").told == "failure 1 of at most 1"


def test_trial_whose_forkserver_died_is_retried_where_no_failure_is_allowed() -> None:
    tries = Tries(max_failures=0, max_node_losses=2)
    for number in (1, 2):
        record = tries.fail_once("forkserver")
        assert record.retried
        assert record.told == f"loss {number} of at most 3 in a row while no other trial was there"
    for _ in range(5):
        assert tries.fail_once("forkserver", new_results=1).retried
    # None of them counts as a failure of the trial.
    assert tries.fail_once("user").told == "failure 1 of at most 1"


def test_trial_whose_forkserver_dies_each_time_ends_with_a_reason_that_names_it() -> None:
    tries = Tries(max_failures=0, max_node_losses=2)
    tried = [tries.fail_once("forkserver").retried for _ in range(3)]
    assert tried == [True, True, False]
    summary = tries.runner.summary("a")
    assert summary.status == "ERROR"
    assert summary.reason.startswith(
        "death of its node's forkserver: 3 nodes or forkservers lost in a row while they ran only"
        " this trial ("
    )


@pytest.mark.parametrize("kind", ["cuda_memory", "trial_limit"])
def test_failure_that_would_repeat_is_not_retried(kind: str) -> None:
    tries = Tries(max_failures=-1, max_storage_failures=-1)
    record = tries.fail_once(kind)
    assert (record.retried, record.told) == (
        False,
        "not retried, because that would not help",
    )
    assert tries.status == "ERROR"


def test_f23_out_of_gpu_memory_counts_as_a_failure_where_a_retry_is_configured() -> None:
    tries = Tries(max_failures=1, retry_cuda_memory=True)
    assert tries.fail_once("cuda_memory").told == "failure 1 of at most 2"
    assert not tries.fail_once("user").retried


def test_max_failures_of_minus_one_retries_a_trial_for_ever() -> None:
    tries = Tries(max_failures=-1, max_storage_failures=-1)
    for kind in COUNTED + ["fetch", "storage", "restore"] * 10:
        record = tries.fail_once(kind)
        assert record.retried
    assert record.told == "restore failure 10 in a row, without a limit"


@pytest.mark.parametrize("kind", [*COUNTED, "fetch", "disk", "storage", "restore", "cuda_memory"])
def test_retry_pauses_without_a_new_result_grow_from_zero_to_a_minute(kind: str) -> None:
    tries = Tries(max_failures=-1, max_storage_failures=-1, retry_cuda_memory=True)
    pauses = []
    for _ in range(9):
        tries.fail_once(kind)
        pauses.append(tries.runner.live["a"].not_before - tries.runner.elapsed)
    assert pauses == [0, 1, 2, 4, 8, 16, 32, 60, 60]
    tries.fail_once(kind, new_results=1)
    assert tries.runner.live["a"].not_before == tries.runner.elapsed


def test_retry_pauses_grow_after_lost_nodes_too() -> None:
    story = Story(max_node_losses=-1)
    story.add("a")
    pauses = []
    for life in range(1, 10):
        if life > 1:
            story.join(f"node.{life}")
        story.tell(m.Tick(story.runner.next_wake() or story.runner.elapsed))
        story.choose("a")
        story.lose(f"node.{life}")
        pauses.append(story.runner.live["a"].not_before - story.runner.elapsed)
    assert pauses == [0, 1, 2, 4, 8, 16, 32, 60, 60]
    assert story.runner.summary("a").num_failures == 0


def test_failure_counters_are_the_same_after_a_replay() -> None:
    tries = Tries(max_failures=5, max_storage_failures=5)
    for kind in ("user", "storage", "died", "restore"):
        tries.fail_once(kind, new_results=kind == "died")
    again = replay(tries.settings, tries.journal_records)
    assert comparable(again) == comparable(tries.runner)
    assert again.live["a"].in_a_row == {"died": 1, "restore": 1}


def dump_and_load(story: Story) -> bytes:
    """Return the state of a runner that was loaded from this one's dump."""
    runner = story.runner
    return comparable(TrialRunner.load(story.settings, dump(runner), dict(runner.finished)))


# --- suspect trials -------------------------------------------------------------------------------


class NodeLosses(Story):
    """Nodes that are lost one after the other; each has room for four trials."""

    def __init__(self, **settings: Any) -> None:
        super().__init__(cpus=4.0, **settings)
        self.life = 1

    @property
    def node(self) -> str:
        return f"node.{self.life}"

    def lose_node(self) -> list[c.Command]:
        """Lose the node and add the next one."""
        commands = self.tell(m.NodeLost(self.node, "its process ended", is_dead=True))
        self.life += 1
        self.join(self.node, 4.0)
        return commands

    def lose_forkserver(self) -> None:
        """Lose the forkserver of all trials on the node."""
        trials = [trial for trial, _ in self.runner.slots.on_node(self.node)]
        for trial in trials:
            attempt = self.runner.live[trial].attempt
            self.tell(failing("forkserver", trial, attempt, is_shared=len(trials) > 1))
            self.free(trial, attempt)

    def start_all(self) -> list[str]:
        """Start every trial that may start now and return their names in order."""
        self.tell(m.Tick(self.runner.elapsed + 60))
        started = []
        while trial := next(iter(self.runner.waiting()), None):
            started.append(trial.trial_id)
            self.choose(trial.trial_id)
        return started


def test_f22_trial_whose_nodes_are_lost_one_after_another_ends_as_poison() -> None:
    story = NodeLosses()
    story.add("a")
    for _ in range(2):
        story.start_all()
        assert "NotifyFailure" not in kinds(story.lose_node())
    story.start_all()
    commands = story.lose_node()
    record, end = commands[:2]
    assert isinstance(record, c.NotifyFailure)
    assert (record.kind, record.retried) == ("node", False)
    assert isinstance(end, c.NotifyTrialEnd)
    assert end.status == "ERROR"
    assert end.reason.startswith(
        "poison: 3 nodes or forkservers lost in a row while they ran only this trial ("
    )
    assert "node.1, node.2, node.3" in end.reason


def test_f22_new_result_between_two_lost_nodes_clears_the_suspect_trial() -> None:
    story = NodeLosses()
    story.add("a")
    for step in range(1, 6):
        story.start_all()
        story.report("a", step, attempt=story.runner.live["a"].attempt)
        story.lose_node()
    assert story.runner.live["a"].status == "PENDING"


def test_f22_trials_beside_a_poison_trial_continue() -> None:
    story = NodeLosses()
    for trial in ("a", "poison", "b", "d"):
        story.add(trial)
    for _ in range(2):
        assert story.start_all() == ["a", "poison", "b", "d"]
        story.lose_node()
    # Each of them is now a suspect, and a node runs one suspect at a time and nothing else.
    assert story.start_all() == ["a"]
    assert story.start_all() == []
    story.report("a", 1, attempt=3)
    assert story.start_all() == [], "the node must be empty before the next suspect starts"
    story.tell(m.TrialFinished("a", 3))
    story.tell(m.SlotFreed("a", 3))
    assert story.start_all() == ["poison"]
    story.lose_node()
    for trial in ("b", "d"):
        assert story.start_all() == [trial]
        story.report(trial, 1, attempt=3)
        story.tell(m.TrialFinished(trial, 3))
        story.tell(m.SlotFreed(trial, 3))
    for _ in range(2):
        assert story.start_all() == ["poison"]
        assert story.start_all() == []
        last = story.lose_node()
    assert "NotifyFailure" in kinds(last)
    assert story.runner.summary("poison").status == "ERROR"
    assert "node.3, node.4, node.5" in story.runner.summary("poison").reason
    assert comparable(replay(story.settings, story.journal_records)) == comparable(story.runner)


def test_trial_beside_one_that_kills_its_forkserver_continues() -> None:
    story = NodeLosses()
    for trial in ("a", "killer", "b"):
        story.add(trial)

    for _ in range(2):
        assert story.start_all() == ["a", "killer", "b"]
        story.lose_forkserver()
    # Each of them is now a suspect, and a node runs one suspect at a time and nothing else.
    assert story.start_all() == ["a"]
    story.report("a", 1, attempt=3)
    assert story.start_all() == [], "the node must be empty before the next suspect starts"
    story.tell(m.TrialFinished("a", 3))
    story.free("a", 3)
    assert story.start_all() == ["killer"]
    story.lose_forkserver()
    assert story.start_all() == ["b"]
    story.report("b", 1, attempt=3)
    story.tell(m.TrialFinished("b", 3))
    story.free("b", 3)
    for _ in range(2):
        assert story.start_all() == ["killer"]
        assert story.start_all() == []
        story.lose_forkserver()
    assert story.runner.summary("killer").status == "ERROR"
    assert comparable(replay(story.settings, story.journal_records)) == comparable(story.runner)


def test_first_death_of_a_shared_forkserver_ends_no_trial_where_no_loss_is_allowed() -> None:
    story = NodeLosses(max_node_losses=0)
    for trial in ("a", "killer", "b"):
        story.add(trial)
    assert story.start_all() == ["a", "killer", "b"]
    story.lose_forkserver()
    assert dump_and_load(story) == comparable(story.runner)
    for trial in ("a", "killer", "b"):
        assert story.start_all() == [trial]
        assert story.start_all() == [], "nothing runs beside a suspect"
        if trial == "killer":
            story.lose_forkserver()
        else:
            story.report(trial, 1, attempt=2)
            story.tell(m.TrialFinished(trial, 2))
            story.free(trial, 2)
    statuses = [story.runner.summary(trial).status for trial in ("a", "killer", "b")]
    assert statuses == ["TERMINATED", "ERROR", "TERMINATED"]
    assert comparable(replay(story.settings, story.journal_records)) == comparable(story.runner)


def test_node_and_forkserver_losses_count_together_against_a_trial() -> None:
    story = NodeLosses(max_node_losses=1)
    story.add("a")
    story.start_all()
    story.lose_forkserver()
    story.start_all()
    story.lose_node()
    summary = story.runner.summary("a")
    assert summary.status == "ERROR"
    assert "the forkserver of node.1 in attempt 1, node.1" in summary.reason


def test_f22_loss_of_a_shared_node_is_no_evidence_against_a_trial() -> None:
    """This holds for any number of losses: trials of other experiments may have run on the node."""
    story = NodeLosses(max_node_losses=0)
    story.add("a")
    for _ in range(5):
        assert story.start_all() == ["a"]
        story.tell(m.NodeLost(story.node, "its process ended", is_dead=True, is_shared=True))
        story.life += 1
        story.join(story.node, 4.0)
    assert story.runner.live["a"].status == "PENDING"
    assert story.start_all() == ["a"]
    assert "NotifyFailure" in kinds(story.lose_node())
    assert story.runner.summary("a").status == "ERROR"


def test_f22_suspect_trial_gets_a_node_alone_while_others_continue() -> None:
    story = NodeLosses(max_node_losses=0)
    story.add("a")
    story.add("b")
    assert story.start_all() == ["a", "b"]
    story.lose_node()
    story.join("other.1", 4.0)
    started = story.start_all()
    assert started == ["a", "b"]
    nodes = {story.runner.slots.node_of(story.runner.live[one]) for one in started}
    assert nodes == {"node.2", "other.1"}
    story.add("c")
    assert story.start_all() == [], "nothing runs beside a suspect"
    story.report("a", 1, attempt=2)
    assert story.start_all() == ["c"], "a trial with a new result shares its node again"


def test_f22_trial_placed_while_a_suspect_waits_leaves_its_node_free() -> None:
    """The runner reserves a node for the suspect; smaller trials would take every free slot."""
    story = NodeLosses(max_node_losses=0)
    for trial in ("a", "b"):
        story.add(trial)
    story.start_all()
    story.lose_node()
    assert story.start_all() == ["a"]
    story.report("a", 1, attempt=2)
    story.add("c")
    assert story.start_all() == []
    story.tell(m.TrialFinished("a", 2))
    story.tell(m.SlotFreed("a", 2))
    assert story.start_all() == ["b"]
    assert dump_and_load(story) == comparable(story.runner)


def test_node_that_was_only_disconnected_makes_no_trial_suspect() -> None:
    story = NodeLosses()
    story.add("a")
    story.start_all()
    for _ in range(5):
        story.tell(m.NodeLost("node.1", "its lease ran out"))
        story.tell(m.NodeReturned("node.1"))
    assert story.runner.live["a"].status == "RUNNING"
    story.lose_node()
    assert story.runner.live["a"].status == "PENDING"


def test_unlimited_node_losses_make_no_trial_poison() -> None:
    story = NodeLosses(max_node_losses=-1)
    story.add("a")
    for _ in range(20):
        assert story.start_all() == ["a"]
        story.lose_node()
    assert story.runner.live["a"].status == "PENDING"


def test_limit_of_zero_node_losses_ends_a_trial_with_its_first_lost_node() -> None:
    story = NodeLosses(max_node_losses=0)
    story.add("a")
    story.start_all()
    assert "NotifyFailure" in kinds(story.lose_node())
