"""The pure runner: the commands that follow each event."""

from __future__ import annotations

import pytest

from tests.unit.scheduler.scripted_runner import NODE, TO_THE_END, Story, kinds, result
from tunemq.testing.comparable_state import comparable
from tunemq.testing.journal_replay import replay
from tunemq_scheduler.core import commands as c
from tunemq_scheduler.core.trial_decisions import TrialDecision
from tunemq_scheduler.core.trials.kept_checkpoints import RetentionPolicy
from tunemq_scheduler.core.trials.trial import ResultReview
from tunemq_shared.base.errors import IllegalTransition
from tunemq_shared.protocol import messages as m
from tunemq_shared.protocol.result_conditions import Condition


def test_chosen_trial_starts_its_next_attempt_on_the_node_with_room() -> None:
    story = Story()
    order = story.start("a", TO_THE_END)
    assert (order.trial, order.attempt, order.instance_id, order.run_until) == ("a", 1, NODE, ())
    assert story.runner.counts["RUNNING"] == 1
    assert story.runner.placement.free == {"cpu": 1.0}


@pytest.mark.parity(68, 129)
def test_trial_without_a_horizon_has_every_result_reviewed() -> None:
    story = Story()
    assert story.start("a").run_until == (Condition("training_iteration", 1),)
    assert story.runner.review(result("a", 1)) is ResultReview.DUE
    recorded, go_on = story.report("a", 1)
    assert recorded == c.NotifyResult("a", result("a", 1), done=False)
    assert isinstance(go_on, c.ContinueTrial)
    assert go_on.run_until == (Condition("training_iteration", 2),)


def test_results_before_the_horizon_are_recorded_without_an_order() -> None:
    story = Story()
    story.start("a", m.HorizonSet("a", (Condition("training_iteration", 3),)))
    assert story.runner.review(result("a", 2)) is ResultReview.BEFORE_HORIZON
    assert kinds(story.report("a", 1)) == ["NotifyResult"]
    assert kinds(story.report("a", 2)) == ["NotifyResult"]
    assert kinds(story.report("a", 3)) == ["NotifyResult", "ContinueTrial"]


def test_horizon_that_is_already_reached_does_not_block_the_trial() -> None:
    story = Story()
    story.start("a")
    _, order = story.report("a", 5, m.HorizonSet("a", (Condition("training_iteration", 4),)))
    assert isinstance(order, c.ContinueTrial)
    assert order.run_until == (Condition("training_iteration", 6),)


@pytest.mark.parity(67, 68, 74)
def test_stop_decision_ends_the_trial_and_drops_later_results() -> None:
    story = Story()
    story.start("a")
    commands = story.report("a", 1, m.DecisionMade("a", 1, m.STOP, "too slow"))
    assert commands == [
        c.NotifyResult(
            "a", result("a", 1), done=True, decisions=(TrialDecision(1, m.STOP, "too slow"),)
        ),
        c.StopTrial("a", 1, NODE),
        c.NotifyTrialEnd("a", "TERMINATED", "too slow", early=True),
    ]
    assert story.report("a", 2) == []
    assert story.runner.stale == 1
    assert not story.runner.is_finished


@pytest.mark.parity(53, 128)
def test_slot_is_freed_only_when_the_trial_process_is_gone() -> None:
    story = Story(cpus=1.0)
    story.start("a", TO_THE_END)
    story.report("a", 1, done=True)
    story.finish("a")
    story.add("b")
    assert list(story.runner.waiting()) == []
    assert story.free("a") == [c.ReleaseTrial("a", 1, NODE)]
    assert [trial.trial_id for trial in story.runner.waiting()] == ["b"]


@pytest.mark.parity(65, 175)
def test_result_with_done_is_the_last_and_the_trial_ends_when_all_is_saved() -> None:
    story = Story()
    story.start("a", TO_THE_END)
    assert story.report("a", 1, done=True) == [
        c.NotifyResult("a", result("a", 1, done=True), done=True)
    ]
    assert kinds(story.commit("a", 1)) == ["NotifyCheckpoint"]
    assert story.finish("a") == [c.NotifyTrialEnd("a", "TERMINATED", "it reached its end")]
    assert story.finish("a") == []


