"""A search's files reach a real object store, also after the store was away or frozen."""

from __future__ import annotations

import os
import shutil
import tempfile
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

import tunemq as tune
from tests.support.searches.checkpoints import contents
from tests.support.stores.object_servers import ObjectServer
from tests.support.stores.own_store import server
from tests.support.waiting import eventually
from tests.unit.scheduler.fake_trials import FakeTrial
from tunemq.syncer import DefaultSyncer, SyncConfig, Syncer
from tunemq_scheduler.output.syncing.destinations import join
from tunemq_scheduler.output.syncing.mirroring import MirroredFiles, upload_folder
from tunemq_scheduler.output.syncing.syncer_callback import SyncerCallback
from tunemq_shared.base.errors import ConfigError, StoreError
from tunemq_shared.base.retrying import CancelToken
from tunemq_shared.checkpoints.open_store import open_objects
from tunemq_shared.objects.store_address import without_settings

__all__ = ["server"]

pytestmark = pytest.mark.integration


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    folder = tmp_path / "experiment"
    folder.mkdir()
    (folder / "journal").write_bytes(b"j")
    return folder


def stored(address: str) -> dict[str, int]:
    """Return the objects at an address and their sizes."""
    with open_objects(address) as objects:
        return {one.key: one.size for one in objects.list()}


def trial_in(folder: Path, **files: bytes) -> FakeTrial:
    trial = FakeTrial(0, folder)
    os.makedirs(trial.local_path)
    for name, content in files.items():
        Path(trial.local_path, name).write_bytes(content)
    return trial


def turning(callback: SyncerCallback, condition: Callable[[], object]) -> None:
    """Run the callback's turns until the condition is true."""

    def turned() -> object:
        callback.on_step_end(iteration=1, trials=[])
        return condition()

    eventually(turned)


@pytest.mark.parity(147)
def test_files_are_copied_during_the_search_and_completely_at_its_end(
    minio: ObjectServer, bucket: str, folder: Path
) -> None:
    address = minio.address(bucket, "results/e")
    callback = SyncerCallback(DefaultSyncer(), str(folder), address)
    trial = trial_in(folder, stdout=b"line\n")
    callback.on_trial_start(1, [trial], trial)
    callback.on_trial_result(1, [trial], trial, trial.result(2))
    turning(callback, lambda: f"{trial}/stdout" in stored(address))
    Path(trial.local_path, "stdout").write_bytes(b"line\nline\n")
    Path(trial.local_path, "model.pt").write_bytes(bytes(9 * 2**20))
    callback.on_trial_complete(1, [trial], trial)
    callback.on_experiment_end([trial])
    assert stored(address) == {
        "journal": 1,
        f"{trial}/stdout": 10,
        f"{trial}/model.pt": 9 * 2**20,
    }


def test_a_file_that_grows_all_the_time_is_copied_as_it_was_at_some_moment(
    minio: ObjectServer, bucket: str, folder: Path, tmp_path: Path
) -> None:
    address = minio.address(bucket, "grows")
    line = b"0123456789abcdef" * 256 + b"\n"  # no faster than the slowest store takes it
    (folder / "log").write_bytes(line * 640)
    is_over = threading.Event()

    def grow() -> None:
        while not is_over.wait(0.001):
            with (folder / "log").open("ab") as log:
                log.write(line)

    writer = threading.Thread(target=grow)
    writer.start()
    try:
        syncer = DefaultSyncer()
        for _ in range(3):
            syncer.sync_up(str(folder), address)
            syncer.wait()
    finally:
        is_over.set()
        writer.join()
    syncer.sync_down(address, str(tmp_path / "down"))
    syncer.wait()
    copied = contents(tmp_path / "down")["log"]
    assert copied
    assert (folder / "log").read_bytes().startswith(copied)


def test_a_sync_outlasts_a_store_that_is_away(
    server: ObjectServer, folder: Path, caplog: pytest.LogCaptureFixture
) -> None:
    address = server.address(server.create_bucket(), "e")
    server.stop()
    callback = SyncerCallback(DefaultSyncer(), str(folder), address)
    turning(callback, lambda: "A sync waits: " in caplog.text)
    server.start()
    callback.on_experiment_end([])
    assert stored(address) == {"journal": 1}
    assert "not wholly copied" not in caplog.text


@pytest.mark.parity(148, 151)
def test_sync_to_a_frozen_store_times_out_and_the_next_completes_it(
    server: ObjectServer, folder: Path, caplog: pytest.LogCaptureFixture
) -> None:
    address = server.address(server.create_bucket(), "e")
    (folder / "model").write_bytes(os.urandom(30 * 2**20))
    server.freeze()
    callback = SyncerCallback(
        DefaultSyncer(), str(folder), address, sync_timeout=1, sync_period=1000
    )
    begun = time.monotonic()
    turning(callback, lambda: "took longer than 1 s and was cancelled" in caplog.text)
    assert time.monotonic() - begun < 40
    server.thaw()
    for sync_queue in (callback._experiment_queue(),):
        sync_queue.timeout_s = callback.sync_timeout = 200
    callback.on_experiment_end([])
    assert stored(address) == {"journal": 1, "model": 30 * 2**20}
    assert f"the experiment was not wholly copied to {without_settings(address)}" in caplog.text


