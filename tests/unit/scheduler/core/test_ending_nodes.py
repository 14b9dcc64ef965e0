"""Nodes that were told to end: they get no trial, and their end blames none, ten times in a row."""

from __future__ import annotations

import msgspec
import pytest

from tests.unit.scheduler.scripted_runner import NODE, Story
from tunemq.testing.comparable_state import comparable
from tunemq.testing.journal_replay import replay
from tunemq_scheduler.core.failure_policy import EXCUSED_TRIES
from tunemq_scheduler.core.runner_snapshot import dump
from tunemq_scheduler.core.trial_runner import TrialRunner
from tunemq_shared.protocol import messages as m

LEFT = "it took its leave"


def end(story: Story, instance_id: str) -> None:
    """Let a node say that it was told to end."""
    story.tell(m.DevicesWithheld(instance_id, {}, is_ending=True))


def end_under_trial(story: Story, trial: str, life: int) -> None:
    """Start a trial on the only node, and let this end under it; the next node joins."""
    story.tell(m.Tick(story.runner.next_wake() or story.runner.elapsed))
    story.choose(trial)
    end(story, f"node.{life}")
    story.tell(m.NodeLost(f"node.{life}", LEFT, is_dead=True))
    story.join(f"node.{life + 1}")


def stop_nodes(story: Story, times: int, first: int = 1) -> int:
    """End nodes under trial a until it has ended, or this often; return how many ended."""
    for life in range(first, first + times):
        end_under_trial(story, "a", life)
        if story.runner.summary("a").status == "ERROR":
            return life + 1 - first
    return times


def test_trial_whose_nodes_are_stopped_one_after_another_is_retried_at_once_without_blame() -> None:
    story = Story(max_node_losses=0)
    story.add("a")
    assert stop_nodes(story, EXCUSED_TRIES) == EXCUSED_TRIES
    trial = story.runner.live["a"]
    assert (trial.status, trial.fell_with, trial.not_before) == ("PENDING", [], 0.0)
    assert story.runner.summary("a").num_failures == 0
    assert not story.runner.is_suspect(trial)


@pytest.mark.parametrize("most", [0, 2])
def test_trial_that_stops_its_own_nodes_ends_as_poison_after_ten_excused_tries(most: int) -> None:
    story = Story(max_node_losses=most)
    story.add("a")
    assert stop_nodes(story, 50) == EXCUSED_TRIES + most + 1
    assert story.runner.summary("a").reason.startswith("poison: ")
    assert comparable(replay(story.settings, story.journal_records)) == comparable(story.runner)


def test_new_result_renews_the_excused_tries() -> None:
    story = Story(max_node_losses=0)
    story.add("a")
    for step in (1, 2):
        first = 1 + (step - 1) * EXCUSED_TRIES
        assert stop_nodes(story, EXCUSED_TRIES - 1, first) == EXCUSED_TRIES - 1
        story.tell(m.Tick(story.runner.next_wake() or story.runner.elapsed))
        story.choose("a")
        story.report("a", step, attempt=story.runner.live["a"].attempt)
        last = f"node.{first + EXCUSED_TRIES - 1}"
        end(story, last)
        story.tell(m.NodeLost(last, LEFT, is_dead=True))
        story.join(f"node.{first + EXCUSED_TRIES}")
    assert story.runner.live["a"].excused_tries == 1


def test_lost_node_that_did_not_say_that_it_ends_counts() -> None:
    story = Story(max_node_losses=0)
    story.start("a")
    story.tell(m.NodeLost(NODE, LEFT, is_dead=True))
    assert story.runner.summary("a").status == "ERROR"


def test_ending_node_gets_no_trial() -> None:
    story = Story()
    story.add("a")
    end(story, NODE)
    assert list(story.runner.waiting()) == []
    story.tell(m.NodeJoined("late.1", "late", "host", "127.0.0.1", {"cpu": 2.0}, is_ending=True))
    assert list(story.runner.waiting()) == []
    story.join("good.1")
    assert story.choose("a").instance_id == "good.1"


def test_ending_node_gets_no_suspect_trial() -> None:
    story = Story(max_node_losses=0)
    for trial in ("a", "b"):
        story.start(trial)
    story.tell(m.NodeLost(NODE, "its lease ran out", is_dead=True))
    assert story.runner.is_suspect(story.runner.live["a"])
    story.join("node.2")
    end(story, "node.2")
    story.tell(m.Tick(10.0))
    assert list(story.runner.waiting()) == []
    assert story.runner.alone == {}
    story.join("node.3")
    assert story.choose("a").instance_id == "node.3"


def test_lost_node_that_comes_back_while_it_ends_still_gets_no_trial() -> None:
    story = Story()
    end(story, NODE)
    story.lose()
    story.hear_again()
    story.add("a")
    assert list(story.runner.waiting()) == []


def test_snapshot_keeps_ending_nodes_and_excused_tries() -> None:
    story = Story(max_node_losses=0)
    story.add("a")
    stop_nodes(story, 3)
    end(story, "node.4")
    again = TrialRunner.load(story.settings, dump(story.runner), {})
    assert comparable(again) == comparable(story.runner)
    assert again.live["a"].excused_tries == 3
    assert list(again.waiting()) == []


def test_records_of_the_previous_version_are_read() -> None:
    joined = m.NodeJoined("n.1", "n", "host", "127.0.0.1", {"cpu": 2.0})
    withheld = m.DevicesWithheld("n.1", {"GPU-a": "XID 79"})
    for event in (joined, withheld):
        fields = msgspec.msgpack.decode(m.encode(event))
        assert fields.pop() is False
        records = msgspec.msgpack.encode([[fields, []]])
        assert m.decode_records(records)[0].event == event
