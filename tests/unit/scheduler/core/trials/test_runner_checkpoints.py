"""The pure runner: checkpoints that are written, committed and removed."""

from __future__ import annotations

import pytest

from tests.unit.scheduler.scripted_runner import NODE, TO_THE_END, Story, kinds
from tunemq.testing.comparable_state import comparable
from tunemq.testing.journal_replay import replay
from tunemq_scheduler.core import commands as c
from tunemq_scheduler.core.failure_policy import classify
from tunemq_scheduler.core.trials.kept_checkpoints import RetentionPolicy
from tunemq_shared.protocol import messages as m

OTHER = "node.2"


def running(**settings: object) -> Story:
    """Run a trial that reports twice, writes two checkpoints and commits the first."""
    story = Story(max_failures=-1, max_storage_failures=-1, **settings)
    story.start("a", TO_THE_END)
    story.report("a", 1, acc=0.9)
    story.write("a", 1)
    story.report("a", 2, acc=0.1)
    story.write("a", 2)
    story.commit("a", 1)
    return story


def refs(order: c.StartTrial) -> list[str]:
    return [ref.key for ref in order.restore]


def kept(story: Story, trial: str = "a") -> list[str]:
    return [one.key for one in story.runner.summary(trial).checkpoints]


def deleted(commands: list[c.Command]) -> list[str]:
    return [one.key for one in commands if isinstance(one, c.DeleteCheckpoint)]


@pytest.mark.parity(114)
def test_written_checkpoint_is_recorded_when_it_is_committed() -> None:
    story = Story()
    story.start("a", TO_THE_END)
    story.report("a", 1)
    assert story.write("a", 1) == []
    assert (kept(story), story.runner.uploading) == ([], 1)
    assert kinds(story.commit("a", 1)) == ["NotifyCheckpoint"]
    assert (kept(story), story.runner.uploading) == (["a/1-1"], 0)


def test_trial_resumes_from_a_written_checkpoint_on_its_node_or_a_committed_one_elsewhere() -> None:
    story = running()
    story.die("a")
    story.free("a")
    first = story.choose("a")
    assert first.instance_id == NODE
    assert first.restore == (
        m.CheckpointRef("a/1-2", "", 2, "disk"),
        m.CheckpointRef("a/1-1", "hash", 1, "disk"),
    )
    elsewhere = running()
    elsewhere.die("a")
    elsewhere.free("a")
    elsewhere.add("big", cpus=2.0)
    elsewhere.choose("big")
    elsewhere.join(OTHER)
    second = elsewhere.choose("a")
    assert (second.instance_id, refs(second)) == (OTHER, ["a/1-1"])


def test_node_with_the_newest_checkpoint_is_preferred_and_never_waited_for() -> None:
    story = running()
    story.join(OTHER, cpus=1.0)  # this node fits more tightly
    story.die("a")
    story.free("a")
    assert story.choose("a").instance_id == NODE
    story.add("b", cpus=1.0)
    story.die("a", attempt=2)
    story.free("a", attempt=2)
    story.tell(m.Tick(100.0))
    story.add("big", cpus=2.0)
    story.choose("big")
    assert story.choose("a").instance_id == OTHER


def test_commit_counts_in_any_state_of_its_trial() -> None:
    story = running()
    story.die("a")
    story.free("a")
    story.choose("a")
    assert kinds(story.commit("a", 2)) == ["NotifyCheckpoint"]
    assert kept(story) == ["a/1-1", "a/1-2"]


def test_checkpoint_of_an_older_attempt_is_deleted_once_it_is_in_the_store() -> None:
    story = running()
    story.die("a")
    story.choose("a")  # its first trial process has not ended
    story.write("a", 2, attempt=1)
    story.tell(m.CheckpointWritten("a", 1, 3, 2, "a/1-3", "disk", 1))
    late = m.CheckpointCommitted("a", 1, 3, 2, "a/1-3", "hash", 1)
    assert story.runner.uploading == 2
    assert deleted(story.tell(late)) == []
    assert deleted(story.free("a")) == []
    assert deleted(story.commit("a", 2)) == ["a/1-3"], "an upload might still refer to it"


