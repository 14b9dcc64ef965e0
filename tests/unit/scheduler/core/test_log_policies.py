"""What the runner does when a trial fails whose output matched a log policy."""

from __future__ import annotations

import random
from typing import Any

import msgspec
import pytest

from tests.unit.scheduler.scripted_runner import Story
from tunemq.testing.comparable_state import comparable
from tunemq.testing.journal_auditor import JournalAuditor
from tunemq.testing.journal_replay import replay
from tunemq_scheduler.core import commands as c
from tunemq_scheduler.core.handlers.failure_events import LINE_LENGTH
from tunemq_scheduler.core.nodes.failing_nodes import TRIALS_IN_A_ROW
from tunemq_scheduler.core.runner_settings import DO_NOT_RETRY, EXCLUDE_NODE, LogRule
from tunemq_scheduler.core.runner_snapshot import dump
from tunemq_scheduler.core.shared_amounts import SlotDemand
from tunemq_scheduler.core.trial_runner import TrialRunner
from tunemq_scheduler.core.trials.trial import PENDING
from tunemq_shared.protocol import messages as m

ASSERT, ECC = "device-side assert", "uncorrectable ECC"
RULES = (LogRule(ASSERT, DO_NOT_RETRY), LogRule(ECC, EXCLUDE_NODE))


class Farm(Story):
    """Nodes ``n1.1`` and so on, each with room for one trial; ``a`` is the trial under test."""

    def __init__(self, nodes: int = 2, **settings: Any) -> None:
        super().__init__(**{"max_failures": -1, "log_rules": RULES, **settings})
        self.lose(is_dead=True)
        for number in range(1, nodes + 1):
            self.join_as(f"n{number}.1")
        self.add("a")

    def join_as(self, instance_id: str, **fields: Any) -> None:
        node = instance_id.partition(".")[0]
        joined = m.NodeJoined(instance_id, node, f"{node}-host", "127.0.0.1", {"cpu": 1.0})
        self.tell(msgspec.structs.replace(joined, **fields))

    def node(self) -> str:
        return self.runner.slots.node_of(self.trial)

    @property
    def trial(self) -> Any:
        return self.runner.live["a"]

    def place(self) -> str:
        """Start the trial as soon as allowed and return its node."""
        self.tell(m.Tick(self.runner.next_wake() or self.runner.elapsed))
        return self.choose("a").instance_id

    def print_(self, pattern: str, trial: str = "a") -> None:
        attempt = self.runner.live[trial].attempt
        self.tell(m.LogMatched(trial, attempt, pattern, f"oh, {pattern}!", 0.0))

    def fail(self, trial: str = "a", kind: str = "user") -> c.NotifyFailure:  # type: ignore[override]
        attempt = self.runner.live[trial].attempt
        commands = self.tell(m.TrialFailed(trial, attempt, kind, "it went wrong", "", 0.0))
        self.free(trial, attempt)
        (record,) = [one for one in commands if isinstance(one, c.NotifyFailure)]
        return record

    def fail_for(self, pattern: str, kind: str = "user") -> tuple[str, c.NotifyFailure]:
        """Start the trial, let it print this and fail; return its node and the recorded matches."""
        node = self.place()
        self.print_(pattern)
        return node, self.fail(kind=kind)

    def has_place(self) -> bool:
        return self.runner.has_place(self.trial)

    def is_as_replayed(self) -> None:
        """Check that the journal and a snapshot both give this state."""
        assert comparable(replay(self.settings, self.journal_records)) == comparable(self.runner)
        loaded = TrialRunner.load(self.settings, dump(self.runner), self.runner.finished)
        assert comparable(loaded) == comparable(self.runner)
        assert [one.trial_id for one in loaded.waiting()] == [
            one.trial_id for one in self.runner.waiting()
        ]


def test_f23_do_not_retry_makes_a_failure_final_whatever_max_failures_is() -> None:
    farm = Farm()
    _, record = farm.fail_for(ASSERT)
    told = f"not retried, because it printed 'oh, {ASSERT}!', which matches '{ASSERT}'"
    assert (record.retried, record.told) == (False, told)
    summary = farm.runner.summary("a")
    assert (summary.status, summary.reason) == ("ERROR", f"error in the trial's code: {told}")
    farm.is_as_replayed()


