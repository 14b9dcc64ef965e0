"""The pure runner: nodes that are lost, and return or stay away."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from tests.unit.scheduler.scripted_runner import NODE, TO_THE_END, Story, kinds, result
from tunemq.testing.comparable_state import comparable
from tunemq.testing.journal_replay import replay
from tunemq_scheduler.core import commands as c
from tunemq_scheduler.core.nodes.away_nodes import AWAY_UPLOADS_S
from tunemq_scheduler.core.trials.trial import ResultReview
from tunemq_shared.protocol import messages as m

OTHER = "node.2"


@pytest.fixture
def story() -> Iterator[Story]:
    """Run trial a on NODE with two results, one committed checkpoint and one uploading."""
    story = Story(cpus=1.0)
    story.start("a", TO_THE_END)
    story.report("a", 1)
    story.write("a", 1)
    story.commit("a", 1)
    story.report("a", 2)
    story.write("a", 2)
    yield story
    again = replay(story.settings, m.decode_records(m.encode(story.journal_records)))
    assert comparable(again) == comparable(story.runner)


def trial(story: Story):
    return story.runner.live["a"]


def take_over(story: Story) -> list[c.Command]:
    """Add another node and start trial a on it."""
    if OTHER not in story.runner.nodes:
        story.join(OTHER, 1.0)
    return story.tell(m.TrialChosen("a"))


def deleted(commands: list[c.Command]) -> list[str]:
    return [command.key for command in commands if isinstance(command, c.DeleteCheckpoint)]


def test_f08_trial_of_a_lost_node_waits_with_its_attempt_and_loses_nothing(story) -> None:
    assert story.lose() == []
    assert (trial(story).status, trial(story).attempt) == ("PENDING", 1)
    assert story.runner.uploading == 1
    assert story.runner.nodes == {}
    assert story.lose() == [], "a second loss changes nothing"


def test_f08_trial_that_was_not_taken_over_continues_when_its_node_returns(story) -> None:
    before = comparable(story.runner)
    story.tell(m.BatchRead(NODE, 1, 6, "1-0"))
    counted = comparable(story.runner)
    story.lose()
    (order,) = story.hear_again()

    assert before != counted == comparable(story.runner)
    assert story.runner.acknowledged == {NODE: 6}, "numbering continues"
    assert isinstance(order, c.ReattachTrial)
    assert (order.is_wanted, order.pause, order.stop) == (True, False, False)
    start = order.start
    assert (start.trial, start.attempt, start.instance_id, start.last_step) == ("a", 1, NODE, 2)
    assert story.runner.review(result("a", 3)) is ResultReview.BEFORE_HORIZON
    assert kinds(story.report("a", 3)) == ["NotifyResult"]
    assert kinds(story.commit("a", 2)) == ["NotifyCheckpoint"]


def test_f01_trial_taken_over_gets_a_new_attempt_and_its_old_uploads_are_given_up(story) -> None:
    story.lose()
    *removals, start = take_over(story)

    assert isinstance(start, c.StartTrial)
    assert (start.attempt, start.instance_id) == (2, OTHER)
    assert [ref.key for ref in start.restore] == ["a/1-1"]
    assert deleted(removals) == ["a/1-2"]
    assert story.runner.uploading == 0


def test_f08_events_of_a_returning_node_about_a_trial_taken_over_change_nothing(story) -> None:
    story.lose()
    take_over(story)
    (order,) = story.hear_again()
    assert not order.is_wanted
    state = (trial(story).status, trial(story).last_step, list(trial(story).checkpoints))

    assert story.report("a", 3) == []
    assert story.write("a", 3) == []
    assert deleted(story.commit("a", 2)) == ["a/1-2"]
    assert deleted(story.commit("a", 3)) == ["a/1-3"]
    assert story.finish("a") == []
    assert story.runner.stale == 5
    assert state == (trial(story).status, trial(story).last_step, list(trial(story).checkpoints))
    assert story.runner.placement.free == {"cpu": 0.0}, (
        "the old trial process holds its slot until it ends"
    )
    assert story.free("a") == [c.ReleaseTrial("a", 1, NODE)]
    assert story.runner.placement.free == {"cpu": 1.0}
    assert trial(story).status == "RUNNING"


def test_trial_of_two_lost_nodes_continues_on_the_one_that_had_it_last(story) -> None:
    story.lose()
    take_over(story)
    story.lose(OTHER)
    (first,) = story.hear_again()
    assert (first.is_wanted, trial(story).status) == (False, "PENDING")
    (second,) = story.hear_again(OTHER)
    assert (second.is_wanted, second.start.attempt) == (True, 2)
    assert trial(story).status == "RUNNING"


def test_trial_that_was_pausing_when_its_node_was_lost_continues_pausing() -> None:
    story = Story(cpus=1.0)
    story.start("a")
    story.pause("a", 1)
    story.lose()
    assert trial(story).status == "PAUSED"
    (order,) = story.hear_again()
    assert order.pause
    assert (trial(story).status, trial(story).pausing) == ("RUNNING", "others first")
    story.paused("a")
    assert trial(story).status == "PAUSED"
    assert story.free("a") == [c.ReleaseTrial("a", 1, NODE)]


def test_runner_with_the_node_of_a_complete_trial_away_ends_it_and_keeps_its_checkpoints(
    story,
) -> None:
    story.report("a", 3, done=True)
    told, end = story.lose()
    assert told == c.WarnTrialEnd("a", m.NodeLost(NODE, "its lease ran out"), "", 3, 2)
    assert end == c.NotifyTrialEnd("a", "TERMINATED", "it reached its end")
    story.hear_again()
    assert kinds(story.commit("a", 2)) == ["NotifyCheckpoint"]
    assert story.finish("a") == []
    story.free("a")
    assert "a" in story.runner.finished


def test_f14_trial_stopped_while_its_node_is_away_ends_at_once(story) -> None:
    story.lose()
    commands = story.tell(m.StopRequested("a", "enough"))
    assert commands == [c.NotifyTrialEnd("a", "TERMINATED", "enough", early=True)]
    (order,) = story.hear_again()
    assert order.stop
    assert story.report("a", 3) == []
    assert kinds(story.commit("a", 2)) == ["NotifyCheckpoint"], (
        "the result of this checkpoint was recorded"
    )
    assert story.free("a") == [c.ReleaseTrial("a", 1, NODE)]
    assert "a" in story.runner.finished


def test_trial_being_stopped_when_its_node_is_lost_ends(story) -> None:
    story.tell(m.StopRequested("a", "enough"))
    assert kinds(story.lose()) == ["NotifyTrialEnd"]
    story.give_up("a", 2)
    assert "a" in story.runner.finished
    (order,) = story.hear_again()
    assert not order.is_wanted
    assert story.free("a") == [c.ReleaseTrial("a", 1, NODE)]
    assert story.runner.placement.free == {"cpu": 1.0}


def test_last_checkpoint_of_an_ended_trial_on_an_away_node_is_waited_for(story) -> None:
    story.report("a", 3, done=True)
    story.finish("a")
    story.free("a")
    story.tell(m.SearchExhausted())
    story.tell(m.Tick(10.0))
    story.lose()
    assert story.tell(m.Tick(9.0 + AWAY_UPLOADS_S)) == []
    assert not story.runner.is_finished
    assert deleted(story.tell(m.Tick(10.0 + AWAY_UPLOADS_S))) == ["a/1-2"]
    assert story.runner.is_finished


def test_checkpoint_of_an_ended_trial_from_a_returned_node_is_kept(
    story,
) -> None:
    story.report("a", 3, done=True)
    story.finish("a")
    story.free("a")
    story.lose()
    assert story.hear_again() == []
    assert kinds(story.commit("a", 2)) == ["NotifyCheckpoint"]
    assert [one.key for one in story.runner.summary("a").checkpoints] == ["a/1-1", "a/1-2"]


def test_away_node_that_is_dead_loses_its_uncommitted_checkpoints(story) -> None:
    story.lose()
    commands = story.lose(is_dead=True)
    assert kinds(commands) == ["DropNode", "DeleteCheckpoint"]
    assert story.runner.away == {}
    assert story.runner.acknowledged == {}
    assert story.hear_again() == []
    assert trial(story).status == "PENDING"


def test_checkpoints_an_away_node_may_refer_to_stay_until_its_trial_is_taken_over(story) -> None:
    story.commit("a", 2)
    story.lose()
    assert story.tell(m.CheckpointDamaged("a", 1, "a/1-2", "torn", "")) == [], (
        "the checkpoint is pinned"
    )
    assert deleted(take_over(story)) == ["a/1-2"]


def test_trial_process_that_missed_its_order_may_start_from_its_pinned_checkpoint() -> None:
    story = Story(cpus=1.0, max_failures=1)
    story.start("a", TO_THE_END)
    story.report("a", 1)
    story.write("a", 1)
    story.commit("a", 1)
    story.die("a")
    story.free("a")
    assert [ref.key for ref in story.choose("a").restore] == ["a/1-1"]
    story.lose()
    (order,) = story.hear_again()
    assert [ref.key for ref in order.start.restore] == ["a/1-1"]


def test_interrupted_search_stops_trials_of_a_returning_node(story) -> None:
    story.lose()
    story.tell(m.RunInterrupted("Ctrl-C"))
    (order,) = story.hear_again()
    assert order.stop
    assert trial(story).status == "PENDING"
    assert story.free("a") == [c.ReleaseTrial("a", 1, NODE)]


def test_standing_orders_list_all_trials_that_nodes_are_to_run() -> None:
    story = Story(cpus=3.0)
    for name in "abc":
        story.start(name)
    story.pause("b", 1)
    story.tell(m.StopRequested("c", "enough"))
    orders = story.runner.standing_orders()
    assert [(one.start.trial, one.pause, one.stop, one.is_wanted) for one in orders] == [
        ("a", False, False, True),
        ("b", True, False, True),
        ("c", False, True, True),
    ]