def test_final_save_that_fails_is_a_failure_of_the_trial() -> None:
    story = Story()
    story.start("a", TO_THE_END)
    story.report("a", 1, done=True)
    assert kinds(story.fail("a")) == ["NotifyFailure", "NotifyTrialEnd"]
    assert story.runner.live["a"].status == "ERROR"


def test_trial_that_could_not_save_its_final_checkpoint_is_retried() -> None:
    story = Story(max_storage_failures=1)
    story.start("a", TO_THE_END)
    story.report("a", 1)
    story.commit("a", 1)
    story.report("a", 2, done=True)
    story.fail("a")
    assert story.choose("a").restore == (m.CheckpointRef("a/1-1", "hash", 1),)
    assert story.report("a", 2, attempt=2, done=True) == []
    assert kinds(story.commit("a", 2, attempt=2)) == ["NotifyCheckpoint"]
    assert kinds(story.finish("a", attempt=2)) == ["NotifyTrialEnd"]


def test_requested_stop_records_the_trials_remaining_results() -> None:
    story = Story()
    story.start("a", TO_THE_END)
    story.report("a", 1)
    assert story.tell(m.StopRequested("a", "enough")) == [c.StopTrial("a", 1, NODE)]
    assert kinds(story.report("a", 2)) == ["NotifyResult"]
    assert kinds(story.commit("a", 2)) == ["NotifyCheckpoint"]
    end = c.NotifyTrialEnd("a", "TERMINATED", "enough", early=True)
    assert story.free("a") == [c.ReleaseTrial("a", 1, NODE), end]
    assert story.runner.summary("a").checkpoints[-1].step == 2


def test_stop_is_ordered_once_and_ignores_a_failure_meanwhile() -> None:
    story = Story()
    story.start("a")
    story.tell(m.StopRequested("a", "enough"))
    assert story.tell(m.StopRequested(None, "all of it")) == []
    assert story.runner.review(result("a", 1)) is ResultReview.BEFORE_HORIZON
    assert kinds(story.fail("a")) == ["NotifyTrialEnd"]
    assert story.runner.live["a"].status == "TERMINATED"


def test_trial_being_stopped_ends_with_its_node() -> None:
    story = Story()
    story.start("a", TO_THE_END)
    story.tell(m.StopRequested(None, "enough"))
    assert kinds(story.tell(m.NodeLost(NODE, "gone"))) == ["NotifyTrialEnd"]
    assert story.runner.is_finished


@pytest.mark.parity(32, 67, 182)
def test_function_that_returns_without_done_ends_with_its_last_result() -> None:
    story = Story()
    story.start("a", TO_THE_END)
    story.report("a", 1, loss=0.5)
    assert kinds(story.tell(m.TrialFinished("a", 1))) == ["NotifyTrialEnd"]
    story.free("a")
    kept = story.runner.summary("a")
    assert kept.status == "TERMINATED"
    assert kept.last_result is not None
    assert kept.last_result.metrics == {"loss": 0.5}


@pytest.mark.parity(70)
def test_dead_trial_process_is_an_error_when_no_failure_is_allowed() -> None:
    story = Story()
    story.start("a", TO_THE_END)
    failure, end = story.die("a")
    assert isinstance(failure, c.NotifyFailure)
    assert not failure.retried
    assert failure.hostname == "host"
    assert isinstance(end, c.NotifyTrialEnd)
    assert end.status == "ERROR"