def test_search_end_does_not_wait_for_a_store_that_stays_away(
    server: ObjectServer, folder: Path, caplog: pytest.LogCaptureFixture
) -> None:
    address = server.address(server.create_bucket(), "e")
    server.stop()
    callback = SyncerCallback(DefaultSyncer(), str(folder), address, sync_timeout=1)
    begun = time.monotonic()
    callback.on_experiment_end([])
    assert time.monotonic() - begun < 30
    assert "1 folder was not wholly copied" in caplog.text


def test_file_whose_name_the_store_rejects_is_reported_and_the_others_are_copied(
    minio: ObjectServer, bucket: str, folder: Path
) -> None:
    address = minio.address(bucket, "e")
    deep = folder.joinpath(*(5 * ["d" * 250]))
    deep.mkdir(parents=True)
    (deep / "artifact").write_bytes(b"a")
    (folder / "z").write_bytes(b"z")
    with pytest.raises(StoreError, match=r"1 of the files in .* longer than 1024 bytes"):
        upload_folder(str(folder), address, (), MirroredFiles(), cancel=CancelToken())
    assert stored(address) == {"journal": 1, "z": 1}


class Mine(Syncer):
    """A user's syncer, which copies to a folder with a custom kind of address."""

    def sync_up(self, local_dir: str, remote_dir: str, exclude: Any = None) -> bool:
        skipped = shutil.ignore_patterns(*(exclude or ()))
        shutil.copytree(
            local_dir, remote_dir.removeprefix("mine:/"), ignore=skipped, dirs_exist_ok=True
        )
        return True

    def sync_down(self, remote_dir: str, local_dir: str, exclude: Any = None) -> bool:
        raise AssertionError

    def delete(self, remote_dir: str) -> bool:
        shutil.rmtree(remote_dir.removeprefix("mine:/"), ignore_errors=True)
        return True


def train(config: dict[str, Any]) -> None:
    for step in range(4):
        Path("artifact.txt").write_text("x" * (step + config["a"]))
        with tempfile.TemporaryDirectory() as folder:
            Path(folder, "weights").write_text(str(step))
            tune.report({"loss": step}, checkpoint=tune.Checkpoint.from_directory(folder))


def search(storage_path: str, sync_config: SyncConfig) -> tune.ResultGrid:
    return tune.Tuner(
        train,
        param_space={"a": tune.grid_search([1, 2])},
        run_config=tune.RunConfig(
            name="e",
            storage_path=storage_path,
            verbose=0,
            checkpoint_config=tune.CheckpointConfig(num_to_keep=2),
            sync_config=sync_config,
        ),
    ).fit()


@pytest.mark.parity(147, 152, 181)
def test_custom_syncer_gets_a_copy_of_everything_that_is_kept(tmp_path: Path) -> None:
    there = tmp_path / "there"
    config = SyncConfig(upload_dir=f"mine:/{there}", syncer=Mine())
    results = search(str(tmp_path / "here"), config)
    assert not results.errors
    copied, kept = contents(there / "e"), contents(tmp_path / "here" / "e")
    assert copied == kept
    assert sum(name.endswith("files/weights") for name in copied) == 4
    assert sum(name.endswith("/artifact.txt") for name in copied) == 2


class Locked(Mine):
    """A syncer that holds a lock, so that it cannot be copied for each folder."""

    def __init__(self) -> None:
        super().__init__()
        self.lock = threading.Lock()


def test_a_search_whose_files_cannot_be_copied_does_not_begin(tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    for config, message in (
        (SyncConfig(upload_dir=str(tmp_path / "file")), "cannot be used: Not a directory"),
        (SyncConfig(upload_dir=str(tmp_path / "here")), "one is inside the other"),
        (SyncConfig(upload_dir="mine://there", syncer=Locked()), "__getstate__"),
    ):
        with pytest.raises(ConfigError, match=message):
            search(str(tmp_path / "here"), config)
    assert not list((tmp_path / "here").iterdir())


@pytest.mark.parity(147)
@pytest.mark.parametrize("sync_artifacts", [True, False])
def test_results_and_artifacts_are_beside_the_checkpoints_in_the_store(
    minio: ObjectServer, bucket: str, sync_artifacts: bool
) -> None:
    address = minio.address(bucket, "results")
    results = search(address, SyncConfig(sync_artifacts=sync_artifacts))
    assert not results.errors
    found = stored(join(address, "e"))
    names = [key.rpartition("/")[2] for key in found]
    assert "journal/000001/ready" in found
    assert "journal/lock" not in found
    assert names.count("result.json") == names.count("params.json") == 2
    assert names.count("artifact.txt") == names.count("stdout") == (2 if sync_artifacts else 0)
    assert names.count("manifest.json") == 4
    assert not any("/files/" in key or key.startswith(".cache") for key in found)
