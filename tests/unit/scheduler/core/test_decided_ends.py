"""The pure runner: a trial that a decision ended, whose process then cannot save its last step."""

from __future__ import annotations

import pytest

from tests.unit.scheduler.scripted_runner import NODE, TO_THE_END, Story
from tunemq.testing.comparable_state import comparable
from tunemq.testing.journal_replay import replay
from tunemq_scheduler.core import commands as c
from tunemq_scheduler.core.runner_snapshot import dump
from tunemq_scheduler.core.trial_runner import TrialRunner
from tunemq_scheduler.output.terminal.notice_text import format_trial_end
from tunemq_shared.protocol import messages as m

FULL = m.TrialFailed("a", 1, "storage", "StoreError: no space left", "", 0.0)
DIED = m.TrialProcessDied("a", 1, 1, 9, None, 0.0)
LOST = m.NodeLost(NODE, "its lease ran out")
DEAD = m.NodeLost(NODE, "started again", is_dead=True)

#: Events by which the process is gone before it could end by itself, and what they say of it.
GONE = {
    "full disk": (FULL, FULL),
    "killed": (DIED, DIED),
    "killed after it was told to stop": (m.SlotFreed("a", 1), None),
    "node silent": (LOST, LOST),
    "node dead": (DEAD, DEAD),
}


def stopped(*, saved: int = 1) -> Story:
    """Bring trial a to step 2, where the trial scheduler stops it."""
    story = Story(max_failures=-1)
    story.start("a")
    story.report("a", 1)
    story.commit("a", saved)
    told = story.report("a", 2, m.DecisionMade("a", 2, m.STOP, "not among the best"))
    assert c.StopTrial("a", 1, NODE) in told
    return story


def warnings(told: list[c.Command]) -> list[c.WarnTrialEnd]:
    return [one for one in told if isinstance(one, c.WarnTrialEnd)]


@pytest.mark.parametrize(("event", "failure"), GONE.values(), ids=GONE)
@pytest.mark.parametrize("is_loaded", [False, True])
def test_runner_with_a_stopped_trial_whose_process_is_gone_warns_once(
    event, failure, is_loaded
) -> None:
    story = stopped()
    if is_loaded:
        story.runner = TrialRunner.load(story.settings, dump(story.runner), story.runner.finished)
    (told,) = warnings(story.tell(event))
    assert (told.trial, told.failure, told.step, told.saved) == ("a", failure, 2, 1)
    text = format_trial_end(told, saves_at_end=False)
    assert "a checkpoint of that step is missing, its newest one is of step 1" in text

    assert warnings(story.tell(DIED) + story.free("a")) == []
    assert story.runner.summary("a").status == "TERMINATED"
    assert story.runner.summary("a").reason == "not among the best"
    again = replay(story.settings, m.decode_records(m.encode(story.journal_records)))
    assert comparable(again) == comparable(story.runner)


def test_runner_resumed_after_its_script_died_warns_of_a_stopped_trial() -> None:
    warned = warnings(stopped().tell(m.ExperimentResumed(2, 0.0)))
    assert [(one.trial, one.step, one.saved) for one in warned] == [("a", 2, 1)]


@pytest.mark.parametrize("event", [m.TrialFinished("a", 1), m.TrialPaused("a", 1)])
def test_runner_with_a_stopped_trial_whose_process_ended_by_itself_is_silent(event) -> None:
    story = stopped(saved=2)
    told = story.tell(event) + story.tell(DIED) + story.free("a")
    assert warnings(told) == []


def test_runner_with_a_trial_that_a_person_stopped_is_silent() -> None:
    story = Story()
    story.start("a", TO_THE_END)
    story.report("a", 1)
    story.tell(m.StopRequested("a", "Ada wants its slot"))
    assert warnings(story.die("a") + story.free("a")) == []