def test_log_match_has_no_effect_unless_the_trial_fails() -> None:
    farm = Farm()
    farm.place()
    farm.print_(ASSERT)
    farm.print_(ECC)
    farm.report("a", 1, done=True)
    farm.finish("a")
    farm.free("a")
    summary = farm.runner.summary("a")
    assert (summary.status, summary.num_failures, summary.excluded) == ("TERMINATED", 0, ())


def test_log_match_of_an_attempt_has_no_effect_on_the_next() -> None:
    farm = Farm()
    farm.place()
    farm.print_(ASSERT)
    farm.lose(farm.node())
    farm.place()
    assert farm.trial.matched == {}
    assert farm.fail().retried


def test_log_match_that_is_late_or_of_an_older_attempt_or_unknown_is_dropped() -> None:
    farm = Farm()
    farm.place()
    farm.fail()
    farm.print_(ASSERT)
    farm.place()
    farm.tell(m.LogMatched("a", 1, ASSERT, "of the first attempt", 0.0))
    farm.tell(m.LogMatched("b", 1, ASSERT, "of no trial", 0.0))
    farm.print_("a pattern of the run before")
    assert farm.trial.matched == {}
    assert farm.runner.stale == 3
    assert farm.fail().retried


def test_log_match_text_of_a_node_is_truncated() -> None:
    farm = Farm()
    farm.place()
    farm.tell(m.LogMatched("a", 1, ASSERT, "x" * 10 * LINE_LENGTH, 0.0))
    assert farm.trial.matched == {ASSERT: "x" * LINE_LENGTH}


@pytest.mark.parametrize("kind", ["user", "died", "cuda_memory", "storage"])
def test_f23_exclude_node_retries_elsewhere_and_does_not_count_the_failure(kind: str) -> None:
    farm = Farm(max_failures=0, max_storage_failures=0)
    node, record = farm.fail_for(ECC, kind)
    name = node.partition(".")[0]
    assert (record.retried, record.kind) == (True, kind)
    assert record.told == (
        f"it is not placed on node {name} any more, because it printed 'oh, {ECC}!', which matches "
        f"'{ECC}' (excluded node 1 of at most 2)"
    )
    assert farm.trial.failures == farm.trial.in_a_row == {}
    assert (farm.trial.num_failures, farm.trial.excluded) == (1, [name])
    farm.is_as_replayed()
    assert farm.place() != node
    assert not farm.fail().retried, "a failure on another node counts"


def test_excluded_node_stays_excluded_after_its_restart() -> None:
    farm = Farm(nodes=1)
    farm.fail_for(ECC)
    assert not farm.has_place()
    farm.lose("n1.1", is_dead=True)
    farm.join_as("n1.2")
    assert not farm.has_place()
    assert "n1.2" in farm.runner.shunned_by(farm.trial)
    farm.join_as("n2.1")
    assert farm.place() == "n2.1"


def test_failure_beyond_the_exclusion_limit_counts_and_still_excludes_the_node() -> None:
    farm = Farm(nodes=4, max_failures=1, max_excluded_nodes=2)
    records = [farm.fail_for(ECC)[1] for _ in range(4)]
    assert [one.retried for one in records] == [True, True, True, False]
    assert records[2].told.startswith("failure 1 of at most 2; it is not placed on node")
    assert farm.runner.summary("a").failures == {"user": 2}
    assert len(farm.runner.summary("a").excluded) == 4


@pytest.mark.parametrize(("limit", "excused"), [(0, 0), (-1, 3)])
def test_exclusion_limit_may_be_zero_or_any_number(limit: int, excused: int) -> None:
    farm = Farm(nodes=3, max_excluded_nodes=limit)
    for _ in range(3):
        assert farm.fail_for(ECC)[1].retried
    assert farm.trial.excused == excused
    assert not farm.has_place()


def test_time_limit_failure_is_not_excused_by_exclude_node() -> None:
    farm = Farm()
    assert not farm.fail_for(ECC, "trial_limit")[1].retried
    assert farm.runner.summary("a").excluded == ()


def test_do_not_retry_wins_over_exclude_node() -> None:
    farm = Farm()
    farm.place()
    farm.print_(ECC)
    farm.print_(ASSERT)
    assert not farm.fail().retried


