"""Checkpoints in memory, and the temporary folders to which they are restored."""

from __future__ import annotations

import os
from pathlib import Path

import msgspec
import pytest

from tests.unit.shared.fakes import World
from tunemq_shared.base.errors import CheckpointError
from tunemq_shared.checkpoints import checkpoint_bytes as module
from tunemq_shared.checkpoints.checkpoint import Checkpoint
from tunemq_shared.checkpoints.checkpoint_bytes import (
    bytes_to_folder,
    folder_to_bytes,
    is_temporary,
    make_permanent,
)
from tunemq_shared.checkpoints.checkpoint_markers import (
    CheckpointForm,
    is_null,
    make_null_checkpoint,
)
from tunemq_shared.trainable.function_runner import wrap_function
from tunemq_shared.trainable.trainable import Trainable
from tunemq_shared.trial.session import active, report


@pytest.fixture
def world(tmp_path):
    return World(tmp_path)


class Counter(Trainable):
    """Reads its checkpoint in ``step``, not when it receives it."""

    def setup(self, config):
        self.total = 0
        self.given = None

    def step(self):
        if self.given is not None:
            self.total = int(Path(self.given, "deep", "total").read_text())
            self.given = None
        self.total += 1
        return {"total": self.total}

    def save_checkpoint(self, checkpoint_dir):
        Path(checkpoint_dir, "deep").mkdir()
        Path(checkpoint_dir, "deep", "total").write_text(str(self.total))

    def load_checkpoint(self, checkpoint):
        self.given = checkpoint

    def reset_config(self, new_config):
        self.total = 0
        return True


def counted(folder, steps=3):
    counter = Counter(logdir=str(folder))
    for _ in range(steps):
        counter.train()
    return counter


@pytest.mark.parity(7, 42, 45, 169)
def test_object_continues_from_bytes(tmp_path):
    held = counted(tmp_path).save_to_object()
    after = Counter(logdir=str(tmp_path))
    after.restore_from_object(held)

    result = after.train()

    assert (result["total"], result["training_iteration"]) == (4, 4)
    assert result["iterations_since_restore"] == 1


@pytest.mark.parity(7, 8, 10, 46)
@pytest.mark.parametrize("end", ["stop", "reset"])
def test_folder_made_from_bytes_stays_until_the_trial_has_ended(tmp_path, end):
    after = Counter(logdir=str(tmp_path))
    after.restore_from_object(counted(tmp_path).save_to_object())
    (folder,) = tmp_path.iterdir()
    after.train()

    assert folder.name.startswith("checkpoint_tmp")
    assert is_temporary(folder)
    assert not is_null(folder)

    after.stop() if end == "stop" else after.reset({})

    assert list(tmp_path.iterdir()) == []


@pytest.mark.parity(10, 46)
def test_cleanup_that_raises_still_removes_temporary_checkpoints(tmp_path):
    class Untidy(Counter):
        def cleanup(self):
            raise RuntimeError("already closed")

    untidy = Untidy(logdir=str(tmp_path))
    untidy.restore_from_object(counted(tmp_path).save_to_object())
    with pytest.raises(RuntimeError):
        untidy.stop()

    assert list(tmp_path.iterdir()) == []


@pytest.mark.parity(4, 8, 9)
def test_temporary_checkpoint_is_promoted_once(tmp_path):
    folder = bytes_to_folder(msgspec.msgpack.encode({"a/model": b"weights"}), str(tmp_path))

    permanent = make_permanent(folder, str(tmp_path), 7)

    assert os.path.basename(permanent) == "checkpoint_000007"
    assert Path(permanent, "a", "model").read_bytes() == b"weights"
    assert not is_temporary(permanent)
    assert is_temporary(folder)
    with pytest.raises(CheckpointError, match="permanent already"):
        make_permanent(permanent, str(tmp_path), 8)


@pytest.mark.parity(7, 9, 10, 39, 45)
def test_function_continues_from_bytes_and_its_checkpoint_can_be_saved(world):
    seen = []

    def train(config, checkpoint_dir=None):
        seen.append(Path(checkpoint_dir).read_text())
        report({})

    with active(world.session()) as session:
        made = session.make_checkpoint_folder(1)
        Path(made, "model").write_text("weights")
        offered = Checkpoint.from_directory(made)
        session.offer(offered, CheckpointForm(relative="model"))
        session.report({})
        held = wrap_function(train)({}).save_to_object()
    with active(world.session()) as session:
        runner = wrap_function(train)({})
        runner.restore_from_object(held)
        saved = runner.save()
        runner.run()
        runner.stop()

    assert seen == ["weights"]
    assert os.path.basename(saved) == "checkpoint_000001"
    assert not is_temporary(saved)
    assert session.progress.iteration == 2
    assert {path.name for path in (world.folder / "trial").glob("checkpoint_0*")} == {
        "checkpoint_000001"
    }


@pytest.mark.parity(6)
def test_function_that_never_saved_starts_afresh_from_its_bytes(world):
    with active(world.session()):
        held = wrap_function(lambda config: None)({}).save_to_object()
    with active(world.session()) as session:
        runner = wrap_function(lambda config: None)({})
        runner.restore_from_object(held)
        runner.stop()

    assert session.newest_checkpoint() is None
    assert list((world.folder / "trial").iterdir()) == []


@pytest.mark.parity(8)
def test_null_and_temporary_checkpoints_are_distinguished(tmp_path):
    null = make_null_checkpoint(str(tmp_path))
    temporary = bytes_to_folder(folder_to_bytes(null), str(tmp_path))

    assert (is_null(null), is_temporary(null)) == (True, False)
    assert (is_null(temporary), is_temporary(temporary)) == (True, True)


@pytest.mark.parity(42)
def test_many_bytes_cause_a_warning(tmp_path, monkeypatch, caplog):
    monkeypatch.setattr(module, "LARGE_BYTES", 100)
    (tmp_path / "model").write_bytes(bytes(99))

    folder_to_bytes(str(tmp_path))

    assert "held in memory" in caplog.text


@pytest.mark.parametrize(
    ("packed", "words"),
    [
        (b"", "no checkpoint"),
        (b"\xc1", "no checkpoint"),
        (msgspec.msgpack.encode({"model": 3}), "no checkpoint"),
        (msgspec.msgpack.encode({"../model": b""}), r"'\.\./model' is not the name of a file"),
        (msgspec.msgpack.encode({"/etc/model": b""}), r"'/etc/model' is not the name"),
    ],
)
def test_other_bytes_are_rejected_and_none_is_written(tmp_path, packed, words):
    with pytest.raises(CheckpointError, match=words):
        bytes_to_folder(packed, str(tmp_path))

    assert list(tmp_path.iterdir()) == []
