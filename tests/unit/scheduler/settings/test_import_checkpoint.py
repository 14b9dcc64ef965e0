"""A user's checkpoint is copied into the search's store, with the counters in it."""

from __future__ import annotations

import pytest

from tests.support.searches.checkpoints import KEY, contents, put
from tunemq_scheduler.settings.import_checkpoint import KEY as RESTORED
from tunemq_scheduler.settings.import_checkpoint import import_checkpoint
from tunemq_scheduler.storage.stored_checkpoint import StoredCheckpoint
from tunemq_shared.base.errors import CheckpointError
from tunemq_shared.checkpoints.checkpoint import Checkpoint
from tunemq_shared.checkpoints.local_store import LocalCheckpointStore
from tunemq_shared.trainable.trainable import Trainable


@pytest.fixture
def store(tmp_path):
    (tmp_path / "store").mkdir()
    return LocalCheckpointStore(tmp_path / "store")


@pytest.fixture
def folder(tmp_path):
    folder = tmp_path / "given"
    folder.mkdir()
    (folder / "weights").write_bytes(b"weights")
    return folder


@pytest.mark.parity(113)
@pytest.mark.parametrize("form", [str, Checkpoint, lambda folder: folder])
def test_folder_of_files_is_copied_with_counters_at_zero(store, folder, form):
    ref = import_checkpoint(form(folder), store)
    opened = store.open_checkpoint(ref.key, ref.sha256)
    assert (ref.key, ref.step) == (RESTORED, 0)
    assert contents(opened.path) == {"weights": b"weights"}
    assert contents(folder) == {"weights": b"weights"}


def test_dict_checkpoint_is_restored_as_a_dict(store):
    ref = import_checkpoint(Checkpoint.from_dict({"n": 3}), store)
    opened = store.open_checkpoint(ref.key, ref.sha256)
    assert opened.manifest.state["as_dict"]
    assert Checkpoint(opened.path).to_dict() == {"n": 3}


def test_checkpoint_of_another_search_keeps_its_counters(store, folder, tmp_path):
    (tmp_path / "other").mkdir()
    other = LocalCheckpointStore(tmp_path / "other")
    state = {"training_iteration": 7, "timesteps_total": 70, "as_dict": False, "relative": ""}
    committed = put(other, folder, step=7, state=state)
    ref = import_checkpoint(str(other.open_checkpoint(KEY, committed.sha256).path), store)
    assert ref.step == 7
    assert store.open_checkpoint(ref.key, ref.sha256).manifest.state == state


def test_checkpoint_that_is_read_from_a_store_keeps_its_counters(store, folder, tmp_path):
    (tmp_path / "other").mkdir()
    other = LocalCheckpointStore(tmp_path / "other")
    state = {"training_iteration": 7, "timesteps_total": 70, "as_dict": False, "relative": ""}
    committed = put(other, folder, step=7, state=state)
    given = StoredCheckpoint(str(tmp_path / "other"), KEY, committed.sha256)
    ref = import_checkpoint(given, store)
    assert ref.step == 7
    assert store.open_checkpoint(ref.key, ref.sha256).manifest.state == state


def test_checkpoint_saved_by_a_trainable_alone_keeps_its_counters(store, tmp_path):
    class Counts(Trainable):
        def step(self):
            return {}

        def save_checkpoint(self, checkpoint_dir):
            return {"n": 1}

    trained = Counts({})
    for _ in range(3):
        trained.train()
    ref = import_checkpoint(trained.save(str(tmp_path / "saved")), store)
    assert ref.step == 3


def test_checkpoint_that_is_no_folder_is_rejected(store, tmp_path):
    with pytest.raises(CheckpointError, match="nowhere"):
        import_checkpoint(tmp_path / "nowhere", store)
