"""The pure runner: what a trial scheduler does to trials other than the one that reported."""

from __future__ import annotations

from collections.abc import Callable, Iterator

import pytest

from tests.unit.scheduler.scripted_runner import NODE, TO_THE_END, Story, kinds, result
from tunemq.testing.comparable_state import comparable
from tunemq.testing.journal_replay import replay
from tunemq_scheduler.core import commands as c
from tunemq_scheduler.core.trials.trial import ResultReview
from tunemq_shared.protocol import messages as m

OTHER = "node.2"


@pytest.fixture
def story() -> Iterator[Story]:
    """Run trial a, which has one checkpoint."""
    story = Story(cpus=1.0)
    story.start("a", TO_THE_END)
    story.report("a", 1)
    story.write("a", 1)
    story.commit("a", 1)
    yield story
    again = replay(story.settings, m.decode_records(m.encode(story.journal_records)))
    assert comparable(again) == comparable(story.runner)


def act(story: Story, action: str, trial: str = "a") -> list[c.Command]:
    return story.tell(m.ActionTaken(trial, action, "the scheduler says so"))


def status(story: Story, trial: str = "a") -> str:
    return story.runner.summary(trial).status


def pending(story: Story) -> None:
    story.lose()
    story.join(OTHER, 1.0)


def paused(story: Story) -> None:
    act(story, m.PAUSE)
    story.paused("a")
    story.free("a")


def test_stop_of_a_running_trial_ends_it_and_drops_what_it_still_reports(story: Story) -> None:
    assert act(story, m.STOP) == [
        c.StopTrial("a", 1, NODE),
        c.NotifyTrialEnd("a", "TERMINATED", "the scheduler says so", early=True),
    ]
    assert story.runner.review(result("a", 2)) is ResultReview.STALE
    story.finish("a")
    story.free("a")
    assert story.runner.live == {}


@pytest.mark.parametrize("become", [pending, paused])
def test_stop_of_a_trial_without_a_process_ends_it(
    story: Story, become: Callable[[Story], None]
) -> None:
    become(story)
    end, *_ = act(story, m.STOP)
    had_run = become is pending
    reason = "the scheduler says so"
    assert end == c.NotifyTrialEnd("a", "TERMINATED", reason, early=True, had_run=had_run)
    assert status(story) == "TERMINATED"


def test_pause_of_a_running_trial_saves_it_and_it_stays_paused(story: Story) -> None:
    assert act(story, m.PAUSE) == [c.PauseTrial("a", 1, NODE)]
    story.paused("a")
    story.free("a")
    assert status(story) == "PAUSED"
    assert story.runner.live["a"].has_checkpoint


def test_paused_trial_that_is_resumed_waits_like_a_new_one(story: Story) -> None:
    paused(story)
    assert act(story, m.RESUME) == []
    assert status(story) == "PENDING"
    assert story.choose("a").last_step == 1


def test_pending_trial_that_is_paused_does_not_wait_for_a_slot(story: Story) -> None:
    pending(story)
    assert act(story, m.PAUSE) == []
    assert status(story) == "PAUSED"
    act(story, m.RESUME)
    assert status(story) == "PENDING"


@pytest.mark.parametrize("ends", ["paused", "die", "free", "lose"])
def test_trial_resumed_while_it_pauses_waits_for_a_slot_however_its_process_ends(
    ends: str,
) -> None:
    story = Story(cpus=1.0, max_failures=1)
    story.start("a")
    story.pause("a", 1)
    act(story, m.RESUME)
    assert status(story) == "RUNNING"
    getattr(story, ends)(*([] if ends == "lose" else ["a"]))
    assert status(story) == "PENDING"
    assert not story.runner.live["a"].resuming
    again = replay(story.settings, m.decode_records(m.encode(story.journal_records)))
    assert comparable(again) == comparable(story.runner)


def test_trial_resumed_while_it_pauses_waits_for_a_slot_after_an_interrupt() -> None:
    story = Story(cpus=1.0)
    story.start("a")
    story.pause("a", 1)
    act(story, m.RESUME)
    story.tell(m.RunInterrupted("Ctrl-C"))
    story.paused("a")
    story.free("a")
    assert status(story) == "PENDING"


def test_trial_paused_while_its_node_was_away_pauses_when_the_node_is_back(story: Story) -> None:
    story.lose()
    act(story, m.PAUSE)
    (order,) = story.hear_again()
    assert isinstance(order, c.ReattachTrial)
    assert (order.pause, order.stop) == (True, False)
    story.paused("a")
    assert status(story) == "PAUSED"


def test_trial_resumed_while_its_node_was_away_waits_once_it_has_paused() -> None:
    story = Story(cpus=1.0)
    story.start("a")
    story.pause("a", 1)
    story.lose()
    assert status(story) == "PAUSED"
    act(story, m.RESUME)
    assert status(story) == "PENDING"
    (order,) = story.hear_again()
    assert isinstance(order, c.ReattachTrial)
    assert order.pause, "its process waits at its horizon, and ends as it was told"
    story.paused("a")
    assert status(story) == "PENDING"


@pytest.mark.parametrize("action", [m.STOP, m.PAUSE, m.RESUME])
def test_action_on_a_trial_that_ends_or_has_ended_changes_nothing(
    story: Story, action: str
) -> None:
    story.report("a", 2, done=True)
    before = comparable(story.runner)
    assert act(story, action) == []
    assert comparable(story.runner) == before
    assert kinds(story.finish("a")) == ["NotifyTrialEnd"]
    story.free("a")
    assert act(story, action) == []


@pytest.mark.parametrize("action", [m.PAUSE, m.RESUME])
def test_action_that_holds_already_changes_no_status(story: Story, action: str) -> None:
    if action == m.PAUSE:
        paused(story)
    assert act(story, action) == []
    assert status(story) == ("PAUSED" if action == m.PAUSE else "RUNNING")
