"""Checkpoints in a store, which are downloaded when their content is read."""

from __future__ import annotations

import gc
import os
import pickle
import subprocess
import sys
from pathlib import Path

import pytest

from tests.support.searches.checkpoints import KEY, contents, fill, info, put
from tunemq_scheduler.storage.stored_checkpoint import StoredCheckpoint
from tunemq_shared.base.errors import CheckpointCorrupt, CheckpointError
from tunemq_shared.checkpoints.checkpoint import Checkpoint
from tunemq_shared.checkpoints.local_store import LocalCheckpointStore


@pytest.fixture
def store(tmp_path: Path) -> LocalCheckpointStore:
    (tmp_path / "experiment").mkdir()
    return LocalCheckpointStore(tmp_path / "experiment")


@pytest.fixture
def source(tmp_path: Path) -> Path:
    return fill(tmp_path / "source")


@pytest.fixture
def temporary(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The folder for temporary folders."""
    folder = tmp_path / "temporary"
    folder.mkdir()
    monkeypatch.setattr("tempfile.tempdir", str(folder))
    return folder


def stored(store: LocalCheckpointStore, source: Path) -> StoredCheckpoint:
    return StoredCheckpoint(str(store.root), KEY, put(store, source).sha256)


def stored_dict(store: LocalCheckpointStore, **data: object) -> StoredCheckpoint:
    with Checkpoint.from_dict(data).as_directory() as folder:
        return stored(store, Path(folder))


def test_checkpoint_is_downloaded_only_when_it_is_read(temporary: Path) -> None:
    checkpoint = StoredCheckpoint("/nowhere/experiment", KEY, "0" * 64)
    assert checkpoint.uri == f"/nowhere/experiment/{KEY}"
    assert repr(checkpoint) == f"StoredCheckpoint(uri='/nowhere/experiment/{KEY}')"
    assert checkpoint == pickle.loads(pickle.dumps(checkpoint))
    assert list(temporary.iterdir()) == []


def test_checkpoint_folder_lives_as_long_as_the_checkpoint(
    store: LocalCheckpointStore, source: Path, temporary: Path
) -> None:
    checkpoint = stored(store, source)
    path = checkpoint.path
    assert contents(Path(path)) == contents(source)
    assert checkpoint.path == path
    with checkpoint.as_directory() as folder:
        assert folder == path
    del checkpoint
    gc.collect()
    assert list(temporary.iterdir()) == []


def test_as_directory_leaves_no_file_behind(
    store: LocalCheckpointStore, source: Path, temporary: Path
) -> None:
    with stored(store, source).as_directory() as folder:
        assert contents(Path(folder)) == contents(source)
    assert list(temporary.iterdir()) == []


def test_checkpoint_copy_goes_directly_to_its_folder(
    store: LocalCheckpointStore, source: Path, tmp_path: Path, temporary: Path
) -> None:
    target = tmp_path / "a" / "b"
    assert stored(store, source).to_directory(target) == str(target)
    assert contents(target) == contents(source)
    assert list(temporary.iterdir()) == []


def test_checkpoint_copy_is_merged_into_an_existing_folder(
    store: LocalCheckpointStore, source: Path, tmp_path: Path
) -> None:
    target = tmp_path / "mine"
    (target / "deep").mkdir(parents=True)
    (target / "deep" / "notes").write_bytes(b"notes")
    (target / "model.bin").write_bytes(b"older")
    stored(store, source).to_directory(target)
    assert contents(target) == {**contents(source), "deep/notes": b"notes"}


def test_dict_checkpoint_is_read_back(store: LocalCheckpointStore) -> None:
    checkpoint = stored_dict(store, rates=(0.1, 0.2))
    assert checkpoint.is_dict
    assert checkpoint.to_dict() == {"rates": (0.1, 0.2)}


def test_checkpoint_of_files_gives_no_dict(
    store: LocalCheckpointStore, source: Path, temporary: Path
) -> None:
    checkpoint = stored(store, source)
    assert not checkpoint.is_dict
    assert list(temporary.iterdir()) == []
    with pytest.raises(CheckpointError, match=r"made from a directory.*as_directory"):
        checkpoint.to_dict()


def test_checkpoint_metadata_are_read_only(
    store: LocalCheckpointStore, source: Path, temporary: Path
) -> None:
    assert stored(store, source).get_metadata() == {}
    assert list(temporary.iterdir()) == []
    Checkpoint(source).set_metadata({"framework": "numpy"})
    store.delete_checkpoint(KEY)
    checkpoint = stored(store, source)
    assert checkpoint.get_metadata() == {"framework": "numpy"}
    for change in (checkpoint.set_metadata, checkpoint.update_metadata):
        with pytest.raises(CheckpointError, match=rf"{KEY} cannot be set: .*to_directory"):
            change({"a": 1})


def test_checkpoint_is_pickled_without_its_folder(
    store: LocalCheckpointStore, source: Path
) -> None:
    checkpoint = stored(store, source)
    pickled = pickle.dumps((checkpoint.path, checkpoint))
    assert len(pickled) < 1000
    del checkpoint
    gc.collect()
    path, again = pickle.loads(pickled)
    assert not os.path.exists(path)
    assert contents(Path(again.path)) == contents(source)


def test_checkpoints_with_equal_addresses_are_equal(
    store: LocalCheckpointStore, source: Path
) -> None:
    checkpoint = stored(store, source)
    other = "train_0/checkpoint_1-000002"
    sha256 = store.put_checkpoint(other, source, info(n=2)).sha256
    assert checkpoint != StoredCheckpoint(str(store.root), other, sha256)
    assert checkpoint != Checkpoint(checkpoint.path)
    assert hash(checkpoint) == hash(pickle.loads(pickle.dumps(checkpoint)))


def test_damaged_checkpoint_gives_no_files(
    store: LocalCheckpointStore, source: Path, tmp_path: Path, temporary: Path
) -> None:
    sha256 = put(store, source).sha256
    (store.root / KEY / "files" / "deep" / "er" / "state").write_bytes(b"stale")
    checkpoint = StoredCheckpoint(str(store.root), KEY, sha256)
    for use in (
        lambda: checkpoint.path,
        lambda: checkpoint.to_directory(tmp_path / "mine"),
        checkpoint.to_directory,
        lambda: checkpoint.as_directory().__enter__(),
    ):
        with pytest.raises(CheckpointCorrupt, match="'deep/er/state' is damaged"):
            use()
    assert contents(tmp_path / "mine") == {}
    assert not [file for file in temporary.rglob("*") if file.is_file()]


def test_trial_process_imports_no_store_code() -> None:
    code = (
        "import sys; from tunemq_shared.checkpoints import checkpoint, local_store, store_sink;"
        "stores = {'tunemq_shared.checkpoints.open_store',"
        " 'tunemq_scheduler.storage.stored_checkpoint'};"
        "print(stores & set(sys.modules))"
    )
    shown = subprocess.run([sys.executable, "-c", code], check=True, capture_output=True, text=True)
    assert shown.stdout.strip() == "set()"
