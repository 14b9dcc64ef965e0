"""Checkpoints on slow and dying nodes: the store has exactly the checkpoints to be kept."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import pytest

from tests.simulation.farm import Search
from tests.simulation.faulty_farms import found_all_damaged
from tunemq.testing.comparable_state import comparable
from tunemq.testing.journal_replay import compare, replay
from tunemq.testing.simulated_executor import SimulationSettings
from tunemq.testing.simulated_uploads import UploadSettings
from tunemq_scheduler.core import commands as c
from tunemq_scheduler.core.trial_runner import TrialRunner
from tunemq_scheduler.core.trials.trial import TERMINATED, TrialSummary
from tunemq_scheduler.schedulers import ASHAScheduler, FIFOScheduler
from tunemq_shared.protocol import messages as m
from tunemq_shared.protocol.result_conditions import Condition

SEEDS = 25
MAX_T = 9

SLOW = UploadSettings(upload_s=4.0, unchanged=0.5)
BAD = UploadSettings(upload_s=4.0, unchanged=0.5, lost=0.05, damaged=0.2)


class Pausing(FIFOScheduler):
    """Pause each trial at every third step; resume the longest waiting first."""

    def on_trial_result(self, runner: Any, trial: Any, result: dict[str, Any]) -> str:
        return self.PAUSE if result["training_iteration"] % 3 == 0 else self.CONTINUE

    def horizon(self, trial: Any) -> Any:
        done = trial.last_result.get("training_iteration", 0)
        return (Condition("training_iteration", done - done % 3 + 3),)


SCHEDULERS = {
    "fifo": FIFOScheduler,
    "asha": lambda: ASHAScheduler(max_t=MAX_T, grace_period=1, reduction_factor=3),
    "pausing": Pausing,
}


def search(
    name: str, seed: int, uploads: UploadSettings, *, deaths: float = 0.0, **limits: Any
) -> Search:
    simulation = SimulationSettings(
        nodes=4, seed=seed, latency_s=0.1, deaths=deaths, death_window_s=30.0, uploads=uploads
    )
    return Search(SCHEDULERS[name], simulation=simulation, max_t=MAX_T, **limits).run()


class Store:
    """Which manifests there are, and which objects, when each order is carried out at once."""

    def __init__(self) -> None:
        self.manifests: dict[str, set[str]] = {}
        self.objects: set[str] = set()

    def upload(self, event: m.CheckpointCommitted) -> None:
        own = set() if event.shared else {f"{event.key}/object"}
        self.objects |= own
        self.manifests[event.key] = own | set(event.shared)

    def perform(self, commands: Sequence[c.Command]) -> None:
        for command in commands:
            match command:
                case c.DeleteCheckpoint():
                    self.manifests.pop(command.key, None)
                    own = {f"{command.key}/object"}
                    self.objects -= own - {f"{command.key}/{name}" for name in command.keep}
                case c.DeleteObjects():
                    self.objects -= set(command.keys)
                case _:
                    pass


def check_store(run: Search) -> Store:
    """Replay the journal: needed checkpoints exist after each event, and no others at the end."""
    runner, store = TrialRunner(run.settings), Store()
    for entry in run.journal.journal_records:
        is_wanted = False
        if isinstance(entry.event, m.CheckpointCommitted):
            store.upload(entry.event)
            trial = runner.live.get(entry.event.trial)
            written = trial.checkpoints.get(entry.event.key) if trial is not None else None
            is_wanted = written is not None and written.is_wanted
        commands = runner.handle(entry.event, entry.answers)
        assert not is_wanted or any(isinstance(one, c.NotifyCheckpoint) for one in commands)
        store.perform(commands)
        if any(isinstance(one, c.DeleteCheckpoint | c.DeleteObjects) for one in commands):
            for key in runner.live_checkpoints():
                assert store.manifests[key] <= store.objects, f"{key} lacks an object"
    assert store.manifests.keys() == runner.live_checkpoints().keys()
    assert store.objects == set().union(*store.manifests.values())
    return store


def ran_to_the_end(trial: TrialSummary) -> bool:
    return trial.status == TERMINATED and trial.last_result.step == MAX_T


@pytest.mark.parametrize("deaths", [0.0, 0.7])
@pytest.mark.parametrize("uploads", [UploadSettings(), SLOW, BAD], ids=["local", "slow", "bad"])
@pytest.mark.parametrize("name", SCHEDULERS)
def test_every_search_ends_with_its_kept_checkpoints_in_the_store(
    name: str, uploads: UploadSettings, deaths: float
) -> None:
    for seed in range(SEEDS):
        run = search(name, seed, uploads, deaths=deaths)
        runner = run.runner
        assert len(runner.finished) == 20
        assert runner.uploading == 0
        state = runner.book.dumped()
        assert (state.writers, state.uploads) == ([], {}), "no trial still writes"
        if name != "asha":
            ended = [runner.summary(trial) for trial in runner.finished]
            assert all(ran_to_the_end(trial) or found_all_damaged(trial) for trial in ended)
            assert uploads is BAD or all(map(ran_to_the_end, ended))
        check_store(run)


@pytest.mark.parity(118, 120, 123)
@pytest.mark.parametrize("name", SCHEDULERS)
def test_the_journal_replayed_in_lock_step_keeps_the_same_checkpoints(name: str) -> None:
    for seed in range(SEEDS):
        run = search(name, seed, BAD, deaths=0.5)
        live = run.outcome()
        compare(live, run.outcome_in_lock_step())
        assert comparable(run.replayed()) == comparable(run.runner)
        assert len(live.ends) == 20
        assert any(live.kept.values())


@pytest.mark.parity(119)
def test_trial_of_a_restored_search_waits_once_its_node_is_lost() -> None:
    for seed in range(SEEDS):
        run = search("pausing", seed, BAD, deaths=0.5)
        journal_records = run.journal.journal_records
        for end in range(0, len(journal_records), 37):
            runner = replay(run.runner.settings, journal_records[:end])
            for instance_id in [*runner.nodes, *runner.away]:
                runner.handle(m.NodeLost(instance_id, "its scheduler has ended", is_dead=True))
            waiting = {trial.trial_id for trial in runner.live.values() if not trial.is_finished}
            assert runner.counts["RUNNING"] == runner.uploading == len(runner.slots) == 0
            runner.handle(m.NodeJoined("new", "new", "host", "127.0.0.1", {"cpu": 1000.0}))
            runner.handle(m.Tick(runner.elapsed + 3600))
            assert {trial.trial_id for trial in runner.waiting()} == waiting


def test_simulated_store_failures_cover_every_event() -> None:
    seen: set[type[m.Event]] = set()
    shared = 0
    for seed in range(SEEDS):
        for entry in search("pausing", seed, BAD, deaths=0.5).journal.journal_records:
            seen.add(type(entry.event))
            shared += bool(isinstance(entry.event, m.CheckpointCommitted) and entry.event.shared)
    assert seen >= {
        m.CheckpointWritten,
        m.CheckpointCommitted,
        m.CheckpointLost,
        m.CheckpointDamaged,
        m.TrialWaits,
        m.TrialPaused,
        m.TrialFailed,
        m.NodeLost,
    }
    assert shared > SEEDS


@pytest.mark.parity(130, 140)
def test_each_result_of_a_paused_trial_is_recorded_once_and_in_its_order() -> None:
    for seed in range(SEEDS):
        recorded: dict[str, list[int]] = {}
        run = search("pausing", seed, BAD, deaths=0.5)
        for trial, step, _metrics in run.outcome().records:
            recorded.setdefault(trial, []).append(step)
        for trial, steps in recorded.items():
            summary = run.runner.summary(trial)
            last = summary.last_result.step if found_all_damaged(summary) else MAX_T
            assert steps == list(range(1, last + 1))


@pytest.mark.parametrize("uploads", [UploadSettings(), SLOW], ids=["local", "slow"])
def test_best_checkpoints_of_the_experiment_remain_at_its_end(uploads: UploadSettings) -> None:
    for seed in range(SEEDS):
        everything = search("fifo", seed, uploads)
        committed = {
            kept.key: kept.step
            for trial in everything.runner.finished
            for kept in everything.runner.summary(trial).checkpoints
        }
        run = search("fifo", seed, uploads, in_experiment=5)
        kept = check_store(run).manifests.keys()
        assert len(kept) == 5
        losses = {(trial, step): metrics["loss"] for trial, step, metrics in run.outcome().records}
        ranked = sorted(committed, key=lambda key: losses[key.partition("/")[0], committed[key]])
        assert kept == set(ranked[:5])


def test_quota_is_exceeded_only_by_checkpoints_that_must_stay() -> None:
    for seed in range(SEEDS):
        run = search("pausing", seed, SLOW, max_bytes=6)
        assert len(check_store(run).manifests) == 6
