"""The pure runner keeps what was decided about each trial: in order, and within a bound."""

from __future__ import annotations

from collections.abc import Iterator

import msgspec
import pytest

from tests.unit.scheduler.scripted_runner import TO_THE_END, Story, result
from tunemq.testing.comparable_state import comparable
from tunemq.testing.journal_replay import replay
from tunemq_scheduler.core import commands as c
from tunemq_scheduler.core.runner_snapshot import dump
from tunemq_scheduler.core.trial_decisions import (
    MOST_DECISIONS,
    REASON_CHARACTERS,
    TrialDecision,
)
from tunemq_scheduler.core.trial_runner import TrialRunner
from tunemq_scheduler.core.trials.trial import TrialSummary
from tunemq_shared.protocol import messages as m
from tunemq_shared.protocol.result_conditions import Condition


@pytest.fixture
def story() -> Iterator[Story]:
    """Run trial a; afterwards a replay and a snapshot must know the same."""
    story = Story(cpus=1.0, stop=(Condition("training_iteration", 50),))
    story.start("a")
    yield story
    again = replay(story.settings, m.decode_records(m.encode(story.journal_records)))
    assert comparable(again) == comparable(story.runner)
    runner = story.runner
    loaded = TrialRunner.load(story.settings, dump(runner), runner.finished)
    assert comparable(loaded) == comparable(runner)


def act(story: Story, action: str, reason: str = "why", **more: str) -> None:
    story.tell(m.ActionTaken("a", action, reason, **more))


def decided(story: Story, trial: str = "a") -> list[str]:
    return [str(one) for one in story.runner.summary(trial).decisions]


def test_decisions_of_an_ended_trial_stand_in_their_order_with_steps_and_reasons(
    story: Story,
) -> None:
    story.tell(m.Tick(7.5))
    story.report("a", 3)
    act(story, m.PAUSE, "it waits")
    story.paused("a")
    story.free("a")
    act(story, m.RESUME, "it is among the best")
    story.choose("a")
    story.report("a", 4, m.DecisionMade("a", 4, m.STOP, "it is too slow"), attempt=2)
    story.finish("a", 2)
    story.free("a", 2)
    assert story.runner.live == {}
    assert decided(story) == [
        "paused at step 3: it waits",
        "resumed at step 3: it is among the best",
        "stopped at step 4: it is too slow",
    ]
    assert {one.elapsed_s for one in story.runner.summary("a").decisions} == {7.5}


def test_action_that_changes_nothing_is_no_decision(story: Story) -> None:
    act(story, m.RESUME)
    act(story, m.PAUSE)
    act(story, m.PAUSE)
    act(story, m.RESUME)
    act(story, m.RESUME)
    assert decided(story) == ["paused at step 0: why", "resumed at step 0: why"]


def test_decision_of_a_user_is_kept_once(story: Story) -> None:
    story.tell(m.StopRequested("a", "stopped by ada"))
    story.tell(m.StopRequested("a", "stopped by bob"))
    assert decided(story) == ["stopped at step 0: stopped by ada"]


def test_stop_criterion_that_ended_a_trial_is_kept_with_its_value(story: Story) -> None:
    story.report("a", 50, done=True)
    assert decided(story) == [
        "stopped at step 50: training_iteration 50 has reached the stop criterion 50"
    ]


def test_trial_that_ends_by_itself_has_no_decision(story: Story) -> None:
    story.report("a", 3, done=True)
    story.finish("a")
    assert decided(story) == []


def test_trial_keeps_a_bounded_number_of_decisions_and_counts_the_others(story: Story) -> None:
    for number in range(MOST_DECISIONS + 5):
        act(story, m.SET_CONFIG, f"{number}")
    summary = story.runner.summary("a")
    assert [one.reason for one in summary.decisions] == [
        str(number) for number in range(5, MOST_DECISIONS + 5)
    ]
    assert summary.decisions_before == 5


def test_reason_of_an_earlier_journal_is_cut(story: Story) -> None:
    act(story, m.PAUSE, "x" * 10_000)
    (decision,) = story.runner.summary("a").decisions
    assert decision.reason == "x" * REASON_CHARACTERS


def test_result_has_the_decisions_since_the_result_before(story: Story) -> None:
    act(story, m.SET_RESOURCES, "more")
    first, *_ = story.report("a", 1)
    second, *_ = story.report("a", 2, m.DecisionMade("a", 2, m.PAUSE, "others first"))
    assert first == c.NotifyResult(
        "a", result("a", 1), False, (TrialDecision(0, m.SET_RESOURCES, "more"),)
    )
    assert isinstance(second, c.NotifyResult)
    assert second.decisions == ()  # it was pausing already, so that nothing was decided


def test_exploit_names_its_source_and_the_lineage_that_it_ended() -> None:
    story = Story(cpus=2.0)
    for trial in ("good", "bad"):
        story.start(trial, TO_THE_END)
        story.tell(result(trial, 2, is_saved=True))
    story.tell(m.ActionTaken("bad", m.EXPLOIT, "0.9 against 0.6", "good"))
    story.tell(m.ActionTaken("bad", m.STOP, "enough"))
    assert decided(story, "bad") == [
        "exploited trial good at step 2: 0.9 against 0.6",
        "stopped at step 2 of lineage 1: enough",
    ]


@pytest.mark.parametrize("errored", ["resume", "restart"])
def test_trial_that_runs_again_keeps_its_decisions(story: Story, errored: str) -> None:
    act(story, m.PAUSE)
    story.tell(m.TrialFailed("a", 1, "user", "ValueError: no", "", 0.0))
    story.free("a")
    story.tell(m.ExperimentResumed(2, 0.0, errored=errored, is_cold=False))
    assert story.runner.live["a"].status in {"PENDING", "RUNNING", "PAUSED"}
    assert decided(story) == ["paused at step 0: why"]


def test_snapshot_of_an_earlier_version_has_no_decisions(story: Story) -> None:
    act(story, m.SET_RESOURCES)
    state = msgspec.msgpack.decode(dump(story.runner))
    del state["settings"]["stop"]
    for trial in state["live"]:
        for name in ("decisions", "decisions_before", "decisions_due"):
            del trial[name]
    read = TrialRunner.load(story.settings, msgspec.msgpack.encode(state), {})
    assert read.live["a"].decisions == []
    assert read.live["a"].take_due_decisions() == ()
    assert read.settings.stop == ()


def test_summary_of_an_earlier_version_has_no_decisions() -> None:
    *before, _, _ = msgspec.msgpack.decode(m.encode(TrialSummary(0, b"", "", {})))
    read = msgspec.msgpack.decode(m.encode(before), type=TrialSummary)
    assert (read.decisions, read.decisions_before) == ((), 0)