def test_trial_stays_live_until_its_uploads_are_settled() -> None:
    story = running()
    story.tell(m.SearchExhausted())
    story.report("a", 3, done=True)
    assert kinds(story.finish("a")) == ["NotifyTrialEnd"]
    story.free("a")
    assert not story.runner.is_finished
    story.commit("a", 2)
    assert story.runner.is_finished
    assert kept(story) == ["a/1-1", "a/1-2"]


def test_interrupted_search_waits_for_uploads() -> None:
    story = running()
    story.tell(m.RunInterrupted("Ctrl-C"))
    story.free("a")
    assert not story.runner.is_finished
    story.give_up("a", 2)
    assert story.runner.is_finished


def test_lost_checkpoint_is_forgotten_and_its_objects_are_deleted() -> None:
    story = running()
    assert deleted(story.give_up("a", 2)) == ["a/1-2"]
    story.fail("a")
    story.free("a")
    assert refs(story.choose("a")) == ["a/1-1"]


def test_dead_node_loses_its_uncommitted_checkpoints() -> None:
    story = running()
    story.join(OTHER)
    commands = story.lose(is_dead=True)
    assert kinds(commands) == ["DropNode", "DeleteCheckpoint"]
    assert deleted(commands) == ["a/1-2"]
    assert story.runner.uploading == 0
    assert refs(story.choose("a")) == ["a/1-1"]


def test_ended_trial_is_archived_when_the_node_with_its_last_upload_is_dead() -> None:
    story = running()
    story.report("a", 3, done=True)
    story.finish("a")
    story.free("a")
    assert "a" in story.runner.live
    story.lose(is_dead=True)
    assert "a" in story.runner.finished


@pytest.mark.parity(103, 135)
def test_damaged_checkpoint_is_never_restored_again() -> None:
    story = running()
    story.commit("a", 2)
    story.die("a")
    story.free("a")
    assert refs(story.choose("a")) == ["a/1-2", "a/1-1"]
    damaged = m.CheckpointDamaged("a", 2, "a/1-2", "a bit is wrong", "a/1-1")
    assert story.tell(damaged) == [], "pinned: the trial may restore from it"
    assert story.runner.live["a"].restoring == "a/1-1"
    story.die("a", attempt=2)
    assert deleted(story.free("a", attempt=2)) == ["a/1-2"]
    story.tell(m.Tick(100.0))
    assert refs(story.choose("a")) == ["a/1-1"]


def test_damaged_uncommitted_checkpoint_is_waited_for_and_deleted() -> None:
    story = running()
    story.die("a")
    story.free("a")
    story.choose("a")
    story.tell(m.CheckpointDamaged("a", 2, "a/1-2", "a bit is wrong", "a/1-1"))
    assert story.runner.uploading == 1
    assert story.commit("a", 2) == [], "pinned: the trial may restore from it"
    assert story.runner.uploading == 0
    assert kept(story) == ["a/1-1"]


def find_all_damaged(story: Story, attempt: int) -> list[str]:
    """Restart the trial, let it find all its checkpoints damaged and fail; return the commands."""
    found = refs(story.choose("a"))
    for key, instead in zip(found, [*found[1:], ""], strict=True):
        story.tell(m.CheckpointDamaged("a", attempt, key, "a bit is wrong", instead))
    story.tell(m.TrialFailed("a", attempt, "restore", f"damaged: {found}", "", 0.0))
    story.free("a", attempt=attempt)
    story.tell(m.Tick(1000.0 * attempt))
    return found


def with_two_committed(**settings: object) -> Story:
    story = running(**settings)
    story.commit("a", 2)
    story.die("a")
    story.free("a")
    return story


def test_runner_with_all_checkpoints_damaged_ends_the_trial_in_error() -> None:
    story = with_two_committed()  # its failure budget is unlimited
    assert find_all_damaged(story, 2) == ["a/1-2", "a/1-1"]
    trial = story.runner.summary("a")
    assert trial.status == "ERROR"
    assert "'a/1-2', 'a/1-1'" in trial.failure.error
    assert trial.reason == "checkpoint not restored: not retried, because no checkpoint is whole"
    assert "restart_errored" in classify(trial.failure).fix


