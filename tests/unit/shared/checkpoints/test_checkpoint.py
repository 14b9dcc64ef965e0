"""Checkpoints as folders and as dicts."""

from __future__ import annotations

import gc
import os
import pickle
import threading
from pathlib import Path
from typing import Any

import pytest

from tunemq_shared.base.errors import CheckpointError
from tunemq_shared.checkpoints.checkpoint import DICT_FILE, METADATA_FILE, Checkpoint


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    folder = tmp_path / "saved"
    (folder / "deep").mkdir(parents=True)
    (folder / "model.bin").write_bytes(b"weights")
    (folder / "deep" / "state").write_bytes(b"state")
    return folder


def test_folder_stays_in_place(folder: Path) -> None:
    checkpoint = Checkpoint.from_directory(folder)
    assert checkpoint.path == str(folder)
    assert not checkpoint.is_dict
    with checkpoint.as_directory() as path:
        assert path == str(folder)
    assert folder.exists()


def test_relative_path_means_the_same_after_a_change_of_folder(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(folder.parent)
    checkpoint = Checkpoint("saved")
    monkeypatch.chdir("/")
    assert Path(checkpoint.path, "model.bin").read_bytes() == b"weights"


@pytest.mark.parametrize("name", ["missing", "saved/model.bin"])
def test_path_that_is_no_folder_is_no_checkpoint(folder: Path, name: str) -> None:
    with pytest.raises(CheckpointError, match="must be a folder"):
        Checkpoint.from_directory(folder.parent / name)


@pytest.mark.parity(38, 44, 178)
def test_dict_round_trips_also_through_a_folder(tmp_path: Path) -> None:
    data = {"step": 3, "rates": (0.1, 0.2), "hook": lambda x: x + 1}
    checkpoint = Checkpoint.from_dict(data)
    assert checkpoint.is_dict
    kept = Checkpoint(checkpoint.to_directory(tmp_path / "kept"))
    assert kept.is_dict
    assert os.listdir(kept.path) == [DICT_FILE]
    for back in (checkpoint.to_dict(), kept.to_dict()):
        assert back["step"] == 3
        assert back["rates"] == (0.1, 0.2)
        assert back["hook"](1) == 2


def test_dict_is_copied() -> None:
    data = {"losses": [1]}
    checkpoint = Checkpoint.from_dict(data)
    data["losses"].append(2)
    assert checkpoint.to_dict() == {"losses": [1]}


def test_folder_of_a_dict_lives_as_long_as_it_is_needed() -> None:
    checkpoint = Checkpoint.from_dict({"a": 1})
    with checkpoint.as_directory() as path:
        assert os.listdir(path) == [DICT_FILE]
    assert not os.path.exists(path)
    own = checkpoint.path
    assert checkpoint.path == own
    assert Checkpoint(own).to_dict() == {"a": 1}
    del checkpoint
    gc.collect()
    assert not os.path.exists(own)


def test_files_are_no_dict(folder: Path) -> None:
    with pytest.raises(CheckpointError, match=r"made from a directory.*as_directory"):
        Checkpoint(folder).to_dict()


@pytest.mark.parity(40)
@pytest.mark.parametrize("data", [None, [1], "model.bin"])
def test_only_a_dict_is_a_dict(data: Any) -> None:
    with pytest.raises(CheckpointError, match=r"needs a dict, not .*wrap the value"):
        Checkpoint.from_dict(data)


def test_value_that_cannot_be_saved_is_named() -> None:
    with pytest.raises(CheckpointError, match=r"_thread\.lock at dict\['nets'\]\[1\]"):
        Checkpoint.from_dict({"nets": [1, threading.Lock()]})


def test_copy_has_all_files(folder: Path, tmp_path: Path) -> None:
    checkpoint = Checkpoint(folder)
    copy = checkpoint.to_directory(tmp_path / "a" / "b")
    assert Path(copy, "deep", "state").read_bytes() == b"state"
    assert checkpoint.to_directory(folder) == str(folder)
    unnamed = Path(checkpoint.to_directory())
    assert (unnamed / "model.bin").read_bytes() == b"weights"
    assert unnamed != folder


@pytest.mark.parametrize("kind", ["folder", "dict", "written dict"])
def test_metadata_stays_with_the_checkpoint(folder: Path, tmp_path: Path, kind: str) -> None:
    checkpoint = Checkpoint(folder) if kind == "folder" else Checkpoint.from_dict({"a": 1})
    if kind == "written dict":
        assert checkpoint.path
    assert checkpoint.get_metadata() == {}
    checkpoint.set_metadata({"framework": "numpy", "n": 1})
    checkpoint.update_metadata({"n": 2})
    assert checkpoint.get_metadata() == {"framework": "numpy", "n": 2}
    kept = Checkpoint(checkpoint.to_directory(tmp_path / "kept"))
    assert kept.get_metadata() == {"framework": "numpy", "n": 2}
    again = pickle.loads(pickle.dumps(checkpoint))
    assert again.get_metadata() == {"framework": "numpy", "n": 2}


def test_metadata_must_be_json(folder: Path) -> None:
    checkpoint = Checkpoint(folder)
    with pytest.raises(CheckpointError, match="JSON can hold"):
        checkpoint.set_metadata({"a": object()})
    for content in ("{", "[1]"):
        (folder / METADATA_FILE).write_text(content)
        with pytest.raises(CheckpointError, match="JSON"):
            checkpoint.get_metadata()


def test_checkpoints_can_be_pickled_and_compared(folder: Path) -> None:
    for checkpoint in (Checkpoint(folder), Checkpoint.from_dict({"a": 1})):
        again = pickle.loads(pickle.dumps(checkpoint))
        assert again == checkpoint
        assert hash(again) == hash(checkpoint)
        assert checkpoint != "checkpoint"
    assert Checkpoint(folder) != Checkpoint(folder / "deep")
    assert Checkpoint.from_dict({"a": 1}) != Checkpoint.from_dict({"a": 2})
    assert str(folder) in repr(Checkpoint(folder))
    assert "dict" in repr(Checkpoint.from_dict({"a": 1}))


def test_pickled_dict_omits_its_folder() -> None:
    checkpoint = Checkpoint.from_dict({"a": 1})
    pickled = pickle.dumps((checkpoint.path, checkpoint))
    del checkpoint
    gc.collect()
    path, again = pickle.loads(pickled)
    assert not os.path.exists(path)
    assert again.to_dict() == {"a": 1}


def test_subclasses_create_their_own_type(folder: Path) -> None:
    class Mine(Checkpoint):
        pass

    assert type(Mine.from_directory(folder)) is Mine
    assert type(Mine.from_dict({})) is Mine
