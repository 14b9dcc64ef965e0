"""The auditor rejects events that violate an invariant of the journal."""

from __future__ import annotations

import msgspec
import pytest

from tunemq.testing.journal_auditor import JournalAuditor
from tunemq_scheduler.core.nodes.slots import Slot
from tunemq_scheduler.core.runner_settings import RunnerSettings
from tunemq_scheduler.core.runner_state import RunnerState
from tunemq_scheduler.core.trials.trial import ResultReview
from tunemq_shared.base.errors import InvariantBroken
from tunemq_shared.protocol import messages as m

NODE = m.NodeJoined("n.1", "n", "host", "127.0.0.1", {"cpu": 2.0})


def suggested(n: int, trial: str) -> m.ConfigSuggested:
    return m.ConfigSuggested(n, trial, b"", "", {"cpu": 1.0})


def result(step: int, attempt: int = 1) -> m.ResultReported:
    return m.ResultReported("t", attempt, step, {}, 0.0, 1.0, 1.0, 1.0, step)


def running(**options: object) -> JournalAuditor:
    """Return the auditor of a journal in which a trial runs without a violation."""
    auditor = JournalAuditor(RunnerSettings(max_failures=-1), **options)
    auditor.turn(
        m.JournalRecord(event)
        for event in (
            NODE,
            suggested(0, "t"),
            m.TrialChosen("t"),
            m.BatchRead("n.1", 1, 1, "1-0"),
            m.TrialStarted("t", 1, 1, "host", "127.0.0.1", 0.0),
        )
    )
    return auditor


def test_a_proper_journal_passes() -> None:
    auditor = running()
    auditor.event(m.BatchRead("n.1", 2, 3, "2-0"))
    auditor.event(result(1))
    auditor.event(result(2))
    assert auditor.events == 8
    assert auditor.runner.live["t"].last_step == 2


def test_i1_trials_are_suggested_in_turn() -> None:
    with pytest.raises(InvariantBroken, match=r"I1.*trial u: it is suggested as number 2"):
        running().event(suggested(2, "u"))


def test_i1_a_trial_that_is_lost_on_the_way_is_missed() -> None:
    auditor = running()
    del auditor.runner.live["t"]
    with pytest.raises(InvariantBroken, match=r"I1.*1 were suggested, 0 are known"):
        auditor.check()


@pytest.mark.parametrize("first", [1, 3])
def test_i2_a_batch_follows_the_one_before(first: int) -> None:
    with pytest.raises(InvariantBroken, match=r"I2.*1 was the last event"):
        running().event(m.BatchRead("n.1", first, first, "2-0"))


def test_i2_what_is_journalled_is_what_the_node_has_stated() -> None:
    auditor = running()
    auditor._said = lambda _instance_id, number: result(number)
    auditor.event(m.BatchRead("n.1", 2, 2, "2-0"))
    with pytest.raises(InvariantBroken, match=r"I2.*n\.1's event 2 is ResultReported"):
        auditor.event(result(1))


def careless(monkeypatch: pytest.MonkeyPatch) -> None:
    """Make the runner accept every result."""
    monkeypatch.setattr(RunnerState, "review", lambda *_: ResultReview.BEFORE_HORIZON)


def test_i2_no_step_is_recorded_twice(monkeypatch: pytest.MonkeyPatch) -> None:
    careless(monkeypatch)
    auditor = running()
    auditor.event(result(1))
    with pytest.raises(InvariantBroken, match=r"I2.*trial t: step 1 is recorded a second time"):
        auditor.event(result(1))


def test_i3_no_step_is_left_out_and_the_trials_story_is_told() -> None:
    with pytest.raises(InvariantBroken, match=r"I3.*step 2 follows step 0") as caught:
        running().event(result(2))
    assert "TrialChosen" in str(caught.value)


def test_i3_no_result_follows_one_that_was_the_last(monkeypatch: pytest.MonkeyPatch) -> None:
    careless(monkeypatch)
    auditor = running()
    auditor.event(msgspec.structs.replace(result(1), done=True))
    with pytest.raises(InvariantBroken, match=r"I3.*trial t: step 2 follows one that was its last"):
        auditor.event(result(2))


def test_i4_nothing_of_an_older_attempt_is_recorded(monkeypatch: pytest.MonkeyPatch) -> None:
    careless(monkeypatch)
    auditor = running()
    auditor.event(m.TrialProcessDied("t", 1, 1, 9, None, 0.0))
    auditor.event(m.SlotFreed("t", 1))
    auditor.event(m.TrialChosen("t"))
    with pytest.raises(InvariantBroken, match=r"I4.*epoch 1 reported step 1, 2 is the newest"):
        auditor.event(result(1))


def test_i5_nobody_holds_more_of_a_node_than_it_has() -> None:
    auditor = running()
    auditor.runner.slots._held["t", 1] = Slot("n.1", {"cpu": 3.0}, {})
    with pytest.raises(InvariantBroken, match=r"I5.*3 cpu of n\.1 are held"):
        auditor.check()


def test_i5_who_runs_has_a_slot() -> None:
    auditor = running()
    auditor.runner.slots.give_back("t", 1)
    with pytest.raises(InvariantBroken, match=r"I5.*it is RUNNING on None"):
        auditor.check()


class Nothing:
    def has(self, key: str) -> bool:
        return False


def test_i7_what_is_kept_stands_in_the_store() -> None:
    auditor = running(store=Nothing())
    auditor.event(result(1))
    with pytest.raises(InvariantBroken, match=r"I7.*t/checkpoint_1-1 is kept and not in the store"):
        auditor.event(m.CheckpointCommitted("t", 1, 1, 1, "t/checkpoint_1-1", "hash", 1))


def test_i8_a_runner_that_knows_more_than_its_journal_is_noticed() -> None:
    auditor, live = running(), running().runner
    auditor.same_as(live)
    live.handle(result(1))
    with pytest.raises(InvariantBroken, match="I8"):
        auditor.same_as(live)


def test_a_whole_state_is_looked_at_as_often_as_is_wanted() -> None:
    auditor = running(every=3)
    auditor.runner.counts["PENDING"] += 1
    with pytest.raises(InvariantBroken, match="I1"):
        auditor.event(result(1))  # the sixth event
