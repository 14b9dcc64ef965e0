"""The pure runner: a trial continues from the state of another one (EXPLOIT)."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from tests.unit.scheduler.scripted_runner import NODE, TO_THE_END, Story, kinds, result
from tunemq.testing.comparable_state import comparable
from tunemq.testing.journal_replay import replay
from tunemq_scheduler.core import commands as c
from tunemq_scheduler.core.runner_snapshot import dump
from tunemq_scheduler.core.trial_runner import TrialRunner
from tunemq_scheduler.core.trials.kept_checkpoints import RetentionPolicy
from tunemq_scheduler.core.trials.trial import STATE, ResultReview
from tunemq_shared.base.errors import BugError
from tunemq_shared.protocol import messages as m

CONFIG = b"another configuration"


@pytest.fixture
def story() -> Iterator[Story]:
    """Run the trials "good", which announced a checkpoint at step 4, and "bad", at step 3."""
    story = Story(
        cpus=8.0, max_failures=3, max_storage_failures=3, keep=RetentionPolicy(num_to_keep=1)
    )
    for trial, step in (("good", 4), ("bad", 3)):
        story.start(trial, TO_THE_END)
        for one in range(1, step + 1):
            story.tell(result(trial, one, is_saved=one == step))
    yield story
    again = replay(story.settings, m.decode_records(m.encode(story.journal_records)))
    assert comparable(again) == comparable(story.runner)


def exploit(
    story: Story,
    trial: str = "bad",
    source: str = "good",
    key: str = "",
    *,
    ends: bool = True,
) -> list[str]:
    """Let a trial continue from another; if ``ends``, the process that it left ends at once."""
    attempt = story.runner.live[trial].attempt
    event = m.ActionTaken(trial, m.EXPLOIT, "it is better", source, key, CONFIG)
    told = kinds(story.tell(event, m.HorizonSet(trial, ())))
    if "StopTrial" in told and ends:
        story.free(trial, attempt=attempt)
    return told


def restored(order: c.StartTrial) -> list[str]:
    return [ref.key for ref in order.restore]


def test_trial_that_exploits_ends_its_process_and_waits_for_the_announced_checkpoint(
    story: Story,
) -> None:
    assert exploit(story) == ["StopTrial"]
    bad = story.runner.live["bad"]
    assert (bad.status, bad.lineage, bad.last_step) == ("PENDING", 1, 4)
    assert bad.waits == (STATE, "trial good")
    assert list(story.runner.waiting()) == []
    story.write("good", 4)
    assert list(story.runner.waiting()) == []
    story.commit("good", 4)
    assert [one.trial_id for one in story.runner.waiting()] == ["bad"]
    order = story.choose("bad")
    assert (order.config, order.last_step, restored(order)) == (CONFIG, 4, ["good/1-4"])
    assert order.attempt == 3  # later than all that its first lineage may have begun


def test_results_of_the_lineage_before_count_no_more_and_those_behind_the_state_do(
    story: Story,
) -> None:
    story.write("good", 4)
    story.commit("good", 4)
    exploit(story)
    assert story.runner.review(result("bad", 4)) is ResultReview.STALE
    story.choose("bad")
    assert story.runner.review(result("bad", 4, attempt=3)) is ResultReview.REPEATED
    assert story.runner.review(result("bad", 5, attempt=3)) is ResultReview.BEFORE_HORIZON
    story.report("bad", 5, attempt=3)
    assert story.runner.live["bad"].last_step == 5


def test_state_is_kept_until_the_trial_has_saved_a_checkpoint(story: Story) -> None:
    story.write("good", 4)
    story.commit("good", 4)
    exploit(story)
    story.tell(result("good", 5, is_saved=True))
    story.write("good", 5)
    assert "DeleteCheckpoint" not in kinds(story.commit("good", 5))  # num_to_keep is 1
    story.choose("bad")
    story.die("bad", attempt=3)
    story.free("bad", attempt=3)
    order = story.choose("bad")
    assert restored(order) == ["good/1-4"]
    story.report("bad", 5, attempt=4)
    story.write("bad", 5, attempt=4)
    assert kinds(story.commit("bad", 5, attempt=4)) == ["NotifyCheckpoint", "DeleteCheckpoint"]


def good_saves_step_5(story: Story) -> list[str]:
    story.tell(result("good", 5, is_saved=True))
    story.write("good", 5)
    return kinds(story.commit("good", 5))  # num_to_keep is 1


def test_trial_that_ends_before_its_first_checkpoint_has_the_one_that_it_inherited(
    story: Story,
) -> None:
    story.write("good", 4)
    story.commit("good", 4)
    exploit(story)
    story.choose("bad")
    story.report("bad", 5, attempt=3)
    story.tell(m.StopRequested("bad", "enough"))
    story.free("bad", attempt=3)
    summary = story.runner.summary("bad")
    assert (summary.status, summary.checkpoint and summary.checkpoint.key) == (
        "TERMINATED",
        "good/1-4",
    )
    assert "DeleteCheckpoint" not in good_saves_step_5(story)
    assert "good/1-4" in story.runner.live_checkpoints()
    story.tell(m.ExperimentResumed(2, 0.0, is_cold=False, also=("bad",)))
    order = story.choose("bad")
    assert (order.last_step, restored(order), order.config) == (5, ["good/1-4"], CONFIG)


def test_state_is_kept_while_the_process_that_the_trial_left_ends(story: Story) -> None:
    story.write("good", 4)
    story.commit("good", 4)
    exploit(story, ends=False)
    assert "DeleteCheckpoint" not in good_saves_step_5(story)
    assert list(story.runner.waiting()) == []
    story.free("bad")
    assert restored(story.choose("bad")) == ["good/1-4"]


def test_state_that_comes_while_the_process_that_the_trial_left_ends_is_kept(story: Story) -> None:
    exploit(story, ends=False)
    story.write("good", 4)
    assert "StateTaken" in kinds(story.commit("good", 4))
    assert "DeleteCheckpoint" not in good_saves_step_5(story)
    story.free("bad")
    assert restored(story.choose("bad")) == ["good/1-4"]


def test_trial_that_ended_while_it_waited_for_a_state_waits_again_when_it_runs_again(
    story: Story,
) -> None:
    exploit(story)
    story.tell(m.StopRequested("bad", "enough"))
    assert story.runner.summary("bad").checkpoint is None
    story.tell(m.ExperimentResumed(2, 0.0, is_cold=False, also=("bad",)))
    bad = story.runner.live["bad"]
    assert (bad.waits, bad.lineage) == ((STATE, "trial good"), 1)
    assert list(story.runner.waiting()) == []
    story.write("good", 4)
    story.commit("good", 4)
    assert restored(story.choose("bad")) == ["good/1-4"]


def test_result_keeps_its_configuration_and_checkpoint_until_the_next_one(story: Story) -> None:
    before = story.runner.live["bad"].config
    story.tell(result("bad", 4, is_saved=True))
    story.write("bad", 4)
    story.commit("bad", 4)
    story.write("good", 4)
    story.commit("good", 4)
    exploit(story)
    story.choose("bad")
    summary = story.runner.summary("bad")
    assert (summary.config, summary.reported_config) == (CONFIG, before)
    assert summary.checkpoint
    assert summary.checkpoint.key == "bad/1-4"
    story.report("bad", 5, attempt=3)
    summary = story.runner.summary("bad")
    assert (summary.config, summary.reported_config) == (CONFIG, CONFIG)
    assert summary.checkpoint
    assert summary.checkpoint.key == "good/1-4"
    story.write("bad", 5, attempt=3)
    story.commit("bad", 5, attempt=3)
    summary = story.runner.summary("bad")
    assert summary.checkpoint
    assert summary.checkpoint.key == "bad/3-5"


def test_checkpoint_that_the_trial_left_behind_is_kept_and_not_continued_from(
    story: Story,
) -> None:
    story.write("good", 4)
    story.commit("good", 4)
    exploit(story, ends=False)
    story.write("bad", 3)
    assert kinds(story.commit("bad", 3)) == ["NotifyCheckpoint"]
    assert list(story.runner.waiting()) == []
    story.free("bad")
    order = story.choose("bad")
    assert restored(order) == ["good/1-4"]


def test_trial_keeps_its_own_state_if_the_inherited_one_is_damaged(story: Story) -> None:
    story.write("good", 4)
    story.commit("good", 4)
    exploit(story, ends=False)
    story.write("bad", 3)
    story.free("bad")
    assert restored(story.choose("bad")) == ["good/1-4"]
    story.tell(m.CheckpointDamaged("bad", 3, "good/1-4", "its hash differs", ""))
    story.tell(m.TrialFailed("bad", 3, "restore", "", "", 0.0))
    story.free("bad", attempt=3)
    assert list(story.runner.waiting()) == []
    story.commit("bad", 3)
    order = story.choose("bad")
    assert (order.last_step, restored(order)) == (3, ["bad/1-3"])
    story.tell(m.CheckpointDamaged("bad", 4, "bad/1-3", "its hash differs, too", ""))
    story.tell(m.TrialFailed("bad", 4, "restore", "", "", 0.0))
    order = story.choose("bad")
    assert (order.last_step, restored(order)) == (0, [])


def test_source_that_lost_its_checkpoint_is_waited_for_while_it_writes_that_again(
    story: Story,
) -> None:
    exploit(story)
    story.write("good", 4)
    story.lose(is_dead=True)
    assert story.runner.live["bad"].awaits_state
    story.join("node.2", 8.0)
    story.choose("good")
    for step in (1, 2, 3, 4):
        story.report("good", step, attempt=2)
        assert story.runner.live["bad"].awaits_state
    story.write("good", 4, attempt=2)
    story.commit("good", 4, attempt=2)
    assert restored(story.choose("bad")) == ["good/2-4"]


@pytest.mark.parametrize("end", ["stop", "further", "exploited"])
def test_trial_keeps_its_own_state_if_the_source_saves_nothing(story: Story, end: str) -> None:
    story.write("bad", 3)
    story.commit("bad", 3)
    exploit(story)
    if end == "stop":
        commands = story.tell(m.StopRequested("good", "enough")) + story.free("good")
    elif end == "further":
        commands = story.report("good", 5)
    else:
        story.start("third", TO_THE_END)
        story.tell(result("third", 1, is_saved=True))
        story.tell(m.ActionTaken("good", m.EXPLOIT, "", "third"))
        commands = story.free("good")
    assert c.WarnStateLost("bad", "good", 0) in commands
    order = story.choose("bad")
    assert (order.last_step, restored(order), order.config) == (3, ["bad/1-3"], CONFIG)


def test_older_checkpoint_is_taken_if_the_announced_one_is_lost(story: Story) -> None:
    story.tell(result("good", 5, is_saved=True))
    exploit(story)
    story.write("good", 4)
    story.commit("good", 4)
    story.write("good", 5)
    story.give_up("good", 5)
    assert story.runner.live["bad"].awaits_state  # its process may fail, and repeat the step
    story.report("good", 6)
    order = story.choose("bad")
    assert (order.last_step, restored(order)) == (4, ["good/1-4"])


def test_paused_source_gives_the_state_that_its_pause_saves(story: Story) -> None:
    story.report("good", 5)
    story.tell(m.ActionTaken("good", m.PAUSE, ""))
    exploit(story)
    assert story.runner.live["bad"].last_step == 5
    story.write("good", 5)
    story.paused("good")
    story.free("good")
    assert story.runner.live["bad"].awaits_state
    story.commit("good", 5)
    assert restored(story.choose("bad")) == ["good/1-5"]


def test_paused_trial_stays_paused_and_takes_the_state(story: Story) -> None:
    story.tell(m.ActionTaken("bad", m.PAUSE, ""))
    story.paused("bad")
    story.free("bad")
    story.write("good", 4)
    story.commit("good", 4)
    assert exploit(story) == ["StateTaken"]
    assert story.runner.live["bad"].status == "PAUSED"
    assert restored(story.choose("bad")) == ["good/1-4"]


def test_trial_whose_state_is_inherited_can_be_the_source_of_another(story: Story) -> None:
    story.start("third", TO_THE_END)
    exploit(story)
    exploit(story, "third", "bad")
    story.write("good", 4)
    story.commit("good", 4)
    assert {one.trial_id for one in story.runner.waiting()} == {"bad", "third"}
    assert restored(story.choose("third")) == ["good/1-4"]


def test_trials_that_exploit_each_other_both_continue(story: Story) -> None:
    exploit(story, "bad", "good")
    exploit(story, "good", "bad", ends=False)
    story.write("good", 4)
    story.commit("good", 4)
    story.free("good")
    assert restored(story.choose("bad")) == ["good/1-4"]
    assert {one.trial_id for one in story.runner.waiting()} == {"good"}


def test_named_checkpoint_is_taken_and_an_unknown_one_is_refused(story: Story) -> None:
    story.write("good", 4)
    story.commit("good", 4)
    exploit(story, key="good/1-4")
    assert restored(story.choose("bad")) == ["good/1-4"]
    with pytest.raises(KeyError):
        story.runner.handle(m.ActionTaken("bad", m.EXPLOIT, "", "good", "good/1-9"))


def test_trial_that_waits_for_a_state_waits_after_a_restart(story: Story) -> None:
    exploit(story)
    again = TrialRunner.load(story.settings, dump(story.runner), {})
    assert comparable(again) == comparable(story.runner)
    written = m.CheckpointWritten("good", 1, 4, 4, "good/1-4", "disk", 10)
    again.handle(written)
    again.handle(m.CheckpointCommitted("good", 1, 4, 4, "good/1-4", "hash", 10))
    assert [one.trial_id for one in again.waiting()] == ["bad"]


def test_process_that_a_trial_left_is_killed_where_its_node_was_away(story: Story) -> None:
    story.lose()
    exploit(story)
    orders = [one for one in story.hear_again() if isinstance(one, c.ReattachTrial)]
    assert [one.is_wanted for one in orders if one.start.trial == "bad"] == [False]


def test_configuration_of_a_running_trial_changes_with_a_new_attempt(story: Story) -> None:
    event = m.ActionTaken("bad", m.SET_CONFIG, "", config=CONFIG)
    assert story.tell(event) == [c.PauseTrial("bad", 1, NODE)]
    story.write("bad", 3)
    story.commit("bad", 3)
    story.paused("bad")
    story.free("bad")
    order = story.choose("bad")
    assert (order.config, order.last_step, restored(order)) == (CONFIG, 3, ["bad/1-3"])
    assert story.runner.live["bad"].lineage == 0


def test_request_of_a_running_trial_changes_with_a_new_attempt(story: Story) -> None:
    assert story.tell(m.ActionTaken("bad", m.SET_RESOURCES, "", resources={"cpu": 2.0})) == [
        c.PauseTrial("bad", 1, NODE)
    ]
    story.paused("bad")
    story.free("bad")
    assert story.choose("bad").resources == {"cpu": 2.0}


def test_unknown_action_is_an_error(story: Story) -> None:
    with pytest.raises(BugError, match="no action 'DANCE'"):
        story.runner.handle(m.ActionTaken("bad", "DANCE", ""))


def test_failed_trial_that_runs_again_continues_from_the_state_that_it_inherited() -> None:
    story = Story(cpus=8.0)
    for trial in ("good", "bad"):
        story.start(trial, TO_THE_END)
        story.tell(result(trial, 1, is_saved=True))
        story.write(trial, 1)
        story.commit(trial, 1)
    story.report("good", 2)
    story.write("good", 2)
    story.commit("good", 2)
    exploit(story)
    order = story.choose("bad")
    story.tell(m.TrialFailed("bad", order.attempt, "user", "", "", 0.0))
    story.free("bad")
    story.free("bad", attempt=order.attempt)
    assert story.runner.summary("bad").status == "ERROR"
    story.tell(m.ExperimentResumed(2, 0.0, errored="resume"))
    story.join("node.3")
    order = story.choose("bad")
    assert (order.last_step, restored(order), order.config) == (2, ["good/1-2"], CONFIG)


def test_late_save_of_the_attempt_that_was_left_does_not_replace_a_newer_checkpoint(
    story: Story,
) -> None:
    story.write("good", 4)
    story.commit("good", 4)
    exploit(story, ends=False)
    story.write("bad", 3)
    story.free("bad")
    order = story.choose("bad")
    story.report("bad", 5, attempt=order.attempt)
    story.write("bad", 5, attempt=order.attempt)
    story.commit("bad", 5, attempt=order.attempt)
    story.commit("bad", 3)
    story.die("bad", attempt=order.attempt)
    story.free("bad", attempt=order.attempt)
    assert restored(story.choose("bad"))[0] == "bad/3-5"


def test_trial_does_not_wait_for_an_upload_of_a_node_that_stays_silent(story: Story) -> None:
    story.write("bad", 3)
    exploit(story)
    story.tell(m.StopRequested("good", "enough"))
    story.free("good")
    story.lose()
    story.join("node.2", 8.0)
    assert story.runner.live["bad"].awaits_state
    story.tell(m.Tick(119.0))
    assert story.runner.live["bad"].awaits_state
    told = story.tell(m.Tick(121.0))
    assert c.WarnStateLost("bad", "bad", 0) in told
    (order,) = [one for one in story.tell(m.TrialChosen("bad")) if isinstance(one, c.StartTrial)]
    assert (order.last_step, restored(order), order.config) == (0, [], CONFIG)


def test_source_whose_node_is_silent_while_it_pauses_still_gives_its_newest_state(
    story: Story,
) -> None:
    story.write("good", 4)
    story.commit("good", 4)
    story.report("good", 5)
    story.tell(m.ActionTaken("good", m.PAUSE, ""))
    exploit(story)
    story.lose()
    assert story.runner.live["bad"].awaits_state
    story.hear_again()
    story.write("good", 5)
    story.paused("good")
    story.commit("good", 5)
    assert restored(story.choose("bad")) == ["good/1-5"]


@pytest.mark.parametrize("failure", ["die", "lose"])
def test_source_that_dies_while_it_pauses_is_not_taken_for_one_that_saves_nothing(
    story: Story, failure: str
) -> None:
    story.start("third", TO_THE_END)
    story.report("third", 1)
    story.tell(m.ActionTaken("third", m.PAUSE, ""))
    exploit(story, source="third")
    told = story.die("third") if failure == "die" else story.lose(is_dead=True)
    assert [one.has_none for one in told if isinstance(one, c.WarnStateLost)] == [False, False]


def test_source_that_pauses_and_has_never_saved_is_found_out(story: Story) -> None:
    story.start("third", TO_THE_END)
    story.report("third", 1)
    story.tell(m.ActionTaken("third", m.PAUSE, ""))
    exploit(story, source="third")
    told = story.paused("third")
    assert c.WarnStateLost("bad", "third", 0, has_none=True) in told


def test_changed_configuration_reaches_a_trial_whose_node_was_silent(story: Story) -> None:
    story.lose()
    story.tell(m.ActionTaken("bad", m.SET_CONFIG, "", config=CONFIG))
    orders = [one for one in story.hear_again() if isinstance(one, c.ReattachTrial)]
    assert [one.is_wanted for one in orders if one.start.trial == "bad"] == [False]
    assert story.choose("bad").config == CONFIG


def test_checkpoint_of_an_earlier_lineage_can_be_named(story: Story) -> None:
    story.write("good", 4)
    story.commit("good", 4)
    story.write("bad", 3)
    story.commit("bad", 3)
    exploit(story)
    order = story.choose("bad")
    story.report("bad", 5, attempt=order.attempt)
    exploit(story, source="bad", key="bad/1-3")
    order = story.choose("bad")
    assert (order.last_step, restored(order)) == (3, ["bad/1-3"])
