"""One `Checkpoint` for every kind of trainable, which gets back the form that it saved."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.unit.shared.fakes import World
from tunemq_shared.base.errors import CheckpointError
from tunemq_shared.checkpoints.checkpoint import Checkpoint
from tunemq_shared.trainable.run_trial import run_trial
from tunemq_shared.trainable.trainable import Trainable
from tunemq_shared.trial.session import get_checkpoint, report

pytestmark = pytest.mark.parity(178)


@pytest.fixture
def world(tmp_path):
    return World(tmp_path)


def of_dict(folder):
    return Checkpoint.from_dict({"n": 1})


class Seen(list):
    """What a trainable was given, with its content: a copy ends with the trial."""

    def append(self, given):
        super().append((type(given), given if given is None else read(given)))


def of_folder(folder):
    folder.mkdir(exist_ok=True)
    (folder / "n").write_text("1")
    return Checkpoint.from_directory(folder)


def plain(make, seen):
    def train(config):
        seen.append(get_checkpoint())
        report({}, checkpoint=make())

    return train


def with_folder(make, seen):
    def train(config, checkpoint_dir=None):
        seen.append(checkpoint_dir)
        report({}, checkpoint=make())

    return train


def with_reporter(make, seen):
    def train(config, reporter):
        seen.append(reporter.get_checkpoint())
        reporter.set_checkpoint(make())
        seen.append(reporter.get_checkpoint())
        reporter(loss=1.0)
        seen.append(reporter.get_checkpoint())

    return train


def as_class(make, seen):
    class Saving(Trainable):
        def setup(self, config):
            seen.append(None)

        def step(self):
            return {"done": True}

        def save_checkpoint(self, checkpoint_dir):
            return make()

        def load_checkpoint(self, checkpoint):
            seen.append(checkpoint)

    return Saving


def read(given):
    """Return the content of a checkpoint in any form."""
    if isinstance(given, Checkpoint):
        given = given.to_dict() if given.is_dict else given.path
    return given if isinstance(given, dict) else {"n": int(Path(given, "n").read_text())}


@pytest.mark.parity(38, 39, 44)
@pytest.mark.parametrize("kind", [plain, with_folder, with_reporter, as_class])
@pytest.mark.parametrize("make", [of_dict, of_folder])
def test_every_trainable_accepts_a_checkpoint_and_gets_it_back(world, tmp_path, kind, make):
    seen = Seen()
    trainable = kind(lambda: make(tmp_path / "made"), seen)

    run_trial(trainable, world.session(checkpoint_at_end=True))
    run_trial(trainable, world.restored())

    assert world.channel.kinds.count("TrialFinished") == 2
    assert seen[0] == (type(None), None)
    given = [(form, content) for form, content in seen if content is not None]
    assert [content for _, content in given] == [{"n": 1}] * len(given)
    if kind is not plain:
        assert {form for form, _ in given} == {dict if make is of_dict else str}


@pytest.mark.parametrize("make", [of_dict, of_folder])
def test_class_is_restored_by_hand_from_any_checkpoint(tmp_path, make):
    seen = []
    trainable = as_class(lambda: None, seen)(logdir=str(tmp_path))

    trainable.restore(make(tmp_path / "made"))

    assert read(seen[-1]) == {"n": 1}
    assert trainable.iteration == 0


@pytest.mark.parity(40)
def test_value_that_is_no_checkpoint_is_rejected_with_its_type(tmp_path):
    trainable = as_class(lambda: 3, [])(logdir=str(tmp_path))

    with pytest.raises(CheckpointError, match=r"save_checkpoint\(\) returned int; return a path"):
        trainable.save()
