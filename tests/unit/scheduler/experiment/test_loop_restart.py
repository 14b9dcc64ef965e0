"""Restart of a loop after a plug-in raised in the middle of a batch."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest

from tests.support.searches.plans import PLAN
from tests.unit.scheduler.scripted_loop import NODE, Loop, result, started
from tunemq.testing.comparable_state import comparable
from tunemq.testing.journal_replay import replay
from tunemq_scheduler.core.handlers.experiment_resumed import NOT_RESUMED
from tunemq_scheduler.core.runner_settings import RunnerSettings
from tunemq_scheduler.core.trial_runner import TrialRunner
from tunemq_scheduler.experiment.algorithm_driver import AlgorithmDriver
from tunemq_scheduler.experiment.event_driver import EventDriver
from tunemq_scheduler.experiment.open_experiment import (
    OpenExperiment,
    ResumeOptions,
    StopCriteria,
    has_work,
    resumption,
)
from tunemq_scheduler.schedulers import FIFOScheduler
from tunemq_scheduler.search import BasicVariantGenerator, SearchGenerator
from tunemq_scheduler.stopping.stopper import NoopStopper
from tunemq_shared.base.errors import SearchFailed
from tunemq_shared.protocol import messages as m
from tunemq_shared.protocol.result_conditions import Condition


class RaisesAt(FIFOScheduler):
    def __init__(self, step: int) -> None:
        self.step = step

    def horizon(self, trial):
        return None

    def on_trial_result(self, runner, trial, result):
        if result["training_iteration"] == self.step:
            raise ValueError("no")
        return self.CONTINUE


@pytest.mark.parametrize("step", [1, 2, 3])
def test_restart_reads_the_unhandled_rest_of_a_batch_again(step: int) -> None:
    loop = Loop(scheduler=RaisesAt(step), trials=1)
    loop.turn(NODE)
    loop.batch(1, started())
    events = [result(1), result(2), result(3)]
    with pytest.raises(SearchFailed):
        loop.batch(2, *events)
    again = replay(loop.runner.settings, loop.journal.journal_records)
    assert comparable(again) == comparable(loop.runner)
    assert again.acknowledged == {"n.1": step}, (
        "the start, and the events before the one that raised"
    )
    assert again.cursor == "1-0", "the batch must be read again"
    assert loop.log[-1] == ("acknowledge", {"n.1": step})
    # The restarted scheduler processes the rest of the batch and repeats nothing.
    search = SearchGenerator(BasicVariantGenerator(), {"x": 1}, 1)
    runner = TrialRunner(loop.runner.settings)
    driver = EventDriver(runner, AlgorithmDriver(search=search, scheduler=RaisesAt(0)), PLAN)
    driver.replay([loop.journal.journal_records])
    assert runner.acknowledged.get("n.1", 0) == step
    other = Loop(scheduler=RaisesAt(0), trials=1)
    other.loop.driver, other.loop.runner, other.loop.trials = driver, runner, driver.trials
    other.runner = runner
    other.batch(2, *events)
    assert runner.summary("t_00000").last_result == events[-1]
    assert runner.repeated == 0


def test_restart_does_not_read_a_handled_batch_again() -> None:
    class Stops(BasicVariantGenerator):
        def suggest(self, trial_id):
            if trial_id != "t_00000":
                raise ValueError("no")
            return super().suggest(trial_id)

    loop = Loop(search=Stops(), trials=2)
    loop.turn(NODE)
    ends = m.TrialFinished("t_00000", 1)
    with pytest.raises(SearchFailed):
        loop.batch(1, started(), result(1), ends, m.SlotFreed("t_00000", 1))
    assert loop.runner.acknowledged == {"n.1": 4}
    assert replay(loop.runner.settings, loop.journal.journal_records).acknowledged == {"n.1": 4}


def failed(attempt: int = 1, trial: str = "t_00000") -> m.TrialFailed:
    return m.TrialFailed(trial, attempt, "user", "ValueError: no", "Traceback", 1.0)


def loop_with_an_error() -> Loop:
    loop = Loop(trials=1)
    loop.turn(NODE)
    saved = m.CheckpointCommitted("t_00000", 1, 1, 2, "t_00000/checkpoint_1-000001", "ab", 3)
    loop.batch(
        1, started(), result(1), result(2), saved, result(3), failed(), m.SlotFreed("t_00000", 1)
    )
    assert loop.runner.summary("t_00000").status == "ERROR"
    assert not loop.runner.live
    return loop


def test_restart_leaves_a_trial_in_error_unless_it_should_continue() -> None:
    loop = loop_with_an_error()
    loop.loop.resume(m.ExperimentResumed(2, 0.0))
    summary = loop.runner.summary("t_00000")
    assert summary.status == "ERROR"
    assert summary.failure == failed()
    assert summary.failed_on == "host"


def test_restart_continues_a_trial_in_error_from_its_last_checkpoint() -> None:
    loop = loop_with_an_error()
    loop.loop.resume(m.ExperimentResumed(2, 0.0, errored="resume"))
    trial = loop.runner.live["t_00000"]
    assert (trial.status, trial.lineage, trial.last_step) == ("PENDING", 0, 3)
    assert loop.runner.counts == {
        "PENDING": 1, "RUNNING": 0, "PAUSED": 0, "TERMINATED": 0, "ERROR": 0,
    }  # fmt: skip
    assert [one.key for one in trial.checkpoints] == ["t_00000/checkpoint_1-000001"]
    assert loop.loop.trials["t_00000"].last_result["training_iteration"] == 3
    assert dict(loop.runner.changed_summaries()) == {"t_00000": b""}


def test_restart_of_a_trial_from_scratch_counts_from_one_in_a_new_lineage() -> None:
    loop = loop_with_an_error()
    loop.loop.resume(m.ExperimentResumed(2, 0.0, errored="restart"))
    trial = loop.runner.live["t_00000"]
    assert (trial.status, trial.lineage, trial.last_step) == ("PENDING", 1, 0)
    assert not trial.has_checkpoint
    assert loop.loop.trials["t_00000"].last_result == {}
    loop.turn(m.NodeJoined("n.2", "n", "host", "127.0.0.1", {"cpu": 1.0}))
    attempt = trial.attempt
    begun = m.TrialStarted("t_00000", attempt, 1, "host", "127.0.0.1", 0.0)
    first = m.ResultReported("t_00000", attempt, 1, {"loss": 1.0}, 0.0, 1.0, 1.0, 1.0, 1)
    read = m.BatchRead("n.2", 1, 2, "1-0")
    assert ("NotifyResult", "t_00000") in loop.turn(read, begun, first)
    assert comparable(replay(loop.runner.settings, loop.journal.journal_records)) == comparable(
        loop.runner
    )


class Remembers(RaisesAt):
    """A trial scheduler that keeps all calls about trials."""

    def __init__(self) -> None:
        super().__init__(0)
        self.calls: list[tuple[Any, ...]] = []

    def on_trial_add(self, runner, trial):
        self.calls.append(("add", trial.last_result.get("training_iteration")))

    def on_trial_restart(self, runner, trial):
        self.calls.append(("restart", trial.trial_id, trial.last_result))


class RemembersRestarts(NoopStopper):
    def __init__(self) -> None:
        self.restarted: list[str] = []

    def on_trial_restart(self, trial_id):
        self.restarted.append(trial_id)


@pytest.mark.parametrize(
    ("errored", "calls"),
    [("resume", [("add", 3)]), ("restart", [("restart", "t_00000", {}), ("add", None)])],
)
def test_restart_from_scratch_voids_the_results_for_the_algorithms(errored, calls) -> None:
    def algorithms() -> AlgorithmDriver:
        search = SearchGenerator(BasicVariantGenerator(), {"x": 1}, 1)
        return AlgorithmDriver(search=search, scheduler=Remembers(), stopper=RemembersRestarts())

    loop = loop_with_an_error()
    journal = [*loop.journal.journal_records]
    journal.append(m.JournalRecord(m.ExperimentResumed(2, 0.0, errored=errored), ()))
    driver = EventDriver(TrialRunner(loop.runner.settings), algorithms(), PLAN)
    driver.replay([journal])
    assert driver.algorithms.scheduler.calls == [("add", None), *calls]
    assert driver.algorithms.stopper.restarted == ["t_00000"] * (errored == "restart")


def test_restart_ends_trials_that_should_not_continue() -> None:
    loop = Loop(trials=1)
    loop.turn(NODE)
    loop.batch(1, started(), result(1))
    loop.loop.resume(m.ExperimentResumed(2, 0.0, unfinished=False))
    summary = loop.runner.summary("t_00000")
    assert (summary.status, summary.reason) == ("TERMINATED", NOT_RESUMED)


def test_restart_applies_changed_settings_and_journals_them() -> None:
    loop = loop_with_an_error()
    settings = RunnerSettings(request={"cpu": 1.0}, max_failures=7)
    event = m.ExperimentResumed(2, 0.0, errored="resume", settings=m.encode(settings))
    loop.loop.resume(event)
    assert loop.runner.settings.max_failures == 7
    header = RunnerSettings(request={"cpu": 1.0})
    assert replay(header, loop.journal.journal_records).settings.max_failures == 7


def test_restart_continues_a_stopped_interrupted_or_exhausted_search() -> None:
    loop = Loop(trials=1)
    loop.turn(NODE)
    loop.batch(1, started(), result(1))
    loop.turn(m.SearchExhausted(), m.RunInterrupted("Ctrl-C"))
    assert not loop.runner.wants_config()
    loop.loop.resume(m.ExperimentResumed(2, 0.0))
    runner = loop.runner
    assert (runner.run, runner.interrupted, runner.exhausted) == (2, "", False)
    assert [trial.trial_id for trial in runner.queue] == ["t_00000"]


def test_restart_asks_again_about_a_result_from_before_an_interruption() -> None:
    loop = Loop(trials=1, scheduler=RaisesAt(0))
    loop.turn(NODE)
    loop.batch(1, started(), result(1), result(2, done=True))
    loop.turn(m.RunInterrupted("Ctrl-C"))
    opened = OpenExperiment(loop.journal, loop.loop.driver)
    before = (Condition("training_iteration", 2),)
    options = ResumeOptions(stops=StopCriteria(saved=before))
    event = resumption(opened, options, loop.runner.settings)
    assert event.also == ("t_00000",), "with other criteria the trial may continue"
    loop.loop.resume(event)
    loop.turn(m.NodeJoined("n.2", "n", "host", "127.0.0.1", {"cpu": 1.0}))
    further = m.ResultReported("t_00000", 2, 3, {"loss": 1.0}, 0.0, 1.0, 1.0, 1.0, 3)
    begun = m.TrialStarted("t_00000", 2, 1, "host", "127.0.0.1", 0.0)
    done = loop.turn(m.BatchRead("n.2", 1, 2, "1-0"), begun, further)
    assert ("continue", "t_00000") in done, "otherwise its trial process would wait for ever"


def test_restart_with_new_criteria_continues_a_trial_that_ended_by_the_old_ones() -> None:
    loop = Loop(trials=1)
    loop.turn(NODE)
    # The previous run died before the trial process ended; a user also requested a stop.
    loop.batch(1, started(), result(1), result(2, done=True))
    loop.turn(m.StopRequested("t_00000", "enough"))
    loop.batch(4, m.TrialFinished("t_00000", 1))
    assert "t_00000" in loop.runner.live
    opened = OpenExperiment(loop.journal, loop.loop.driver)
    before = (Condition("training_iteration", 2),)
    options = ResumeOptions(stops=StopCriteria(saved=before))
    event = resumption(opened, options, loop.runner.settings)
    assert event.also == ("t_00000",)
    loop.loop.resume(event)
    loop.turn(m.NodeJoined("n.2", "n", "host", "127.0.0.1", {"cpu": 1.0}))
    trial = loop.runner.live["t_00000"]
    assert (trial.status, trial.stop_ordered, trial.ending) == ("RUNNING", False, "")


def test_restart_by_a_scheduler_that_takes_over_keeps_stopping_trials() -> None:
    loop = Loop(trials=2)
    loop.turn(NODE)
    loop.batch(1, started(), result(1))
    loop.turn(m.StopRequested(None, "fail_fast: another trial failed"))
    loop.loop.resume(m.ExperimentResumed(2, 0.0, is_cold=False))
    assert loop.runner.stopping
    assert not loop.runner.wants_config()


def test_replay_places_trials_alike_after_nodes_were_set_aside() -> None:
    loop = Loop(trials=7)
    names = ("a.1", "b.1", "good.1")
    loop.turn(*(m.NodeJoined(one, one[:-2], "host", "127.0.0.1", {"cpu": 1.0}) for one in names))

    def fail_on(node: str) -> None:
        (trial,) = [trial for trial, _attempt, where in loop.runner.slots if where == node]
        first = loop.runner.acknowledged.get(node, 0) + 1
        died = m.TrialProcessDied(trial, 1, 1, 9, None, 0.0)
        read = m.BatchRead(node, first, first + 1, f"{loop.now}-{first}")
        loop.turn(read, died, m.SlotFreed(trial, 1))

    for node in ("b.1", "a.1"):
        for _ in range(3):
            fail_on(node)
        loop.now += 5
    loop.turn(m.SearchExhausted())
    assert set(loop.runner.aside) == {"a.1", "b.1"}
    for loop.now in (62.0, 67.0):  # only b.1 and then a.1 become usable
        loop.turn()
    assert not loop.runner.aside
    loop.turn(m.NodeLost("good.1", "it is gone", is_dead=True))
    again = replay(loop.runner.settings, loop.journal.journal_records)
    assert list(again.slots) == list(loop.runner.slots)
    assert comparable(again) == comparable(loop.runner)


def test_ended_trial_is_work_until_its_process_is_gone_and_its_uploads_are_settled() -> None:
    loop = Loop(trials=1)
    loop.turn(NODE)
    saved = m.CheckpointWritten("t_00000", 1, 1, 1, "t_00000/checkpoint_1-000001", "ab", 3)
    loop.batch(1, started(), result(1, done=True), saved, m.TrialFinished("t_00000", 1))
    tune = SimpleNamespace(budget_s=None)
    prepared: Any = SimpleNamespace(tune=tune, trials=1)

    def is_work() -> bool:
        opened = OpenExperiment(loop.journal, loop.loop.driver)
        event = resumption(opened, ResumeOptions(), loop.runner.settings)
        return has_work(opened, event, prepared)

    assert is_work()
    loop.batch(5, m.SlotFreed("t_00000", 1))
    assert is_work()
    loop.batch(6, m.CheckpointCommitted("t_00000", 1, 1, 1, saved.key, "cd", 3))
    assert not is_work()
