"""From which checkpoint a trial resumes, and its messages about damaged ones."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.unit.shared.fakes import World
from tunemq_shared.base.errors import CheckpointCorrupt, StoreError
from tunemq_shared.checkpoints.checkpoint import Checkpoint
from tunemq_shared.checkpoints.checkpoint_markers import make_null_checkpoint
from tunemq_shared.protocol.messages import CheckpointRef
from tunemq_shared.trainable.run_trial import run_trial
from tunemq_shared.trainable.trainable import Trainable
from tunemq_shared.trial.session import active, get_checkpoint, report


@pytest.fixture
def world(tmp_path):
    return World(tmp_path)


class Counter(Trainable):
    def setup(self, config):
        self.total = 0

    def step(self):
        self.total += 1
        return {"total": self.total, "done": self.total == 5}

    def save_checkpoint(self, checkpoint_dir):
        Path(checkpoint_dir, "total").write_text(str(self.total))

    def load_checkpoint(self, checkpoint):
        self.total = int(Path(checkpoint, "total").read_text())


def count(config):
    kept = get_checkpoint()
    for n in range(0 if kept is None else kept.to_dict()["total"], 5):
        report({"total": n + 1}, checkpoint=Checkpoint.from_dict({"total": n + 1}))


def trained(world, trainable):
    """Train five steps with a checkpoint each and return their keys, newest first."""
    run_trial(trainable, world.session(checkpoint_frequency=1))
    keys = [event.key for event in reversed(world.channel.checkpoints)]
    assert len(keys) == 5
    return keys


@pytest.mark.parametrize("trainable", [Counter, count])
def test_newest_undamaged_checkpoint_is_used_and_each_damaged_one_reported(
    world, trainable, caplog
):
    keys = trained(world, trainable)
    world.sink.damaged.update(keys[:2])
    session = world.restored(last_step=5)
    world.channel.sent.clear()

    run_trial(trainable, session)

    assert world.channel.damages == [(keys[0], keys[1]), (keys[1], keys[2])]
    assert world.channel.kinds[:2] == ["CheckpointDamaged"] * 2
    assert [(result.step, result.metrics["total"]) for result in world.channel.results] == [
        (4, 4),
        (5, 5),
    ]
    assert f"checkpoint {keys[0]}: model is damaged. Instead: {keys[1]}." in caplog.text


@pytest.mark.parity(135)
@pytest.mark.parametrize("trainable", [Counter, count])
def test_failure_names_all_checkpoints_if_all_are_damaged(world, trainable):
    keys = trained(world, trainable)
    world.sink.damaged.update(keys)
    session = world.restored()
    world.channel.sent.clear()

    run_trial(trainable, session)

    assert world.channel.damages == list(zip(keys, [*keys[1:], ""], strict=True))
    assert world.channel.kinds[-1] == "TrialFailed"
    assert not world.channel.results
    assert world.channel.failure.kind == "restore"
    for key in keys:
        assert f"checkpoint {key}: model is damaged." in world.channel.failure.error


@pytest.mark.parity(135)
@pytest.mark.parametrize("trainable", [Counter, count])
def test_store_that_is_away_is_no_damage_and_no_older_checkpoint_is_used(world, trainable):
    trained(world, trainable)
    session = world.restored()
    world.channel.sent.clear()
    world.sink.error = StoreError("http://store:9000 did not answer for 1800 s")

    run_trial(trainable, session)

    assert world.channel.kinds == ["TrialFailed"]
    assert world.channel.failure.kind == "storage"
    assert "did not answer" in world.channel.failure.error


def test_null_checkpoint_is_a_fresh_start_and_no_older_one_is_used(world):
    with active(world.session()) as session:
        session.report({}, Checkpoint.from_dict({}))
        session.report({}, Checkpoint(make_null_checkpoint(str(world.folder))))

    assert world.restored().restore() is None


def test_trial_without_candidates_starts_afresh(world):
    assert world.session().restore() is None


# --- a trial's own checkpoints, while it runs ---


def test_written_checkpoint_is_requested_by_its_written_hash(tmp_path):
    world = World(tmp_path, has_cache=True)
    with active(world.session()):
        report({}, checkpoint=Checkpoint.from_dict({"n": 1}))
        newest = get_checkpoint()

    assert newest is not None
    assert newest.to_dict() == {"n": 1}
    assert world.channel.kinds == ["ResultReported", "CheckpointWritten"]
    assert world.sink.opened == [CheckpointRef("trial/1-1", "", 1, written="sha")]


def test_damaged_newest_checkpoint_of_the_trial_is_reported_and_not_replaced(world):
    def train(config):
        for n in (1, 2):
            report({}, checkpoint=Checkpoint.from_dict({"n": n}))
        world.sink.damaged.add("trial/1-2")
        with pytest.raises(CheckpointCorrupt, match="trial/1-2"):
            get_checkpoint()
        get_checkpoint()

    run_trial(train, world.session())

    assert world.channel.damages == [("trial/1-2", "")] * 2
    assert world.channel.failure.kind == "restore"
