"""When a search's folders are synced to their destination, one transfer at a time."""

from __future__ import annotations

import os
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from tests.support.waiting import eventually
from tests.unit.scheduler.recorded_syncs import (
    Counter,
    committed,
    counter,
    folder,
    make,
    no_rest,
    settled,
    tell,
    trial_in,
)
from tunemq_scheduler.output.syncing import syncer_callback as module
from tunemq_scheduler.output.syncing.excludes import excluding
from tunemq_scheduler.output.syncing.syncer_callback import SyncerCallback
from tunemq_shared.base.errors import ConfigError

__all__ = ["counter", "folder", "make", "no_rest"]


@pytest.mark.parity(143, 163)
def test_young_trial_is_synced_from_its_second_iteration_or_tenth_second(
    make: Callable[..., SyncerCallback], counter: Counter, folder: Path
) -> None:
    callback = make()
    by_step, by_time = trial_in(folder, 0), trial_in(folder, 1)
    for trial in (by_step, by_time):
        tell(callback, "on_trial_start", trial)
        tell(callback, "on_trial_result", trial, result={**trial.result(1), "time_total_s": 9.9})
    settled(callback)
    assert (counter.of(str(by_step)), counter.of(str(by_time))) == (0, 0)
    tell(callback, "on_trial_result", by_step, result={**by_step.result(2), "time_total_s": 0.1})
    tell(callback, "on_trial_result", by_time, result={**by_time.result(1), "time_total_s": 10.0})
    settled(callback)
    assert (counter.of(str(by_step)), counter.of(str(by_time))) == (1, 1)