@pytest.mark.parity(70, 127)
def test_dead_trial_process_is_restarted_from_the_last_checkpoint() -> None:
    story = Story(max_failures=1)
    story.start("a", TO_THE_END)
    story.report("a", 1)
    story.tell(m.CheckpointCommitted("a", 1, 1, 1, "a/1-1", "hash", 10))
    story.report("a", 2)
    assert kinds(story.die("a")) == ["NotifyFailure"]
    order = story.choose("a")
    assert order.attempt == 2
    assert order.restore == (m.CheckpointRef("a/1-1", "hash", 1),)
    assert order.last_step == 2


def test_repeated_steps_are_counted_and_not_reported() -> None:
    story = Story(max_failures=1)
    story.start("a", TO_THE_END)
    story.report("a", 1)
    story.report("a", 2)
    story.die("a")
    story.choose("a")
    assert story.runner.review(result("a", 2, attempt=2)) is ResultReview.REPEATED
    assert story.report("a", 1, attempt=2) == []
    assert story.report("a", 2, attempt=2) == []
    assert kinds(story.report("a", 3, attempt=2)) == ["NotifyResult"]
    assert story.runner.repeated == 2


def test_events_of_an_older_attempt_change_nothing() -> None:
    story = Story(max_failures=1)
    story.start("a", TO_THE_END)
    story.die("a")
    story.choose("a")
    assert story.report("a", 1, attempt=1) == []
    assert story.die("a", attempt=1) == []
    assert story.tell(m.TrialFinished("a", 1)) == []
    assert story.tell(m.CheckpointCommitted("a", 1, 1, 1, "k", "h", 1)) == [
        c.DeleteCheckpoint("a", "k")
    ]
    assert story.runner.live["a"].status == "RUNNING"


@pytest.mark.parity(95)
def test_first_retry_is_immediate_and_later_ones_wait_longer_without_a_new_result() -> None:
    story = Story(max_failures=-1)
    story.start("a", TO_THE_END)
    waits = []
    for attempt in range(1, 10):
        story.die("a", attempt)
        story.free("a", attempt)
        waits.append(story.runner.live["a"].not_before - story.runner.elapsed)
        story.tell(m.Tick(story.runner.live["a"].not_before))
        story.choose("a")
    assert waits == [0, 1, 2, 4, 8, 16, 32, 60, 60]
    story.report("a", 1, attempt=10)
    story.die("a", 10)
    assert story.runner.live["a"].not_before == story.runner.elapsed


@pytest.mark.parity(71)
def test_trial_that_waits_for_its_retry_is_not_runnable_before_its_time() -> None:
    story = Story(max_failures=-1)
    story.start("a", TO_THE_END)
    for attempt in (1, 2):
        story.die("a", attempt)
        story.free("a", attempt)
        if attempt == 1:
            story.choose("a")
    assert list(story.runner.waiting()) == []
    assert story.runner.next_wake() == 1.0
    story.tell(m.Tick(1.0))
    assert [trial.trial_id for trial in story.runner.waiting()] == ["a"]


def test_fail_fast_stops_the_other_trials() -> None:
    story = Story(fail_fast=True)
    story.start("a", TO_THE_END)
    story.start("b", TO_THE_END)
    assert kinds(story.die("a")) == ["NotifyFailure", "NotifyTrialEnd", "StopTrial"]
    story.free("a")
    assert kinds(story.free("b")) == ["ReleaseTrial", "NotifyTrialEnd"]
    assert story.runner.is_finished


@pytest.mark.parity(71, 141)
def test_lost_node_gives_its_trials_back_without_a_failure() -> None:
    story = Story()
    story.start("a", TO_THE_END)
    story.report("a", 1)
    assert story.tell(m.NodeLost(NODE, "it was started again", is_dead=True)) == [c.DropNode(NODE)]
    assert story.runner.live["a"].status == "PENDING"
    assert story.runner.live["a"].num_failures == 0
    story.tell(m.NodeJoined("node.2", "node", "host", "127.0.0.1", {"cpu": 1.0}))
    order = story.choose("a")
    assert (order.attempt, order.instance_id) == (2, "node.2")


