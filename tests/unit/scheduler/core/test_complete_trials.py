"""The pure runner: a trial that had its last result is complete, even if its process dies later."""

from __future__ import annotations

import pytest

from tests.support.searches.plans import PLAN
from tests.unit.scheduler.scripted_runner import NODE, TO_THE_END, Story, kinds, result
from tunemq.testing.comparable_state import comparable
from tunemq.testing.journal_replay import replay
from tunemq_scheduler.core import commands as c
from tunemq_scheduler.core.runner_snapshot import dump
from tunemq_scheduler.core.trial_runner import TrialRunner
from tunemq_scheduler.core.trials.trial import ResultReview
from tunemq_scheduler.output.terminal.notice_text import format_trial_end
from tunemq_shared.protocol import messages as m
from tunemq_shared.protocol.result_conditions import Condition

COLD = m.ExperimentResumed(2, 0.0)
WARM = m.ExperimentResumed(2, 0.0, is_cold=False)
DIED = m.TrialProcessDied("a", 1, 1, 9, None, 0.0)
ENDED = c.NotifyTrialEnd("a", "TERMINATED", "it reached its end")

#: Events by which a trial loses its process.
FACTS = {
    "host died": DIED,
    "cleanup raised": m.TrialFailed("a", 1, "user", "ValueError: no", "", 0.0),
    "forkserver died": m.TrialFailed("a", 1, m.FORKSERVER_LOST, "it died", "", 0.0),
    "out of GPU memory": m.TrialFailed("a", 1, "cuda_memory", "out of memory", "", 0.0),
    "time limit": m.TrialFailed("a", 1, "trial_limit", "too long", "", 0.0),
    "freed without a word": m.SlotFreed("a", 1),
    "paused": m.TrialPaused("a", 1),
    "node silent": m.NodeLost(NODE, "its lease ran out"),
    "node dead": m.NodeLost(NODE, "started again", is_dead=True),
    "script restored": COLD,
}


def complete(*, saved: int = 2, **settings: int) -> Story:
    """Bring trial a to its last result, at step 2."""
    story = Story(**settings)
    story.start("a", TO_THE_END)
    story.report("a", 1)
    story.report("a", 2, done=True)
    if saved:
        story.commit("a", saved)
    return story


def check_ended(story: Story, told: list[c.Command]) -> None:
    """Check that trial a ended as if its cleanup had succeeded."""
    assert [one for one in told if isinstance(one, c.NotifyCommand)] == [ENDED]
    summary = story.runner.summary("a")
    assert (summary.status, summary.num_failures, summary.failure) == ("TERMINATED", 0, None)
    assert story.report("a", 3) == []
    assert summary.last_result == result("a", 2, done=True)


@pytest.mark.parametrize("max_failures", [0, 3, -1])
@pytest.mark.parametrize("fact", FACTS.values(), ids=FACTS)
def test_runner_with_a_complete_trial_ends_it_however_its_process_dies(fact, max_failures) -> None:
    story = complete(max_failures=max_failures)
    check_ended(story, story.tell(fact))
    again = replay(story.settings, m.decode_records(m.encode(story.journal_records)))
    assert comparable(again) == comparable(story.runner)


@pytest.mark.parametrize("fact", FACTS.values(), ids=FACTS)
def test_runner_loaded_from_a_snapshot_ends_a_complete_trial(fact) -> None:
    story = complete(max_failures=-1)
    story.runner = TrialRunner.load(story.settings, dump(story.runner), story.runner.finished)
    check_ended(story, story.tell(fact))


@pytest.mark.parametrize("fact", FACTS.values(), ids=FACTS)
def test_runner_with_a_complete_trial_that_was_to_pause_ends_it(fact) -> None:
    story = Story(max_failures=-1)
    story.start("a")
    story.pause("a", 1)
    story.report("a", 2, done=True)
    check_ended(story, story.tell(fact))


