"""A search resumes from a saved and loaded state as if it had not been interrupted."""

from __future__ import annotations

import random

import pytest

from tests.simulation.farm import Search
from tunemq.testing.comparable_state import comparable
from tunemq.testing.simulated_executor import SimulationSettings
from tunemq_scheduler.core.runner_snapshot import dump
from tunemq_scheduler.core.trial_runner import TrialRunner
from tunemq_scheduler.schedulers import ASHAScheduler, FIFOScheduler, TrialScheduler
from tunemq_shared.protocol import messages as m

SEEDS = 12
LIMITS = {"none": {}, "in_experiment": {"in_experiment": 3}, "max_bytes": {"max_bytes": 5}}


class PausingScheduler(FIFOScheduler):
    """Pauses each trial at its third result."""

    def horizon(self, trial):
        return None

    def on_trial_result(self, runner, trial, result):
        return self.PAUSE if result["training_iteration"] == 3 else self.CONTINUE


def asha() -> TrialScheduler:
    return ASHAScheduler(max_t=9, grace_period=1, reduction_factor=3)


def entries_of(make, seed: int, limits: str) -> tuple[Search, list[m.JournalRecord]]:
    simulation = SimulationSettings(
        nodes=3, seed=seed, latency_s=0.2, deaths=0.5, death_window_s=30.0
    )
    search = Search(make, simulation=simulation, trials=9, **LIMITS[limits]).run()
    return search, list(search.journal.journal_records)


def resumed(
    event: m.ExperimentResumed, journal_records: list[m.JournalRecord], at: int
) -> list[m.JournalRecord]:
    """The journal with a cold restart in it; later events of its dead nodes come too late."""
    return [*journal_records[:at], m.JournalRecord(event), *journal_records[at:]]


@pytest.mark.parity(118, 120)
@pytest.mark.parametrize("limits", LIMITS)
@pytest.mark.parametrize("make", [FIFOScheduler, asha, PausingScheduler])
def test_a_state_read_again_at_any_entry_continues_to_the_same_end(make, limits) -> None:
    for seed in range(SEEDS):
        search, journal_records = entries_of(make, seed, limits)
        undisturbed, chance = comparable(search.replayed()), random.Random(seed)
        runner = TrialRunner(search.settings)
        places = sorted(chance.sample(range(len(journal_records)), 25))
        for place, entry in enumerate(journal_records):
            runner.handle(entry.event, entry.answers)
            if place not in places:
                continue
            again = TrialRunner.load(search.settings, dump(runner), dict(runner.finished))
            assert comparable(again) == comparable(runner), (seed, place)
            assert dump(again) == dump(runner), (seed, place)
            for other in journal_records[place + 1 :]:
                again.handle(other.event, other.answers)
            assert comparable(again) == undisturbed, (seed, place)


def test_a_state_read_again_orders_the_same() -> None:
    for seed in range(SEEDS):
        search, journal_records = entries_of(asha, seed, "in_experiment")
        runner = TrialRunner(search.settings)
        again = TrialRunner(search.settings)
        for place, entry in enumerate(journal_records):
            if place % 11 == 10:
                again = TrialRunner.load(search.settings, dump(again), dict(again.finished))
            ours = runner.handle(entry.event, entry.answers)
            assert again.handle(entry.event, entry.answers) == ours, (seed, place)


def test_changed_summaries_and_a_dump_restore_the_state() -> None:
    for seed in range(SEEDS):
        search, journal_records = entries_of(asha, seed, "in_experiment")
        runner, history = TrialRunner(search.settings), {}
        for place, entry in enumerate(journal_records):
            runner.handle(entry.event, entry.answers)
            if place % 17 == 16:
                history.update(runner.changed_summaries())
                runner.forget_changes()
                assert history == runner.finished
                assert runner.changed_summaries() == []
                runner = TrialRunner.load(search.settings, dump(runner), history)
        assert comparable(runner) == comparable(search.replayed())


def test_dump_costs_as_much_as_the_live_trials() -> None:
    sizes = []
    for trials in (10, 200):
        simulation = SimulationSettings(nodes=2, seed=1)
        search = Search(FIFOScheduler, simulation=simulation, trials=trials).run()
        assert len(search.runner.finished) == trials
        sizes.append(len(dump(search.runner)))
    assert sizes[1] < sizes[0] + 100


@pytest.mark.parity(119)
@pytest.mark.parametrize("errored", ["", "resume", "restart"])
def test_cold_restart_at_any_entry_leaves_a_consistent_state(errored: str) -> None:
    for seed in range(SEEDS):
        search, journal_records = entries_of(asha, seed, "in_experiment")
        for at in random.Random(seed).sample(range(len(journal_records)), 10):
            runner = TrialRunner(search.settings)
            for entry in journal_records[:at]:
                runner.handle(entry.event, entry.answers)
            recorded = {one: runner.summary(one).last_result for one in runner.live}
            failures = {one: trial.num_failures for one, trial in runner.live.items()}
            runner.handle(m.ExperimentResumed(2, 0.0, errored=errored))
            again = TrialRunner.load(search.settings, dump(runner), dict(runner.finished))
            assert comparable(again) == comparable(runner)
            assert not runner.nodes
            assert not runner.away
            assert not len(runner.slots)
            assert not runner.uploading
            assert runner.counts["RUNNING"] == 0
            for trial_id, trial in runner.live.items():
                assert trial.status in {"PENDING", "PAUSED"}, trial_id
                assert trial.last_result == recorded[trial_id]
                assert trial.num_failures == failures[trial_id], "a restart counts as no failure"
                assert trial.not_before <= runner.elapsed or trial.fruitless
