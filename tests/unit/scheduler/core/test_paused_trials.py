"""The pure runner: pausing and resuming trials."""

from __future__ import annotations

import pytest

from tests.unit.scheduler.scripted_runner import NODE, TO_THE_END, Story, kinds, result
from tunemq.testing.comparable_state import comparable
from tunemq.testing.journal_replay import replay
from tunemq_scheduler.core import commands as c
from tunemq_scheduler.core.trial_decisions import TrialDecision
from tunemq_scheduler.core.trials.trial import ResultReview
from tunemq_shared.protocol import messages as m
from tunemq_shared.protocol.result_conditions import Condition

PAUSE = m.DecisionMade("a", 1, m.PAUSE, "others first")
UP_TO_5 = (Condition("training_iteration", 5),)


def pausing(**settings: object) -> Story:
    story = Story(cpus=1.0, **settings)
    story.start("a")
    story.report("a", 1, PAUSE, m.HorizonSet("a", UP_TO_5))
    return story


def status(story: Story, trial: str = "a") -> str:
    return story.runner.summary(trial).status


@pytest.mark.parity(130)
def test_pausing_trial_saves_and_then_frees_its_slot() -> None:
    story = Story(cpus=1.0)
    story.start("a")
    assert story.report("a", 1, PAUSE) == [
        c.NotifyResult(
            "a", result("a", 1), done=False, decisions=(TrialDecision(1, m.PAUSE, "others first"),)
        ),
        c.PauseTrial("a", 1, NODE),
    ]
    assert status(story) == "RUNNING"
    story.write("a", 1)
    assert story.tell(m.TrialPaused("a", 1)) == []
    assert status(story) == "PAUSED"
    assert list(story.runner.waiting()) == [], "its trial process still runs"
    assert story.free("a") == [c.ReleaseTrial("a", 1, NODE)]
    assert [trial.trial_id for trial in story.runner.waiting()] == ["a"]
    assert story.runner.placement.free == {"cpu": 1.0}
    assert not story.runner.is_finished


def test_paused_trial_continues_as_a_new_attempt_up_to_its_next_horizon() -> None:
    story = pausing()
    story.write("a", 1)
    story.paused("a")
    story.free("a")
    order = story.choose("a")
    assert (order.attempt, order.run_until, order.last_step) == (2, UP_TO_5, 1)
    assert [ref.key for ref in order.restore] == ["a/1-1"]
    assert status(story) == "RUNNING"
    assert kinds(story.report("a", 2, attempt=2)) == ["NotifyResult"]


def test_trial_given_back_by_its_node_before_it_began_waits_for_a_slot() -> None:
    story = Story(cpus=1.0)
    story.start("a")
    story.tell(m.TrialWaits("a", 1, "device", "GPU A: memory not released"))
    story.paused("a")
    story.free("a")
    assert status(story) == "PENDING"
    trial = story.runner.live["a"]
    assert (trial.num_failures, trial.failures, trial.waits) == (0, {}, ("", ""))
    assert story.choose("a").attempt == 2


@pytest.mark.parity(140)
def test_result_in_flight_while_its_trial_pauses_is_recorded_without_a_decision() -> None:
    story = pausing()
    assert story.runner.review(result("a", 7)) is ResultReview.BEFORE_HORIZON
    assert kinds(story.report("a", 2)) == ["NotifyResult"]
    story.paused("a")
    story.free("a")
    assert story.choose("a").last_step == 2


def test_pausing_trial_that_reaches_its_end_finishes() -> None:
    story = pausing()
    story.report("a", 2, done=True)
    assert kinds(story.finish("a")) == ["NotifyTrialEnd"]
    other = pausing()
    other.report("a", 2, done=True)
    (end,) = other.paused("a")
    assert end == c.NotifyTrialEnd("a", "TERMINATED", "it reached its end")


@pytest.mark.parity(130)
def test_failure_while_pausing_is_counted_and_the_trial_is_paused_without_its_process() -> None:
    story = pausing(max_failures=1)
    assert kinds(story.die("a")) == ["NotifyFailure"]
    assert status(story) == "PAUSED"
    story.free("a")
    assert story.runner.placement.free == {"cpu": 1.0}
    assert story.choose("a").restore == ()
    assert story.report("a", 1, attempt=2) == [], "repeated steps are not reported"


@pytest.mark.parity(130)
def test_failure_beyond_the_budget_while_pausing_is_an_error_and_frees_the_slot() -> None:
    story = pausing(max_failures=0)
    assert kinds(story.fail("a")) == ["NotifyFailure", "NotifyTrialEnd"]
    story.free("a")
    assert status(story) == "ERROR"
    assert story.runner.placement.free == {"cpu": 1.0}