def test_trial_of_a_farm_waits_for_another_node_and_others_use_the_excluded_one() -> None:
    request = {"cpu": 1.0}
    farm = Farm(nodes=1, request=request)
    assert farm.fail_for(ECC)[1].retried
    assert farm.runner.shuns_all(farm.trial)
    assert farm.runner.wants_config(), "a trial that excludes nodes blocks no other"
    assert SlotDemand(request, 1, "", ("n1.1",)) in farm.runner.usage().wants
    assert farm.start("b").instance_id == "n1.1"
    assert farm.trial.status == PENDING


def test_trial_without_another_node_ends_with_the_reason() -> None:
    farm = Farm(nodes=1, nodes_may_come=False)
    _, record = farm.fail_for(ECC)
    assert not record.retried
    assert record.told.endswith("and no other node can hold it")
    assert farm.runner.summary("a").status == "ERROR"


def test_trial_waits_for_an_away_node_but_not_for_one_that_is_too_small() -> None:
    farm = Farm(nodes=2, nodes_may_come=False)
    node = farm.place()
    other = next(one for one in farm.runner.nodes if one != node)
    farm.lose(other)
    farm.print_(ECC)
    assert farm.fail().retried
    farm = Farm(nodes=1, nodes_may_come=False)
    farm.join_as("small.1", resources={"cpu": 0.5})
    assert not farm.fail_for(ECC)[1].retried


def test_node_that_several_trials_exclude_is_set_aside() -> None:
    farm = Farm(nodes=0)
    farm.join_as("bad.1", resources={"cpu": 4.0})
    told: list[c.Command] = []
    for number in range(TRIALS_IN_A_ROW):
        trial = f"t{number}"
        farm.start(trial)
        farm.print_(ECC, trial)
        # A failure of class "user" alone would not count against a node.
        told += farm.tell(m.TrialFailed(trial, 1, "user", "unlucky", "", 0.0))
        farm.free(trial)
    assert farm.runner.health["bad"].reason == "unlucky"
    assert any(isinstance(one, c.WarnFailingNode) for one in told)
    assert "bad.1" in farm.runner.aside


def test_trial_that_begins_anew_excludes_no_node() -> None:
    farm = Farm(nodes=1, nodes_may_come=False)
    farm.fail_for(ECC)
    farm.tell(m.ExperimentResumed(2, 0.0, errored="resume", is_cold=False))
    assert farm.trial.excluded == []
    assert farm.has_place()


@pytest.mark.parametrize("seed", range(30))
def test_random_events_start_no_trial_on_an_excluded_node_and_replay_alike(
    seed: int,
) -> None:
    draw = random.Random(seed)
    farm = Farm(nodes=3, max_failures=3, max_excluded_nodes=2)
    for number in range(5):
        farm.add(f"t{number}")
    times = dict.fromkeys(("n1", "n2", "n3"), 1)
    for _ in range(80):
        runner = farm.runner
        farm.tell(m.Tick(runner.elapsed + draw.choice([0.0, 1.0, 70.0])))
        waiting = list(runner.waiting())
        running = [one for one in runner.live.values() if one.status == "RUNNING"]
        what = draw.random()
        if what < 0.1:
            name = draw.choice(list(times))
            farm.lose(f"{name}.{times[name]}", is_dead=True)
            times[name] += 1
            farm.join_as(f"{name}.{times[name]}")
        elif what < 0.5 and waiting:
            trial = draw.choice(waiting)
            excluded = list(trial.excluded)
            instance_id = farm.choose(trial.trial_id).instance_id
            assert instance_id.partition(".")[0] not in excluded
        elif running:
            trial = draw.choice(running)
            if draw.random() < 0.5:
                farm.print_(draw.choice([ECC, ECC, ECC, ASSERT]), trial.trial_id)
            elif draw.random() < 0.2:
                farm.report(trial.trial_id, trial.last_step + 1, attempt=trial.attempt)
            else:
                farm.fail(trial.trial_id)
    farm.is_as_replayed()
    auditor = JournalAuditor(farm.settings)
    for entry in farm.journal_records:
        auditor.event(entry.event, entry.answers)
    auditor.same_as(farm.runner)