def test_runner_with_a_process_that_dies_on_damaged_checkpoints_does_not_start_anew() -> None:
    story = with_two_committed()
    story.choose("a")
    story.tell(m.CheckpointDamaged("a", 2, "a/1-2", "a bit is wrong", "a/1-1"))
    story.tell(m.CheckpointDamaged("a", 2, "a/1-1", "a bit is wrong", ""))
    story.die("a", attempt=2)
    story.free("a", attempt=2)
    story.tell(m.Tick(1000.0))
    assert find_all_damaged(story, 3) == ["a/1-1"]
    assert story.runner.summary("a").status == "ERROR"


def test_runner_with_a_store_that_was_unreachable_retries_the_restore() -> None:
    story = with_two_committed()
    story.choose("a")
    story.tell(m.TrialFailed("a", 2, "restore", "the store does not answer", "", 0.0))
    assert story.runner.live["a"].status == "PENDING"


def test_runner_told_to_forget_damaged_checkpoints_begins_the_trial_anew() -> None:
    story = with_two_committed()
    story.choose("a")
    story.tell(m.CheckpointDamaged("a", 2, "a/1-2", "a bit is wrong", "a/1-1"))
    story.tell(m.CheckpointDamaged("a", 2, "a/1-1", "a bit is wrong", ""))
    story.die("a", attempt=2)
    story.free("a", attempt=2)
    story.tell(m.CheckpointsForgotten("a"))
    story.tell(m.Tick(1000.0))
    assert refs(story.choose("a")) == []


def test_runner_with_the_only_committed_checkpoint_damaged_keeps_it_while_another_uploads() -> None:
    story = running()
    story.die("a")
    story.free("a")
    story.choose("a")
    story.tell(m.CheckpointDamaged("a", 2, "a/1-1", "a bit is wrong", ""))
    assert [one.key for one in story.runner.live["a"].checkpoints if one.is_wanted] == [
        "a/1-1",
        "a/1-2",
    ]


def test_runner_with_all_trial_checkpoints_damaged_begins_from_the_users_one() -> None:
    given = m.CheckpointRef("given", "hash", 0)
    story = with_two_committed(restore=(given,))
    assert find_all_damaged(story, 2) == ["a/1-2", "a/1-1", "given"]
    assert refs(story.choose("a")) == ["given"]


@pytest.mark.parity(108)
def test_restore_checkpoint_of_a_trial_process_stays_until_it_has_committed() -> None:
    story = running(keep=RetentionPolicy(num_to_keep=1))
    story.commit("a", 2)
    assert kept(story) == ["a/1-2"]
    story.die("a")
    story.free("a")
    story.choose("a")
    story.report("a", 3, attempt=2)
    story.write("a", 3, attempt=2)
    commands = story.commit("a", 3, "a/1-2/weights", attempt=2)
    assert kinds(commands) == ["NotifyCheckpoint", "DeleteCheckpoint"]
    assert commands[1] == c.DeleteCheckpoint("a", "a/1-2", ("weights",))


def test_base_of_an_upload_in_flight_stays_though_a_later_process_has_committed() -> None:
    story = running(keep=RetentionPolicy(num_to_keep=1))
    story.die("a")
    story.free("a")
    story.add("big", cpus=2.0)
    story.choose("big")
    story.join(OTHER)
    assert story.choose("a").instance_id == OTHER
    story.report("a", 3, attempt=2)
    story.write("a", 3, attempt=2)
    assert kinds(story.commit("a", 3, attempt=2)) == ["NotifyCheckpoint"], (
        "a/1-2 may refer to a/1-1"
    )
    assert story.runner.live_checkpoints() == {"a/1-1": "hash", "a/2-3": "hash"}
    commands = story.commit("a", 2, "a/1-1/weights")
    assert commands[1:] == [
        c.DeleteCheckpoint("a", "a/1-1", ("weights",)),
        c.DeleteCheckpoint("a", "a/1-2"),  # neither the newest nor the best
        c.DeleteObjects(("a/1-1/weights",)),
    ]