@pytest.mark.parity(74)
def test_stopped_experiment_stops_running_and_waiting_trials() -> None:
    story = Story(cpus=1.0)
    story.start("a", TO_THE_END)
    story.add("b")
    commands = story.tell(m.StopRequested(None, "enough"))
    assert kinds(commands) == ["StopTrial", "NotifyTrialEnd"]
    assert not story.runner.wants_config()
    story.free("a")
    assert story.runner.is_finished


def test_interrupted_search_leaves_its_trials_resumable() -> None:
    story = Story(cpus=1.0)
    story.start("a", TO_THE_END)
    assert story.tell(m.RunInterrupted("Ctrl-C")) == [c.StopTrial("a", 1, NODE)]
    assert kinds(story.report("a", 1)) == ["NotifyResult"]
    story.free("a")
    assert story.runner.is_finished
    assert story.runner.live["a"].status == "PENDING"


@pytest.mark.parity(107, 108)
def test_runner_keeps_the_best_and_newest_checkpoints_and_deletes_the_others() -> None:
    story = Story(keep=RetentionPolicy(num_to_keep=1, score_attribute="acc"))
    story.start("a", TO_THE_END)
    deleted = []
    for step, accuracy in enumerate((0.5, 0.9, 0.7, 0.8), start=1):
        story.report("a", step, acc=accuracy)
        commands = story.tell(m.CheckpointCommitted("a", 1, step, step, f"k{step}", "h", 1))
        deleted += [command.key for command in commands if isinstance(command, c.DeleteCheckpoint)]
    assert deleted == ["k1", "k3"]
    assert [kept.key for kept in story.runner.live["a"].checkpoints.kept()] == ["k2", "k4"]


def test_checkpoint_of_no_trial_of_this_search_is_busy() -> None:
    story = Story()
    story.start("2f1ab_00000", TO_THE_END)
    for kept in (1, 2):
        story.report("2f1ab_00000", kept)
    trial, other = "train_2f1ab_00000", "train_99999_00000"
    committed = m.CheckpointCommitted("2f1ab_00000", 1, 1, 1, f"{trial}/checkpoint_1-1", "h", 10)
    story.tell(committed)
    assert story.runner.is_busy(f"{trial}/checkpoint_1-2")  # its process may be writing it
    story.finish("2f1ab_00000")
    story.free("2f1ab_00000")
    assert story.runner.is_busy(committed.key)
    assert not story.runner.is_busy(f"{trial}/checkpoint_1-2")
    assert story.runner.is_busy(f"{other}/checkpoint_1-1")


def test_checkpoint_of_a_dropped_result_is_deleted() -> None:
    story = Story()
    story.start("a")
    story.report("a", 1, m.DecisionMade("a", 1, m.STOP, "enough"))
    story.report("a", 2)
    late = m.CheckpointCommitted("a", 1, 1, 2, "late", "h", 1)
    assert story.tell(late) == [c.DeleteCheckpoint("a", "late")]
    due = m.CheckpointCommitted("a", 1, 1, 1, "due", "h", 1)
    assert kinds(story.tell(due)) == ["NotifyCheckpoint"]


@pytest.mark.parity(60)
def test_configuration_is_wanted_only_while_a_slot_is_free() -> None:
    story = Story(cpus=2.0, request={"cpu": 1.0})
    assert story.runner.wants_config()
    story.start("a")
    story.start("b")
    assert not story.runner.wants_config()
    story.report("a", 1, done=True)
    story.finish("a")
    story.free("a")
    assert story.runner.wants_config()


@pytest.mark.parity(138)
def test_configurations_are_wanted_up_to_the_number_that_may_run_at_once() -> None:
    story = Story(cpus=8.0, max_concurrent=1)
    story.start("a")
    assert not story.runner.wants_config()


