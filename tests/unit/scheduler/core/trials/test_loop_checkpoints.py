"""How the experiment loop handles pauses, checkpoints and the store."""

from __future__ import annotations

from typing import Any

import pytest

from tests.unit.scheduler.scripted_loop import (
    NODE,
    Loop,
    result,
    started,
)
from tunemq_scheduler.core import commands as c
from tunemq_scheduler.core.runner_settings import RunnerSettings
from tunemq_scheduler.core.trials.kept_checkpoints import RetentionPolicy
from tunemq_scheduler.schedulers import TrialScheduler
from tunemq_shared.base.errors import SearchFailed
from tunemq_shared.protocol import messages as m


class PausesAtOne(TrialScheduler):
    """Pauses each trial once and resumes it on request."""

    may_continue = True

    def __init__(self) -> None:
        self.ends: list[tuple[str, str]] = []

    def on_trial_result(self, runner, trial, result):
        return self.PAUSE.because("enough") if result["training_iteration"] == 1 else self.CONTINUE

    def on_trial_remove(self, runner, trial):
        self.ends.append(("remove", trial.trial_id))

    def on_trial_complete(self, runner, trial, result):
        self.ends.append(("complete", trial.trial_id))

    def choose_trial_to_run(self, runner):
        fresh = (one for one in runner.waiting() if self.may_continue or one.status == "PENDING")
        return next(fresh, None)


def paused_once(loop: Loop) -> list[tuple[Any, ...]]:
    """Let the first trial report, pause and free its slot; return the actions of that turn."""
    loop.turn(NODE)
    assert ("pause", "t_00000") in loop.batch(1, started(), result(1))
    return loop.batch(3, m.TrialPaused("t_00000", 1), m.SlotFreed("t_00000", 1))


@pytest.mark.parity(68, 172)
def test_loop_pauses_a_trial_with_a_reason_and_resumes_it_in_a_new_attempt() -> None:
    loop = Loop(scheduler=PausesAtOne(), trials=1)
    assert ("start", "t_00000", 2) in paused_once(loop)
    (decided,) = [
        answer
        for entry in loop.journal.journal_records
        for answer in entry.answers
        if isinstance(answer, m.DecisionMade)
    ]
    assert decided == m.DecisionMade("t_00000", 1, m.PAUSE, "enough")


@pytest.mark.parity(68)
def test_loop_gives_the_slot_of_a_paused_trial_to_a_new_one() -> None:
    loop = Loop(scheduler=PausesAtOne(), trials=2)
    loop.loop.algorithms.scheduler.may_continue = False
    assert ("start", "t_00001", 1) in paused_once(loop)
    assert loop.loop.trials["t_00000"].status == "PAUSED"


def test_loop_whose_paused_trials_are_never_chosen_ends_with_the_reason() -> None:
    loop = Loop(scheduler=PausesAtOne(), trials=1)
    loop.loop.algorithms.scheduler.may_continue = False
    with pytest.raises(SearchFailed, match=r"all 1 trials .* are PAUSED, and PausesAtOne lets"):
        paused_once(loop)


def test_stopped_paused_trial_is_removed_from_the_scheduler() -> None:
    scheduler = PausesAtOne()
    loop = Loop(scheduler=scheduler, trials=2)
    scheduler.may_continue = False
    paused_once(loop)
    loop.loop.request_stop("a user asked for it", trial="t_00000")
    loop.turn()
    assert scheduler.ends == [("remove", "t_00000")]


# --- the store ------------------------------------------------------------------------------------


def test_wait_for_the_store_is_reported_after_it_is_journalled() -> None:
    loop = Loop()
    loop.turn(NODE)
    log = loop.batch(1, started(), m.TrialWaits("t_00000", 1, "save", "connection refused"))
    assert log[-1] == ("waits", "t_00000", "save", "connection refused")
    assert log[0][0] == "journal"
    log = loop.batch(3, m.TrialWaits("t_00000", 1, "", ""))
    assert log[-1] == ("waits", "t_00000", "", "")


@pytest.mark.parity(103)
def test_damaged_checkpoint_is_reported_with_the_one_taken_instead() -> None:
    loop = Loop()
    loop.turn(NODE)
    damaged = m.CheckpointDamaged("t_00000", 1, "a/checkpoint_1-2", "one bit.", "a/checkpoint_1-1")
    log = loop.batch(1, damaged, started())
    (told,) = [line[1] for line in log if line[0] == "notices"]
    assert "a/checkpoint_1-2" in told
    assert "continues from a/checkpoint_1-1 instead" in told
    assert loop.loop.has_leftovers


def test_lost_checkpoint_is_reported_and_its_remains_are_deleted() -> None:
    loop = Loop()
    loop.turn(NODE)
    written = m.CheckpointWritten("t_00000", 1, 1, 1, "a/checkpoint_1-1", "0" * 64, 10)
    loop.batch(1, started(), result(1), written)
    lost = m.CheckpointLost("t_00000", 1, "a/checkpoint_1-1", "the store was away.", 0.0)
    log = loop.batch(4, lost)
    (told,) = [line[1] for line in log if line[0] == "notices"]
    assert "a/checkpoint_1-1" in told
    assert "the store was away" in told


def test_expired_checkpoint_is_deleted_after_it_is_journalled() -> None:
    loop = Loop()
    loop.runner.settings = RunnerSettings(request={"cpu": 1.0}, keep=RetentionPolicy(num_to_keep=1))
    loop.turn(NODE)
    kept = [
        m.CheckpointCommitted("t_00000", 1, n, n, f"a/checkpoint_1-{n}", "0" * 64, 10)
        for n in (1, 2)
    ]
    log = loop.batch(1, started(), result(1), kept[0], result(2), kept[1])
    discarded = [line[1] for line in log if line[0] == "discard"]
    assert discarded == [c.DeleteCheckpoint("t_00000", "a/checkpoint_1-1")]
    assert log[0][0] == "journal"


def test_loop_starts_new_configurations_before_it_resumes_paused_trials() -> None:
    loop = Loop(scheduler=PausesAtOne(), trials=2)
    assert ("start", "t_00001", 1) in paused_once(loop)


@pytest.mark.parity(105)
def test_trial_made_to_forget_its_checkpoints_begins_anew() -> None:
    loop = Loop()
    loop.turn(NODE)
    committed = m.CheckpointCommitted("t_00000", 1, 1, 1, "a/checkpoint_1-1", "0" * 64, 10)
    loop.batch(1, started(), result(1), committed)
    assert loop.runner.live["t_00000"].has_checkpoint
    loop.loop.forget_checkpoints("t_00000")
    loop.turn()
    assert not loop.runner.live["t_00000"].has_checkpoint
