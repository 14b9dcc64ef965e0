"""Failed syncs, the end of a search, and the files at the destination then."""

from __future__ import annotations

import os
import pickle
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from tests.support.searches.checkpoints import contents
from tests.support.waiting import eventually
from tests.unit.scheduler.fake_trials import FakeTrial
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
from tunemq_scheduler.output.syncing import syncer_callback
from tunemq_scheduler.output.syncing.default_syncer import DefaultSyncer
from tunemq_scheduler.output.syncing.mirroring import FilesLeftOut
from tunemq_scheduler.output.syncing.syncer_callback import SyncerCallback
from tunemq_shared.base.errors import TuneError

__all__ = ["counter", "folder", "make", "no_rest"]


@pytest.mark.parity(167)
@pytest.mark.parametrize("error", [TuneError("no"), TimeoutError("no"), ValueError("no")])
def test_failed_sync_of_one_trial_is_logged_and_harms_no_other(
    make: Callable[..., SyncerCallback],
    counter: Counter,
    folder: Path,
    caplog: pytest.LogCaptureFixture,
    error: Exception,
) -> None:
    callback = make()
    bad, good = trial_in(folder, 0), trial_in(folder, 1)
    counter.failing[str(bad)] = error
    for trial in (bad, good):
        tell(callback, "on_checkpoint", trial, checkpoint=committed(trial))
    settled(callback)
    assert f"trial {bad} was not wholly copied to mine://there/e/{bad}: no" in caplog.text
    assert f"trial {good} was not" not in caplog.text
    assert counter.of(str(good)) == 1


@pytest.mark.parity(166)
def test_wait_for_all_syncs_lists_every_failure_once(
    make: Callable[..., SyncerCallback], counter: Counter, folder: Path
) -> None:
    callback = make()
    trials = [trial_in(folder, number) for number in range(3)]
    counter.failing = {str(trials[0]): OSError("full"), str(trials[2]): KeyError("gone")}
    for trial in trials:
        tell(callback, "on_trial_complete", trial)
    with pytest.raises(TuneError, match="2 folders were not wholly copied") as caught:
        callback.wait_for_all()
    assert f"trial {trials[0]}: full" in str(caught.value)
    assert f"trial {trials[1]}" not in str(caught.value)
    assert f"trial {trials[2]}: 'gone'" in str(caught.value)
    callback.wait_for_all()


@pytest.mark.parity(166)
def test_failed_sync_that_a_later_one_fixed_is_not_reported(
    make: Callable[..., SyncerCallback], counter: Counter, folder: Path
) -> None:
    callback, trial = make(), trial_in(folder)
    counter.failing[str(trial)] = OSError("for now")
    tell(callback, "on_checkpoint", trial, checkpoint=committed(trial))
    settled(callback)
    counter.failing.clear()
    tell(callback, "on_trial_complete", trial)
    callback.wait_for_all()