def test_trial_process_killed_while_pausing_leaves_a_paused_trial() -> None:
    story = pausing()
    assert story.free("a") == [c.ReleaseTrial("a", 1, NODE)]
    assert status(story) == "PAUSED"
    assert story.runner.live["a"].num_failures == 0


def test_node_lost_while_pausing_leaves_a_paused_trial() -> None:
    story = pausing()
    story.lose()
    assert status(story) == "PAUSED"
    assert story.runner.counts["PAUSED"] == 1


def test_stop_request_ends_a_paused_trial_and_a_pausing_one() -> None:
    story = pausing()
    story.paused("a")
    (end,) = story.tell(m.StopRequested("a", "enough"))
    assert end == c.NotifyTrialEnd("a", "TERMINATED", "enough", early=True, had_run=False)
    other = pausing()
    assert kinds(other.tell(m.StopRequested(None, "enough"))) == ["StopTrial"]
    assert other.paused("a") == [c.NotifyTrialEnd("a", "TERMINATED", "enough", early=True)]


def test_interrupt_leaves_a_pausing_trial_paused() -> None:
    story = pausing()
    assert story.tell(m.RunInterrupted("Ctrl-C")) == [c.StopTrial("a", 1, NODE)]
    assert status(story) == "PAUSED"
    assert story.paused("a") == []
    story.free("a")
    assert story.runner.is_finished


@pytest.mark.parity(130)
def test_trial_ordered_to_pause_while_its_search_is_interrupted_is_paused() -> None:
    story = Story(cpus=1.0)
    story.start("a")
    story.tell(m.RunInterrupted("Ctrl-C"))
    assert status(story) == "PENDING"
    # The runner has ordered the trial to pause; results sent before the order arrived count.
    assert kinds(story.report("a", 1, PAUSE, m.HorizonSet("a", UP_TO_5))) == ["NotifyResult"]
    assert status(story) == "PAUSED"
    assert story.runner.counts == {**dict.fromkeys(story.runner.counts, 0), "PAUSED": 1}
    assert story.runner.review(result("a", 7)) is ResultReview.BEFORE_HORIZON, (
        "the algorithms are not asked again"
    )
    assert kinds(story.report("a", 2)) == ["NotifyResult"]
    assert story.paused("a") == []
    story.free("a")
    assert story.runner.is_finished
    again = replay(story.settings, m.decode_records(m.encode(story.journal_records)))
    assert comparable(again) == comparable(story.runner)

    story.tell(m.ExperimentResumed(2, 0.0))
    story.join("node.2", 1.0)
    assert status(story) == "PAUSED", "only its scheduler resumes it"
    assert [trial.trial_id for trial in story.runner.waiting()] == ["a"]
    order = story.choose("a")
    assert (order.attempt, order.run_until, order.last_step) == (2, UP_TO_5, 2)


def test_runnable_trials_list_new_trials_before_paused_ones() -> None:
    story = Story(cpus=3.0)
    for trial in ("a", "b"):
        story.start(trial)
        story.pause(trial, 1)
        story.paused(trial)
        story.free(trial)
    story.add("c")
    assert [trial.trial_id for trial in story.runner.waiting()] == ["c", "a", "b"]


def test_paused_trial_keeps_no_slot_from_the_search() -> None:
    story = Story(cpus=1.0, request={"cpu": 1.0})
    story.start("a")
    story.pause("a", 1)
    story.paused("a")
    story.free("a")
    assert story.runner.wants_config()


def test_trial_that_pauses_without_an_order_waits_for_a_slot() -> None:
    story = Story()
    story.start("a", TO_THE_END)
    story.report("a", 1)
    story.paused("a")  # for instance because its node is drained
    assert status(story) == "PENDING"


def test_pause_event_of_an_older_attempt_changes_nothing() -> None:
    story = pausing()
    story.paused("a")
    story.free("a")
    story.choose("a")
    assert story.paused("a", attempt=1) == []
    assert status(story) == "RUNNING"


@pytest.mark.parity(118, 120)
def test_trial_loaded_while_pausing_or_paused_is_unchanged() -> None:
    story = pausing()
    again = replay(story.settings, m.decode_records(m.encode(story.journal_records)))
    assert comparable(again) == comparable(story.runner)
    assert again.live["a"].pausing == "others first"
    story.write("a", 1)
    story.paused("a")
    again = replay(story.settings, m.decode_records(m.encode(story.journal_records)))
    assert comparable(again) == comparable(story.runner)
    assert again.live["a"].status == "PAUSED"
    assert again.live["a"].has_checkpoint
