"""States of a trial, and the identity of trials."""

from __future__ import annotations

import itertools

import pytest

from tunemq_scheduler.core.runner_settings import RunnerSettings
from tunemq_scheduler.core.trial_runner import TrialRunner
from tunemq_scheduler.core.trials.kept_checkpoints import CheckpointManager, RetentionPolicy
from tunemq_scheduler.core.trials.trial import STATES, Trial
from tunemq_shared.base.errors import BugError, IllegalTransition
from tunemq_shared.protocol import messages as m

LEGAL = {
    ("PENDING", "RUNNING"),
    ("PENDING", "PAUSED"),
    ("PENDING", "TERMINATED"),
    ("PENDING", "ERROR"),
    ("RUNNING", "PENDING"),
    ("RUNNING", "PAUSED"),
    ("RUNNING", "TERMINATED"),
    ("RUNNING", "ERROR"),
    ("PAUSED", "PENDING"),
    ("PAUSED", "RUNNING"),
    ("PAUSED", "TERMINATED"),
    ("PAUSED", "ERROR"),
}


def new_trial() -> Trial:
    return Trial(
        trial_id="t",
        number=0,
        config=b"",
        tag="",
        resources={"cpu": 1.0},
        checkpoints=CheckpointManager(RetentionPolicy()),
    )


@pytest.mark.parity(80, 82)
def test_new_trial_is_pending() -> None:
    trial = new_trial()
    assert (trial.status, trial.is_finished, trial.last_step) == ("PENDING", False, 0)


@pytest.mark.parity(80)
@pytest.mark.parametrize(("start", "finish"), list(itertools.product(STATES, STATES)))
def test_trial_makes_only_the_listed_transitions(start: str, finish: str) -> None:
    trial = new_trial()
    trial.status = start
    if (start, finish) in LEGAL:
        trial.move_to(finish)
        assert trial.status == finish
        assert trial.is_finished == (finish in {"TERMINATED", "ERROR"})
    else:
        with pytest.raises(IllegalTransition):
            trial.move_to(finish)
        assert trial.status == start


@pytest.mark.parity(84)
def test_trial_id_is_given_to_one_trial_only() -> None:
    runner = TrialRunner(RunnerSettings())
    suggested = m.ConfigSuggested(0, "a", b"", "", {"cpu": 1.0})
    runner.handle(suggested)
    with pytest.raises(BugError, match="suggested twice"):
        runner.handle(suggested)
