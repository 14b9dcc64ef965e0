"""The simulation notices when a defence is missing: without each of these, some seed fails."""

from __future__ import annotations

from typing import Any

import pytest

from tests.simulation.scenarios import check
from tunemq.testing.faulty_executor import FaultyTrialExecutor
from tunemq.testing.simulated_farm import SimulatedFarm
from tunemq_scheduler.core.handlers import node_events
from tunemq_scheduler.core.runner_state import RunnerState
from tunemq_scheduler.core.trial_runner import TrialRunner
from tunemq_scheduler.core.trials.trial import ResultReview, Trial
from tunemq_scheduler.experiment.experiment_loop import ExperimentLoop
from tunemq_scheduler.transport.desired_state import DesiredState
from tunemq_shared.protocol.messages import NodeReturned


def noticed(scenario: str, seeds: int = 12) -> str:
    """The error of the first failing seed."""
    for seed in range(seeds):
        try:
            check(scenario, seed)
        except Exception as problem:  # noqa: BLE001  any exception: the fault was detected
            return f"{type(problem).__name__}: {problem}"
    return ""


def test_missing_check_of_attempts_is_noticed(monkeypatch: pytest.MonkeyPatch) -> None:
    review = RunnerState.review

    def careless(self: RunnerState, result: Any) -> ResultReview:
        trial = self.live.get(result.trial)
        if (
            trial is not None
            and trial.attempt > result.attempt > 0
            and result.step > trial.last_step
        ):
            return ResultReview.BEFORE_HORIZON
        return review(self, result)

    monkeypatch.setattr(RunnerState, "review", careless)
    assert "I4" in noticed("f08_cut_off")


def test_node_that_forgets_unjournalled_events_is_noticed(monkeypatch: pytest.MonkeyPatch) -> None:
    acknowledge = FaultyTrialExecutor.acknowledge

    def hasty(self: Any, acknowledged: dict[str, int]) -> None:
        acknowledge(self, {node: last + 1 for node, last in acknowledged.items()})

    monkeypatch.setattr(FaultyTrialExecutor, "acknowledge", hasty)
    assert "I2" in noticed("f06_wipes")


def test_scheduler_that_does_not_resend_lost_orders_is_noticed(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(DesiredState, "is_confirmed", property(lambda _self: True))
    assert "I6" in noticed("f13_late_and_lost")


def test_node_that_ignores_a_new_generation_is_noticed(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def in_secret(self: SimulatedFarm) -> None:
        self.is_open = True
        for node in self.nodes.values():
            node._generation = self.generation

    monkeypatch.setattr(SimulatedFarm, "open_anew", in_secret)
    assert "is missing before it" in noticed("f06_wipes")


def test_event_taken_twice_is_noticed(monkeypatch: pytest.MonkeyPatch) -> None:
    def greedy(self: ExperimentLoop, batch: Any) -> int:
        self._take(batch)
        return 0

    monkeypatch.setattr(ExperimentLoop, "_open_batch", greedy)
    assert "I2" in noticed("f12_doubled")


def test_returned_node_without_its_assignments_is_noticed(monkeypatch: pytest.MonkeyPatch) -> None:
    def silent(runner: TrialRunner, event: Any) -> None:
        node_events.returned(runner, event)
        runner.commands = []

    monkeypatch.setitem(TrialRunner._HANDLERS, NodeReturned, silent)
    assert "I10" in noticed("f08_cut_off")


def test_scheduler_that_acts_before_its_journal_is_written_is_noticed(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def eager(self: ExperimentLoop) -> None:
        driver = self.driver
        journal_records, driver.journal_records = driver.journal_records, []
        if len(journal_records) > 1 or driver.commands:
            commands = list(driver.commands)
            self._perform()
            driver.commands = commands  # what the journal's auditor compares
            self.journal.append(journal_records)
            self.executor.acknowledge(self.runner.acknowledged)
            driver.commands = []
        else:
            driver.end_turn()

    monkeypatch.setattr(ExperimentLoop, "_commit", eager)
    assert "I7" in noticed("f03_schedulers_die", seeds=24)


def test_slot_reused_before_its_trial_process_is_gone_is_noticed(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    end = TrialRunner.end

    def early(self: TrialRunner, trial: Any, *rest: Any, **how: Any) -> None:
        self.slots.give_back(trial.trial_id, trial.attempt)
        end(self, trial, *rest, **how)

    monkeypatch.setattr(TrialRunner, "end", early)
    assert "I5" in noticed("undisturbed")


def test_retry_of_a_trial_with_its_last_result_is_noticed(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(Trial, "is_complete", False)
    assert "follows one that was its last" in noticed("f02_trial_processes_die_at_the_end")