@pytest.mark.parity(80)
def test_illegal_transition_shows_the_history_of_the_trial() -> None:
    story = Story()
    story.start("a", TO_THE_END)
    trial = story.runner.live["a"]
    story.report("a", 7)
    trial.move_to("TERMINATED")
    with pytest.raises(IllegalTransition, match="cannot go from TERMINATED to RUNNING") as caught:
        trial.move_to("RUNNING")
    assert "step=7" in str(caught.value)


def test_trial_whose_process_ends_without_an_event_fails_and_the_others_continue() -> None:
    """A node says always how it ended: it is a bug of TuneMQ, or the node's key forged it."""
    story = Story(max_failures=9)
    story.start("a", TO_THE_END)
    story.start("b", TO_THE_END)
    (failure,) = [one for one in story.free("a") if isinstance(one, c.NotifyFailure)]
    assert failure.kind == "unreported"
    assert not failure.retried
    assert "a" not in story.runner.live
    assert story.free("a") == []  # it is forged twice
    assert story.runner.live["b"].status == "RUNNING"
    story.finish("b")


@pytest.mark.parity(123, 180)
def test_replay_of_all_events_gives_the_same_state() -> None:
    story = Story(max_failures=1, keep=RetentionPolicy(num_to_keep=2))
    story.start("a", TO_THE_END)
    story.start("b")
    story.report("a", 1, loss=float("nan"))
    story.tell(m.CheckpointCommitted("a", 1, 1, 1, "k", "h", 1))
    story.report("b", 1, m.DecisionMade("b", 1, m.STOP, "rung"))
    story.die("a")
    story.free("a")
    story.choose("a")
    story.tell(m.BatchRead(NODE, 1, 6, "5-0"))
    story.free("b")
    again = replay(story.settings, m.decode_records(m.encode(story.journal_records)))
    assert comparable(again) == comparable(story.runner)
    story.report("a", 2, attempt=2)
    assert comparable(again) != comparable(story.runner)


def test_trial_that_waits_for_its_retry_keeps_no_slot_from_the_search() -> None:
    story = Story(max_failures=-1, request={"cpu": 1.0})
    story.start("a", TO_THE_END)
    for attempt in (1, 2):
        story.die("a", attempt)
        story.free("a", attempt)
        if attempt == 1:
            assert not story.runner.wants_config(), (
                "the trial may be retried at once and comes first"
            )
            story.choose("a")
    assert story.runner.live["a"].not_before > story.runner.elapsed
    assert story.runner.wants_config()
    story.tell(m.Tick(story.runner.live["a"].not_before))
    assert not story.runner.wants_config()


def test_checkpoint_of_a_repeated_step_is_not_ranked_by_the_newest_result() -> None:
    story = Story(max_failures=1, keep=RetentionPolicy(num_to_keep=1, score_attribute="acc"))
    story.start("a", TO_THE_END)
    story.report("a", 1, acc=0.1)
    story.report("a", 2, acc=0.9)
    story.die("a")
    story.choose("a")
    story.report("a", 1, attempt=2, acc=0.1)
    story.tell(m.CheckpointCommitted("a", 2, 1, 1, "repeated", "h", 1))
    assert [kept.key for kept in story.runner.live["a"].checkpoints.kept()] == ["repeated"]
    story.report("a", 3, attempt=2, acc=0.5)
    story.tell(m.CheckpointCommitted("a", 2, 2, 3, "better", "h", 1))
    story.report("a", 4, attempt=2, acc=0.4)
    story.tell(m.CheckpointCommitted("a", 2, 3, 4, "newest", "h", 1))
    kept = [kept.key for kept in story.runner.live["a"].checkpoints.kept()]
    assert kept == ["better", "newest"]


def test_trial_can_be_retried_thousands_of_times() -> None:
    story = Story(max_failures=-1)
    story.start("a", TO_THE_END)
    for attempt in range(1, 1500):
        story.die("a", attempt)
        story.free("a", attempt)
        story.tell(m.Tick(story.runner.live["a"].not_before))
        story.choose("a")
    story.die("a", 1500)
    assert story.runner.live["a"].not_before == story.runner.elapsed + 60.0