def test_runner_with_a_complete_trial_that_was_cut_short_reports_it() -> None:
    told, end = complete(saved=1).tell(DIED)
    assert told == c.WarnTrialEnd("a", DIED, "host", 2, 1)
    assert end == ENDED
    assert isinstance(told, c.WarnTrialEnd)
    text = format_trial_end(told, saves_at_end=False)
    assert "trial a had reported its last result (step 2)" in text
    assert "on host (" in text
    assert "SIGKILL" in text
    assert "a checkpoint of that step is missing, its newest one is of step 1" in text


@pytest.mark.parametrize("is_due", [True, False])
def test_end_without_checkpoints_reports_a_missing_one_only_where_it_was_due(is_due) -> None:
    text = format_trial_end(c.WarnTrialEnd("a", None, "host", 2, 0), saves_at_end=is_due)
    assert ("a checkpoint of that step is missing, it has none" in text) is is_due


@pytest.mark.parametrize("event", [COLD, WARM], ids=["cold", "warm"])
def test_runner_resuming_an_interrupted_search_ends_its_complete_trials(event) -> None:
    story = complete()
    story.tell(m.RunInterrupted("Ctrl-C"))
    story.die("a")
    story.free("a")
    assert story.runner.live["a"].status == "PENDING"
    check_ended(story, story.tell(event))


def test_runner_resuming_warm_leaves_a_complete_trial_to_its_process() -> None:
    story = complete()
    assert story.tell(WARM) == []
    check_ended(story, story.finish("a"))


def test_runner_with_a_complete_trial_retried_for_its_checkpoint_runs_it_to_that_step() -> None:
    story = complete(saved=0, max_storage_failures=1)
    story.fail("a")
    story.free("a")
    # The retry may report another result, which does not meet the stopping criteria.
    start = PLAN.trial_spec(story.choose("a"))
    assert start.stop == (Condition("training_iteration", 2),)
    assert start.last_step == 1, "at a repeated step the trial does not check its criteria"
    late = result("a", 2, attempt=2, done=True)
    assert story.runner.review(late) is ResultReview.REPEATED
    assert story.tell(late) == []
    story.finish("a", attempt=2)
    assert kinds(story.free("a", attempt=2)) == ["ReleaseTrial"]
    summary = story.runner.summary("a")
    assert summary.status == "TERMINATED"
    assert summary.last_result == result("a", 2, done=True)


def test_runner_with_a_complete_trial_in_error_resumes_it_up_to_its_end() -> None:
    story = complete(saved=2)
    story.fail("a")
    story.free("a")
    assert story.runner.summary("a").status == "ERROR"
    story.tell(m.ExperimentResumed(2, 0.0, errored="resume", is_cold=False))
    assert story.choose("a").is_complete
    assert story.report("a", 3, attempt=2, done=True) == []
    story.finish("a", attempt=2)
    assert story.runner.summary("a").status == "TERMINATED"


@pytest.mark.parametrize("is_ended", [False, True])
def test_runner_with_criteria_that_let_a_complete_trial_continue_records_more(is_ended) -> None:
    story = complete()
    if is_ended:
        story.finish("a")
        story.free("a")
    story.tell(m.ExperimentResumed(2, 0.0, also=("a",)))
    story.join("node.2")
    (order,) = story.tell(m.TrialChosen("a"))
    assert isinstance(order, c.StartTrial)
    assert order.last_step == 2
    assert kinds(story.report("a", 3, attempt=2))[0] == "NotifyResult"


def test_runner_with_a_trial_that_dies_while_a_stopper_ends_the_search_ends_it() -> None:
    story = Story(max_failures=-1)
    story.start("a", TO_THE_END)
    story.report("a", 1)
    story.tell(m.StopRequested(None, "a stopper stopped the experiment"))
    assert kinds(story.die("a")) == ["NotifyTrialEnd"]
    assert story.runner.summary("a").status == "TERMINATED"


def test_runner_with_a_function_that_died_after_its_return_keeps_it_finished() -> None:
    story = Story(max_failures=-1)
    story.start("a", TO_THE_END)
    story.report("a", 1)
    story.finish("a")
    assert story.die("a") == []
    assert story.runner.live["a"].status == "TERMINATED"
