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


def test_auditor_accepts_a_valid_journal() -> None:
    auditor = running()
    auditor.event(m.BatchRead("n.1", 2, 3, "2-0"))
    auditor.event(result(1))
    auditor.event(result(2))
    assert auditor.events == 8
    assert auditor.runner.live["t"].last_step == 2


def test_i1_trial_suggested_out_of_turn_is_rejected() -> None:
    with pytest.raises(InvariantBroken, match=r"I1.*trial u: it is suggested as number 2"):
        running().event(suggested(2, "u"))


def test_i1_missing_trial_is_noticed() -> None:
    auditor = running()
    del auditor.runner.live["t"]
    with pytest.raises(InvariantBroken, match=r"I1.*1 were suggested, 0 are known"):
        auditor.check()


@pytest.mark.parametrize("first", [1, 3])
def test_i2_batch_that_does_not_follow_the_last_event_is_rejected(first: int) -> None:
    with pytest.raises(InvariantBroken, match=r"I2.*1 was the last event"):
        running().event(m.BatchRead("n.1", first, first, "2-0"))


def test_i2_journalled_event_that_differs_from_the_nodes_is_rejected() -> None:
    auditor = running()
    auditor._said = lambda _instance_id, number: result(number)
    auditor.event(m.BatchRead("n.1", 2, 2, "2-0"))
    with pytest.raises(InvariantBroken, match=r"I2.*n\.1's event 2 is ResultReported"):
        auditor.event(result(1))


def careless(monkeypatch: pytest.MonkeyPatch) -> None:
    """Make the runner accept every result."""
    monkeypatch.setattr(RunnerState, "review", lambda *_: ResultReview.BEFORE_HORIZON)


def test_i2_step_recorded_twice_is_rejected(monkeypatch: pytest.MonkeyPatch) -> None:
    careless(monkeypatch)
    auditor = running()
    auditor.event(result(1))
    with pytest.raises(InvariantBroken, match=r"I2.*trial t: step 1 is recorded a second time"):
        auditor.event(result(1))


def test_i3_skipped_step_is_rejected_with_the_trials_history() -> None:
    with pytest.raises(InvariantBroken, match=r"I3.*step 2 follows step 0") as caught:
        running().event(result(2))
    assert "TrialChosen" in str(caught.value)


def test_i3_result_after_the_last_one_is_rejected(monkeypatch: pytest.MonkeyPatch) -> None:
    careless(monkeypatch)
    auditor = running()
    auditor.event(msgspec.structs.replace(result(1), done=True))
    with pytest.raises(InvariantBroken, match=r"I3.*trial t: step 2 follows one that was its last"):
        auditor.event(result(2))


def test_i4_result_of_an_older_attempt_is_rejected(monkeypatch: pytest.MonkeyPatch) -> None:
    careless(monkeypatch)
    auditor = running()
    auditor.event(m.TrialProcessDied("t", 1, 1, 9, None, 0.0))
    auditor.event(m.SlotFreed("t", 1))
    auditor.event(m.TrialChosen("t"))
    with pytest.raises(InvariantBroken, match=r"I4.*attempt 1 reported step 1, 2 is the newest"):
        auditor.event(result(1))


def test_i5_more_held_than_the_node_has_is_rejected() -> None:
    auditor = running()
    auditor.runner.slots._held["t", 1] = Slot("n.1", {"cpu": 3.0}, {})
    with pytest.raises(InvariantBroken, match=r"I5.*3 cpu of n\.1 are held"):
        auditor.check()


def test_i5_running_trial_without_a_slot_is_rejected() -> None:
    auditor = running()
    auditor.runner.slots.give_back("t", 1)
    with pytest.raises(InvariantBroken, match=r"I5.*it is RUNNING on None"):
        auditor.check()


class Nothing:
    def has(self, key: str) -> bool:
        return False


def test_i7_kept_checkpoint_that_is_not_in_the_store_is_rejected() -> None:
    auditor = running(store=Nothing())
    auditor.event(result(1))
    with pytest.raises(InvariantBroken, match=r"I7.*t/checkpoint_1-1 is kept and not in the store"):
        auditor.event(m.CheckpointCommitted("t", 1, 1, 1, "t/checkpoint_1-1", "hash", 1))


def test_i8_runner_ahead_of_its_journal_is_rejected() -> None:
    auditor, live = running(), running().runner
    auditor.same_as(live)
    live.handle(result(1))
    with pytest.raises(InvariantBroken, match="I8"):
        auditor.same_as(live)


def test_auditor_checks_the_whole_state_at_the_given_interval() -> None:
    auditor = running(every=3)
    auditor.runner.counts["PENDING"] += 1
    with pytest.raises(InvariantBroken, match="I1"):
        auditor.event(result(1))  # the sixth event