def test_failed_last_sync_of_an_ended_trial_is_repeated(
    make: Callable[..., SyncerCallback],
    counter: Counter,
    folder: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(syncer_callback, "_RETRY_S", 0.01)
    callback, trial = make(), trial_in(folder)
    counter.failing[str(trial)] = OSError("for now")
    tell(callback, "on_trial_complete", trial)
    eventually(lambda: callback.on_step_end(1, []) or counter.of(str(trial)) > 6)
    assert not callback.has_copied(time.monotonic())
    counter.failing.clear()
    eventually(lambda: callback.on_step_end(1, []) or callback.has_copied(time.monotonic()))
    callback.wait_for_all()
    assert str(trial) not in callback._sync_queues


def test_trial_whose_own_files_cannot_be_copied_has_its_results_copied(
    make: Callable[..., SyncerCallback], counter: Counter, folder: Path
) -> None:
    callback, trial = make(), trial_in(folder)
    counter.failing[str(trial)] = FilesLeftOut("1 of the files cannot be copied")
    tell(callback, "on_trial_complete", trial)
    settled(callback)
    assert callback.has_copied(time.monotonic())
    with pytest.raises(TuneError, match="1 of the files cannot be copied"):
        callback.wait_for_all()


@pytest.mark.parity(148, 167)
def test_sync_that_takes_too_long_is_given_up_and_nothing_runs_beside_it(
    make: Callable[..., SyncerCallback],
    counter: Counter,
    folder: Path,
    caplog: pytest.LogCaptureFixture,
) -> None:
    callback, trial = make(sync_timeout=70, sync_period=1000), trial_in(folder)
    settled(callback)
    counter.is_open.clear()
    tell(callback, "on_checkpoint", trial, checkpoint=committed(trial))
    transfer = callback._sync_queues[str(trial)]._transfer
    assert transfer is not None
    assert transfer.timeout_s == 70
    eventually(lambda: counter.at_work == 1)
    transfer.timeout_s = 0.05
    settled(callback)
    assert "took longer than 0.05 s and was cancelled" in caplog.text
    tell(callback, "on_trial_complete", trial)
    assert counter.at_work == 1
    counter.is_open.set()
    callback.wait_for_all()
    assert counter.most_at_work == 1


def test_transient_failure_of_a_synchronous_syncer_is_retried(
    make: Callable[..., SyncerCallback], counter: Counter, folder: Path
) -> None:
    callback, trial = make(), trial_in(folder)

    class Passing(dict[str, Exception]):
        def __getitem__(self, name: str) -> Exception:
            return self.pop(name)

    counter.failing = Passing({str(trial): OSError("for a moment")})
    tell(callback, "on_trial_complete", trial)
    callback.wait_for_all()
    assert counter.of(str(trial)) == 2


def test_syncer_that_declines_a_sync_is_asked_again(
    make: Callable[..., SyncerCallback], counter: Counter, folder: Path
) -> None:
    callback = make(sync_period=1000)
    counter.rejections = 1
    settled(callback)
    assert len(counter.ups) == 1


# --- the end of a search --------------------------------------------------------------------------


@pytest.mark.parity(165)
def test_search_end_syncs_everything_once_more_and_waits(
    make: Callable[..., SyncerCallback], counter: Counter, folder: Path
) -> None:
    callback, trial = make(sync_period=1000), trial_in(folder)
    tell(callback, "on_trial_start", trial)
    settled(callback)
    counter.is_open.clear()
    threading.Timer(0.05, counter.is_open.set).start()
    callback.on_experiment_end(trials=[trial])
    assert (counter.of(str(trial)), counter.of("experiment")) == (1, 2)
    assert counter.closed == 2


@pytest.mark.parity(165)
def test_failed_sync_at_the_search_end_is_logged(
    make: Callable[..., SyncerCallback],
    counter: Counter,
    folder: Path,
    caplog: pytest.LogCaptureFixture,
) -> None:
    callback, trial = make(), trial_in(folder)
    counter.failing[str(trial)] = OSError("full")
    tell(callback, "on_trial_start", trial)
    callback.on_experiment_end(trials=[trial])
    assert f"1 folder was not wholly copied to mine://there/e:\n  trial {trial}: " in caplog.text


@pytest.mark.parity(148)
def test_search_end_waits_for_syncs_no_longer_than_the_timeout(
    make: Callable[..., SyncerCallback], counter: Counter, caplog: pytest.LogCaptureFixture
) -> None:
    counter.is_open.clear()
    callback = make(sync_timeout=0.05)
    callback.on_experiment_end(trials=[])
    assert "the experiment: " in caplog.text


def test_search_end_can_skip_the_wait_for_syncs(
    make: Callable[..., SyncerCallback], counter: Counter, caplog: pytest.LogCaptureFixture
) -> None:
    counter.is_open.clear()
    callback = make()
    threading.Timer(0.05, callback.give_up).start()
    begun = time.monotonic()
    callback.on_experiment_end(trials=[])
    assert time.monotonic() - begun < 30  # the transfer takes longer
    assert "it was not done in time, and was cancelled" in caplog.text


@pytest.mark.parity(168)
def test_sync_callback_is_pickled_without_transfers_in_flight(
    make: Callable[..., SyncerCallback], counter: Counter, folder: Path
) -> None:
    settings = {"sync_period": 7, "sync_on_checkpoint": False, "carries_checkpoints": True}
    callback = SyncerCallback(DefaultSyncer(), str(folder), str(folder) + "_there", **settings)
    trial = trial_in(folder)
    tell(callback, "on_trial_result", trial, result=trial.result(5))
    other = pickle.loads(pickle.dumps(callback))
    assert (other.local_dir, other.remote_dir) == (callback.local_dir, callback.remote_dir)
    assert other.sync_period == 7
    assert other._sync_queues == {}
    other.on_experiment_end(trials=[])
    callback.on_experiment_end(trials=[])


# --- with the default syncer ----------------------------------------------------------------------


def files_of(trial: FakeTrial) -> None:
    for name in ("result.json", "params.json", "stdout", "model.pt", "checkpoint_best.pt"):
        Path(trial.local_path, name).write_text(name)
    for name in ("checkpoint_1-000001/files", "checkpoint_tmp1", ".cache", "plots"):
        os.makedirs(os.path.join(trial.local_path, name))
        Path(trial.local_path, name, "f").write_text(name)


@pytest.mark.parity(144, 147)
@pytest.mark.parametrize(
    ("settings", "expected"),
    [
        ({}, {"model.pt", "stdout", "plots/f", "checkpoint_best.pt"}),
        ({"sync_artifacts": False}, set()),
        (
            {"sync_artifacts": False, "carries_checkpoints": True},
            {"checkpoint_1-000001/files/f"},
        ),
        (
            {"carries_checkpoints": True},
            {
                "model.pt",
                "stdout",
                "plots/f",
                "checkpoint_best.pt",
                "checkpoint_1-000001/files/f",
            },
        ),
    ],
)
def test_sync_settings_select_results_artifacts_and_checkpoints(
    folder: Path, settings: dict[str, Any], expected: set[str]
) -> None:
    there = folder.parent / "there"
    callback = SyncerCallback(DefaultSyncer(), str(folder), str(there), **settings)
    trial = trial_in(folder)
    files_of(trial)
    tell(callback, "on_trial_start", trial)
    callback.on_experiment_end(trials=[trial])
    copied = contents(there)
    assert copied.pop("journal") == b"j"
    assert set(copied) == {f"{trial}/{name}" for name in {"result.json", "params.json", *expected}}


def test_expired_checkpoint_is_deleted_from_the_copy(folder: Path) -> None:
    there = folder.parent / "there"
    callback = SyncerCallback(
        DefaultSyncer(), str(folder), str(there), carries_checkpoints=True, sync_period=1000
    )
    trial = trial_in(folder)
    first, second = committed(trial, 1), committed(trial, 2)
    for checkpoint in (first, second):
        (folder / checkpoint.key / "manifest.json").write_text("{}")
        tell(callback, "on_checkpoint", trial, checkpoint=checkpoint)
        settled(callback)
    assert (there / first.key / "manifest.json").exists()
    callback.delete_checkpoint(first.key)
    tell(callback, "on_trial_complete", trial)
    settled(callback)
    assert set(contents(there)) == {"journal", f"{second.key}/manifest.json"}
    callback.on_experiment_end(trials=[])