def test_manifest_that_refers_to_an_unpinned_checkpoint_is_rejected() -> None:
    story = running()
    commands = story.commit("a", 2, "a/0-7/weights")
    assert commands == [c.DeleteCheckpoint("a", "a/1-2")]
    assert kept(story) == ["a/1-1"]


@pytest.mark.parity(113)
def test_checkpoint_that_all_trials_start_from_is_never_deleted() -> None:
    ref = m.CheckpointRef("restored/checkpoint_0-000001", "hash", 7)
    story = Story(restore=(ref,), keep=RetentionPolicy(num_to_keep=1), max_failures=-1)
    assert story.start("a", TO_THE_END).restore == (ref,)
    assert story.runner.live["a"].is_restoring
    story.report("a", 8)
    story.write("a", 8)
    assert kinds(story.commit("a", 8, f"{ref.key}/weights")) == ["NotifyCheckpoint"]
    story.die("a")
    story.free("a")
    assert refs(story.choose("a")) == ["a/1-8", ref.key]
    damaged = m.CheckpointDamaged("a", 2, ref.key, "a bit is wrong", "")
    assert story.tell(damaged) == []
    assert story.runner.live_checkpoints()[ref.key] == "hash"


@pytest.mark.parity(105)
def test_trial_view_states_whether_it_has_a_checkpoint_and_can_forget_it() -> None:
    story = running()
    trial = story.runner.live["a"]
    assert trial.has_checkpoint
    story.die("a")
    story.free("a")
    story.tell(m.CheckpointsForgotten("a"))
    assert not trial.has_checkpoint
    assert story.choose("a").restore == ()
    assert deleted(story.commit("a", 2)) == ["a/1-1", "a/1-2"]


@pytest.mark.parity(97)
def test_trial_view_states_whether_it_is_being_saved_or_restored() -> None:
    story = running()
    trial = story.runner.live["a"]
    assert (trial.is_saving, trial.is_restoring) == (True, False)
    story.commit("a", 2)
    assert not trial.is_saving
    story.tell(m.TrialWaits("a", 1, "save", "the store does not answer"))
    assert (trial.is_saving, trial.waits) == (True, ("save", "the store does not answer"))
    story.tell(m.TrialWaits("a", 1, "", ""))
    assert not trial.is_saving
    story.die("a")
    story.free("a")
    story.choose("a")
    assert (trial.is_restoring, trial.restoring) == (True, "a/1-2")
    story.tell(m.TrialWaits("a", 1, "restore", "of an older attempt"))
    assert trial.waits == ("", "")
    story.report("a", 2, attempt=2)
    assert not trial.is_restoring


def test_experiment_limit_keeps_the_best_checkpoints_of_ended_trials() -> None:
    keep = RetentionPolicy(score_attribute="acc", in_experiment=2)
    story = Story(cpus=8.0, keep=keep)
    gone: list[list[str]] = []
    for trial, scores in {"a": (0.1, 0.2), "b": (0.9, 0.3)}.items():
        story.start(trial, m.HorizonSet(trial, ()))
        for step, score in enumerate(scores, start=1):
            story.report(trial, step, acc=score)
            story.write(trial, step)
            gone.append(deleted(story.commit(trial, step)))
        story.finish(trial)
        gone.append(deleted(story.free(trial)))
    # The first of b competes when b has a newer one, the newest when b has finished.
    assert gone == [[], [], [], [], ["a/1-1"], ["a/1-2"]]
    assert (kept(story, "a"), kept(story, "b")) == ([], ["b/1-1", "b/1-2"])
    assert story.runner.live_checkpoints().keys() == {"b/1-1", "b/1-2"}