@pytest.mark.parity(143)
def test_sync_thresholds_are_taken_from_the_environment(
    make: Callable[..., SyncerCallback],
    counter: Counter,
    folder: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setenv("TUNE_NODE_SYNCING_MIN_ITER_THRESHOLD", "5")
    monkeypatch.setenv("TUNE_NODE_SYNCING_MIN_TIME_S_THRESHOLD", "1000")
    callback, trial = make(), trial_in(folder)
    tell(callback, "on_trial_result", trial, result=trial.result(4))
    settled(callback)
    assert counter.of(str(trial)) == 0
    tell(callback, "on_trial_result", trial, result=trial.result(5))
    settled(callback)
    assert counter.of(str(trial)) == 1
    for text in ("soon", "-1", "nan"):
        monkeypatch.setenv("TUNE_NODE_SYNCING_MIN_ITER_THRESHOLD", text)
        with pytest.raises(ConfigError, match=f"MIN_ITER_THRESHOLD='{text}'.*a number from 0"):
            make()


@pytest.mark.parity(165)
def test_result_without_iteration_and_time_does_not_delay_the_sync(
    make: Callable[..., SyncerCallback], counter: Counter, folder: Path
) -> None:
    callback, trial = make(), trial_in(folder)
    tell(callback, "on_trial_result", trial, result={"loss": 1})
    settled(callback)
    assert counter.of(str(trial)) == 1


@pytest.mark.parity(148, 163)
def test_trial_is_synced_once_in_a_period(
    make: Callable[..., SyncerCallback], counter: Counter, folder: Path
) -> None:
    rare, often = make(sync_period=1000), make(sync_period=0)
    trial = trial_in(folder)
    for callback, expected in ((rare, 1), (often, 4)):
        for step in range(2, 5):
            tell(callback, "on_trial_result", trial, result=trial.result(step))
            callback.wait_for_all()
        assert counter.of(str(trial)) == expected


@pytest.mark.parity(147, 148)
def test_experiment_files_are_synced_each_period_without_the_trial_folders(
    make: Callable[..., SyncerCallback], counter: Counter, folder: Path
) -> None:
    callback = make(sync_period=1000, carries_checkpoints=True)
    for _ in range(3):
        settled(callback)
    ((source, target, exclude),) = counter.ups
    assert (source, target) == (str(folder), "mine://there/e")
    names = ("tuner", "journal/000001.turns", "journal/history", "j/x", "jo/x", "journals/x")
    more = ("train_1/x", "journal/lock", "journal/history.part", "journey/x", "journal/000001/x")
    assert [name for name in (*names, *more) if not excluding(exclude)(name)] == list(names[:3])


@pytest.mark.parity(164)
def test_folder_has_one_transfer_at_a_time_and_misses_no_due_sync(
    make: Callable[..., SyncerCallback], counter: Counter, folder: Path
) -> None:
    callback, trial = make(), trial_in(folder)
    settled(callback)
    counter.is_open.clear()
    for n in range(1, 6):
        tell(callback, "on_checkpoint", trial, checkpoint=committed(trial, n))
        eventually(lambda: counter.at_work == 1)
    counter.is_open.set()
    settled(callback)
    assert counter.of(str(trial)) == 2  # the first result, and one sync for the other four
    assert counter.most_at_work == 1


def test_folder_pauses_between_two_transfers_except_before_the_last(
    make: Callable[..., SyncerCallback],
    counter: Counter,
    folder: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(module, "ARTIFACTS_REST_S", 1000)
    callback, trial = make(), trial_in(folder)
    for n in range(1, 4):
        tell(callback, "on_checkpoint", trial, checkpoint=committed(trial, n))
        eventually(
            lambda: (
                not any(
                    sync_queue.is_busy and not sync_queue.is_ready
                    for sync_queue in callback._running
                )
            )
        )
    assert counter.of(str(trial)) == 1
    tell(callback, "on_trial_complete", trial)
    settled(callback)
    assert counter.of(str(trial)) == 2


@pytest.mark.parity(162)
def test_few_transfers_run_at_once_and_all_trials_get_their_turn(
    make: Callable[..., SyncerCallback], counter: Counter, folder: Path
) -> None:
    callback = make()
    counter.is_open.clear()
    trials = [trial_in(folder, number) for number in range(12)]
    for trial in trials:
        tell(callback, "on_trial_complete", trial)
    eventually(lambda: counter.at_work == module.TRANSFERS)
    counter.is_open.set()
    settled(callback)
    assert counter.most_at_work == module.TRANSFERS
    assert [counter.of(str(trial)) for trial in trials] == [1] * 12
    assert callback._sync_queues == {}


def test_sync_hooks_do_not_wait_for_transfers(
    make: Callable[..., SyncerCallback], counter: Counter, folder: Path
) -> None:
    counter.is_open.clear()
    callback, trial = make(carries_checkpoints=True, sync_period=0), trial_in(folder)
    begun = time.monotonic()
    tell(callback, "on_trial_start", trial)
    tell(callback, "on_trial_result", trial, result=trial.result(2))
    tell(callback, "on_checkpoint", trial, checkpoint=committed(trial))
    tell(callback, "on_trial_complete", trial)
    assert time.monotonic() - begun < 30  # transfers take longer
    assert counter.ups == []


@pytest.mark.parity(165)
@pytest.mark.parametrize("hook", ["on_trial_complete", "on_trial_error"])
def test_ended_trial_is_synced_regardless_of_its_last_sync(
    make: Callable[..., SyncerCallback], counter: Counter, folder: Path, hook: str
) -> None:
    callback, trial = make(sync_period=1000), trial_in(folder)
    tell(callback, "on_trial_result", trial, result=trial.result(2))
    tell(callback, hook, trial)
    settled(callback)
    assert counter.of(str(trial)) == 2
    assert callback._sync_queues == {}
    assert counter.closed == 1


@pytest.mark.parity(148, 165)
@pytest.mark.parametrize(
    ("settings", "expected"),
    [
        ({}, 2),
        ({"sync_on_checkpoint": False}, 0),
        ({"sync_on_checkpoint": False, "carries_checkpoints": True}, 2),
    ],
)
def test_checkpoint_syncs_its_trials_folder(
    make: Callable[..., SyncerCallback],
    counter: Counter,
    folder: Path,
    settings: dict[str, Any],
    expected: int,
) -> None:
    callback, trial = make(sync_period=1000, **settings), trial_in(folder)
    for n in (1, 2):
        tell(callback, "on_checkpoint", trial, checkpoint=committed(trial, n))
        settled(callback)
    assert counter.of(str(trial)) == expected


@pytest.mark.parity(165)
def test_checkpoint_missing_during_its_sync_is_an_error(
    make: Callable[..., SyncerCallback], folder: Path, caplog: pytest.LogCaptureFixture
) -> None:
    callback, trial = make(carries_checkpoints=True), trial_in(folder)
    checkpoint = committed(trial)
    os.rmdir(folder / checkpoint.key)
    tell(callback, "on_checkpoint", trial, checkpoint=checkpoint)
    settled(callback)
    assert f"{trial.trial_name} was not wholly copied" in caplog.text
    assert f"{checkpoint.key} did not exist when it was to be copied" in caplog.text


def test_expired_checkpoint_is_no_error_and_its_copy_is_deleted(
    make: Callable[..., SyncerCallback], counter: Counter, folder: Path
) -> None:
    callback, trial = make(carries_checkpoints=True), trial_in(folder)
    counter.is_open.clear()
    checkpoint = committed(trial)
    tell(callback, "on_checkpoint", trial, checkpoint=checkpoint)
    callback.delete_checkpoint(checkpoint.key)
    os.rmdir(folder / checkpoint.key)
    counter.is_open.set()
    settled(callback)
    assert counter.deleted == [f"mine://there/e/{checkpoint.key}"]
    callback.wait_for_all()


def test_expired_checkpoint_that_still_exists_is_not_copied_again(
    make: Callable[..., SyncerCallback], counter: Counter, folder: Path
) -> None:
    callback, trial = make(carries_checkpoints=True), trial_in(folder)
    checkpoint = committed(trial)
    callback.delete_checkpoint(checkpoint.key)
    for _ in range(2):
        tell(callback, "on_checkpoint", trial, checkpoint=committed(trial, len(counter.ups) + 2))
        settled(callback)
    excludes = [exclude for local, _, exclude in counter.ups if local == trial.local_path]
    assert len(excludes) == 2
    assert all(os.path.basename(checkpoint.key) in exclude for exclude in excludes)
    assert len(counter.deleted) == 1


def test_expired_checkpoint_of_an_ended_trial_is_deleted_without_a_sync(
    make: Callable[..., SyncerCallback], counter: Counter, folder: Path
) -> None:
    callback, trial = make(carries_checkpoints=True), trial_in(folder)
    tell(callback, "on_trial_complete", trial)
    settled(callback)
    callback.delete_checkpoint(f"{trial.trial_name}/checkpoint_1-000001")
    callback.on_step_end(iteration=1, trials=[])
    settled(callback)
    assert counter.of(str(trial)) == 1
    assert len(counter.deleted) == 1
    assert callback._sync_queues == {}


def test_sync_callback_leaves_deletion_to_nodes_that_upload_checkpoints(
    make: Callable[..., SyncerCallback], counter: Counter
) -> None:
    callback = make()
    callback.delete_checkpoint("train_0/checkpoint_1-000001")
    settled(callback)
    assert counter.deleted == []
