"""Trials that change the checkpoint from which they began, beside others that begin from it too."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

import tunemq as tune
from tests.support.searches.searches import fit
from tests.support.waiting import eventually

pytestmark = pytest.mark.integration

TRIALS = 3


@pytest.fixture(params=["bucket", "folder"])
def storage(request, tmp_path):
    if request.param == "folder":
        return str(tmp_path / "storage")
    return f"s3://{request.getfixturevalue('bucket')}/searches"


def seen(folder):
    """The files of a checkpoint with their contents."""
    return {path.name: path.read_text() for path in sorted(Path(folder).iterdir())}


def change(folder, mark):
    """Write a trained model as libraries do: in place, as a new file and by renaming."""
    Path(folder, "weights").write_text(mark)
    Path(folder, "optimizer").write_text(mark)
    Path(folder, "new").write_text(mark)
    os.replace(Path(folder, "new"), Path(folder, "config"))


def tune_in_place(config):
    """Read the checkpoint after an earlier trial has changed it, then change it."""
    marks, number = Path(config["marks"]), config["number"]
    checkpoint = tune.get_checkpoint()
    with checkpoint.as_directory() as folder:
        (marks / f"opened {number}").touch()
        if config["at_once"]:
            eventually(lambda: len(list(marks.glob("opened *"))) == TRIALS)
        eventually(lambda: number == 0 or (marks / f"changed {number - 1}").exists())
        found = seen(folder)
        change(folder, f"of trial {number}")
        checkpoint.set_metadata({"trial": number})
        tune.report({"found": found}, checkpoint=tune.Checkpoint.from_directory(folder))
    (marks / f"changed {number}").touch()


@pytest.mark.parametrize("at_once", [False, True])
def test_trial_that_writes_into_a_shared_checkpoint_changes_only_its_copy(
    storage, tmp_path, at_once
):
    given, marks = tmp_path / "given", tmp_path / "marks"
    given.mkdir()
    marks.mkdir()
    (given / "weights").write_text("pretrained")
    (given / "config").write_text("pretrained")

    results = fit(
        tune.with_resources(tune_in_place, {"cpu": 0.25}),
        {
            "number": tune.grid_search(list(range(TRIALS))),
            "marks": str(marks),
            "at_once": at_once,
        },
        storage_path=storage,
        max_concurrent_trials=TRIALS if at_once else 1,
        resume_from_checkpoint=str(given),
    )

    assert [result.error for result in results] == [None] * TRIALS
    assert [result.metrics["found"] for result in results] == [seen(given)] * TRIALS
    for number, result in enumerate(results):
        assert set(seen(result.checkpoint.path).values()) == {
            f"of trial {number}",
            f'{{"trial": {number}}}',
        }
    assert not list(Path(results.experiment_path).rglob("checkpoint_tmp*"))


def continue_in_place(config):
    """Save a checkpoint; the second attempt changes it in place and fails before it saves."""
    checkpoint = tune.get_checkpoint()
    if checkpoint is None:
        made = Path("made")
        made.mkdir()
        for name in ("weights", "config"):
            (made / name).write_text("of step 1")
        tune.report({"step": 1}, checkpoint=tune.Checkpoint.from_directory(made))
        raise RuntimeError("it fails at step 2")
    with checkpoint.as_directory() as folder:
        found = seen(folder)
        change(folder, "of step 2")
        if not Path(config["failed"]).exists():
            Path(config["failed"]).touch()
            os.kill(os.getpid(), 9)
        tune.report({"step": 2, "found": found}, checkpoint=tune.Checkpoint.from_directory(folder))


def test_killed_attempt_that_changed_its_checkpoint_does_not_affect_the_next(storage, tmp_path):
    (result,) = fit(
        continue_in_place,
        {"failed": str(tmp_path / "failed")},
        storage_path=storage,
        max_failures=2,
    )

    assert result.error is None
    assert result.metrics["found"] == {"weights": "of step 1", "config": "of step 1"}
    (first, _), (second, _) = result.best_checkpoints
    assert seen(first.path) == {"weights": "of step 1", "config": "of step 1"}
    assert set(seen(second.path).values()) == {"of step 2"}
    assert not list(Path(result.path).rglob("checkpoint_tmp*"))


def save_twice(config):
    """Change the newest checkpoint in place, and save it as the next one."""
    made = Path("made")
    made.mkdir()
    for name in ("weights", "config"):
        (made / name).write_text("of step 1")
    tune.report({"step": 1}, checkpoint=tune.Checkpoint.from_directory(made))
    with tune.get_checkpoint().as_directory() as folder:
        change(folder, "of step 2")
        tune.report({"step": 2}, checkpoint=tune.Checkpoint.from_directory(folder))


def test_a_checkpoint_that_is_changed_in_place_and_saved_again_is_stored_as_it_is(storage):
    (result,) = fit(save_twice, storage_path=storage)

    assert result.error is None
    (first, _), (second, _) = result.best_checkpoints
    assert set(seen(first.path).values()) == {"of step 1"}
    assert set(seen(second.path).values()) == {"of step 2"}


def dies(config):
    """Read the checkpoint, and be killed."""
    with tune.get_checkpoint().as_directory() as folder:
        assert seen(folder) == {"weights": "pretrained"}
        os.kill(os.getpid(), 9)


def test_a_trial_that_is_killed_leaves_no_copy(tmp_path):
    given, storage = tmp_path / "given", tmp_path / "storage"
    given.mkdir()
    (given / "weights").write_text("pretrained")

    (result,) = fit(dies, {}, storage_path=str(storage), resume_from_checkpoint=str(given))

    assert "SIGKILL" in str(result.error)
    assert not list(Path(result.path).rglob("checkpoint_tmp*"))