def test_checkpoint_of_a_repeated_step_has_the_rank_of_its_result() -> None:
    rule = RetentionPolicy(num_to_keep=1, score_attribute="acc")
    story = Story(max_failures=-1, keep=rule)
    story.start("a", TO_THE_END)
    story.report("a", 1, acc=0.1)
    story.write("a", 1)
    story.commit("a", 1)
    story.report("a", 2, acc=0.9)
    story.report("a", 3, acc=0.5)
    story.die("a")
    story.free("a")
    story.choose("a")
    for step, acc in ((2, 0.9), (3, 0.5), (4, 0.4)):
        story.report("a", step, attempt=2, acc=acc)
        story.write("a", step, attempt=2)
        story.commit("a", step, attempt=2)
    assert kept(story) == ["a/2-2", "a/2-4"]


def test_over_the_quota_a_live_trial_keeps_its_newest_and_the_experiment_its_best() -> None:
    story = Story(keep=RetentionPolicy(score_attribute="acc", max_bytes=10))
    story.start("a", TO_THE_END)
    gone = []
    for step, score in enumerate((0.5, 0.9, 0.1, 0.2), start=1):
        story.report("a", step, acc=score)
        story.write("a", step)
        gone += deleted(story.commit("a", step))
    assert gone == ["a/1-1", "a/1-3"]
    assert kept(story) == ["a/1-2", "a/1-4"]


def test_checkpoint_that_is_kept_or_may_be_written_is_busy_and_a_leftover_is_not() -> None:
    story = running()
    assert story.runner.is_busy("train_a/checkpoint_1-000003")
    assert story.runner.is_busy("train_b/checkpoint_1-000003"), (
        "the checkpoint belongs to no trial of this search"
    )
    story.report("a", 3, done=True)
    story.finish("a")
    story.free("a")
    assert story.runner.is_busy("train_a/checkpoint_1-000002"), "its upload is in flight"
    story.commit("a", 2)
    assert not story.runner.is_busy("train_a/checkpoint_1-000003")
    assert story.runner.is_busy("train_a/checkpoint_2000001-000003"), "another run wrote it"
    assert story.runner.is_busy("a/1-2")
    assert not story.runner.is_busy("a/1-3")


@pytest.mark.parity(118, 119, 120)
def test_trial_loaded_in_mid_restore_is_unchanged_and_waits_when_its_node_is_gone() -> None:
    story = running()
    story.die("a")
    story.free("a")
    story.choose("a")
    story.tell(m.TrialWaits("a", 2, "restore", "the store does not answer"))
    again = replay(story.settings, m.decode_records(m.encode(story.journal_records)))
    assert comparable(again) == comparable(story.runner)
    trial = again.live["a"]
    assert (trial.status, trial.is_restoring) == ("RUNNING", True)
    again.handle(m.NodeLost(NODE, "its scheduler ended", is_dead=True))
    assert (trial.status, trial.is_restoring) == ("PENDING", False)
    again.handle(m.NodeJoined(OTHER, "node", "host", "127.0.0.1", {"cpu": 1.0}))
    again.handle(m.Tick(100.0))
    (order,) = again.handle(m.TrialChosen("a"))
    assert isinstance(order, c.StartTrial)
    assert refs(order) == ["a/1-1"]


@pytest.mark.parity(112)
def test_checkpoint_committed_twice_is_not_deleted_as_its_own_predecessor() -> None:
    story = running(keep=RetentionPolicy(num_to_keep=1))
    assert deleted(story.commit("a", 2)) == ["a/1-1"]
    assert deleted(story.commit("a", 2)) == []
    assert "a/1-2" in kept(story)


def test_checkpoint_that_an_ended_trial_keeps_is_not_deleted_when_it_is_said_to_be_lost() -> None:
    story = Story()
    story.start("a", TO_THE_END)
    story.report("a", 1)
    story.write("a", 1)
    story.commit("a", 1)
    story.finish("a")
    story.free("a")
    assert "a" in story.runner.finished
    assert story.give_up("a", 1) == story.commit("a", 1) == []
    assert kinds(story.give_up("a", 2)) == ["DeleteCheckpoint"]
    assert story.give_up("unknown", 1) == story.commit("unknown", 1) == []
