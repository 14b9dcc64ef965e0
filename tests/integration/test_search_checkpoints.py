"""Checkpoints of a search: resuming after a failure, retention, checkpoints on demand."""

from __future__ import annotations

import os
import pickle
import re
import shutil
import time
from pathlib import Path

import pytest

import tunemq as tune
from tests.support.searches.journals import ended_searches
from tests.support.searches.searches import fit, results_of, table_of
from tunemq_shared.base.errors import CheckpointError

__all__ = ["ended_searches"]

pytestmark = pytest.mark.integration


def save(folder, step):
    folder.mkdir(exist_ok=True)
    (folder / "step").write_text(str(step))
    return tune.Checkpoint.from_directory(str(folder))


def resumed_step():
    checkpoint = tune.get_checkpoint()
    if checkpoint is None:
        return 0
    with checkpoint.as_directory() as folder:
        return int(Path(folder, "step").read_text())


def fails_once(config):
    """Train ten steps with a checkpoint every second one; the first attempt raises at the sixth."""
    marker, log = Path(config["marker"]), Path(config["log"])
    for step in range(resumed_step() + 1, 11):
        if step == 6 and not marker.exists():
            marker.touch()
            raise RuntimeError("it fails once")
        with log.open("a") as file:
            print(step, file=file)
        checkpoint = save(Path("made"), step) if step % 2 == 0 else None
        tune.report({"step": step}, checkpoint=checkpoint)


@pytest.fixture
def log(tmp_path):
    return tmp_path / "log"


@pytest.fixture
def space(tmp_path, log):
    return {"marker": str(tmp_path / "failed"), "log": str(log)}


def trained(log):
    return [int(line) for line in log.read_text().splitlines()]


@pytest.mark.parity(71, 95)
def test_a_retried_function_repeats_at_most_one_interval_and_each_result_is_recorded_once(
    space, log
):
    (result,) = fit(fails_once, space, max_failures=1)

    assert (result.status, result.error) == ("TERMINATED", None)
    assert trained(log) == [1, 2, 3, 4, 5, 5, 6, 7, 8, 9, 10]
    assert [line["step"] for line in results_of(result)] == list(range(1, 11))
    assert [int(row["training_iteration"]) for row in table_of(result)] == list(range(1, 11))
    assert "it fails once" in Path(result.path, "error.txt").read_text()


@pytest.mark.parity(70)
def test_a_function_that_may_not_fail_ends_in_error_with_its_results_kept(space, log):
    results = fit(fails_once, space)
    (result,) = results

    assert result.status == "ERROR"
    assert "RuntimeError: it fails once" in str(result.error)
    assert results.num_errors == 1
    assert result.metrics["step"] == 5
    assert resumed_from(result.checkpoint) == 4
    assert trained(log) == [1, 2, 3, 4, 5]


def resumed_from(checkpoint):
    return int(Path(checkpoint.path, "step").read_text())


def test_a_killed_trial_resumes_from_its_last_checkpoint(space, log):
    def killed_once(config):
        marker, log = Path(config["marker"]), Path(config["log"])
        for step in range(resumed_step() + 1, 8):
            if step == 4 and not marker.exists():
                marker.touch()
                os.kill(os.getpid(), 9)
            with log.open("a") as file:
                print(step, file=file)
            tune.report({"step": step}, checkpoint=save(Path("made"), step))

    (result,) = fit(killed_once, space, max_failures=1)

    assert result.status == "TERMINATED"
    assert trained(log) == [1, 2, 3, 4, 5, 6, 7]
    assert "SIGKILL" in Path(result.path, "error.txt").read_text()


class Learns(tune.Trainable):
    """A trial with its best score halfway."""

    def setup(self, config):
        self.marker = config.get("marker")
        self.n = 0

    def step(self):
        self.n += 1
        if self.marker and self.n == 6 and not Path(self.marker).exists():
            Path(self.marker).touch()
            raise RuntimeError("it fails once")
        return {"n": self.n, "score": -abs(self.n - 5)}

    def save_checkpoint(self, checkpoint_dir):
        Path(checkpoint_dir, "step").write_text(str(self.n))

    def load_checkpoint(self, checkpoint):
        self.n = int(Path(checkpoint, "step").read_text())


class LearnsAsDict(Learns):
    def save_checkpoint(self, checkpoint_dir):
        return {"n": self.n}

    def load_checkpoint(self, checkpoint):
        self.n = checkpoint["n"]


@pytest.mark.parity(101, 171)
@pytest.mark.parametrize("kind", [Learns, LearnsAsDict])
def test_a_class_that_failed_continues_from_its_checkpoint_with_its_counts(kind, space):
    (result,) = fit(
        kind, space, max_failures=1, checkpoint_frequency=2, stop={"training_iteration": 8}
    )

    assert [line["n"] for line in results_of(result)] == list(range(1, 9))
    assert result.metrics["training_iteration"] == 8
    assert result.metrics["iterations_since_restore"] == 4


@pytest.mark.parity(101)
def test_class_saves_at_its_checkpoint_frequency():
    (result,) = fit(Learns, checkpoint_frequency=3, stop={"training_iteration": 8})

    steps = [metrics["training_iteration"] for _, metrics in result.best_checkpoints]
    assert steps == [3, 6]
    assert resumed_from(result.checkpoint) == 6


@pytest.mark.parity(101)
def test_a_class_saves_at_its_end():
    (result,) = fit(Learns, checkpoint_at_end=True, stop={"training_iteration": 4})

    assert [resumed_from(checkpoint) for checkpoint, _ in result.best_checkpoints] == [4]


def test_a_checkpoint_that_was_due_at_the_end_is_not_made_twice():
    (result,) = fit(
        Learns, checkpoint_frequency=2, checkpoint_at_end=True, stop={"training_iteration": 4}
    )

    assert [resumed_from(checkpoint) for checkpoint, _ in result.best_checkpoints] == [2, 4]


@pytest.mark.parity(107, 108)
def test_the_best_checkpoints_by_score_and_the_newest_are_kept_on_disk():
    (result,) = fit(
        Learns,
        checkpoint_frequency=1,
        num_to_keep=2,
        checkpoint_score_attribute="score",
        stop={"training_iteration": 8},
    )

    kept = {resumed_from(checkpoint): metrics for checkpoint, metrics in result.best_checkpoints}
    assert set(kept) >= {5, 8}
    assert kept[5]["score"] == 0
    assert len(kept) <= 3
    assert resumed_from(result.checkpoint) == 8
    on_disk = [path.name for path in Path(result.path).glob("checkpoint_*")]
    assert len(on_disk) == len(kept)


@pytest.mark.parity(107)
def test_without_a_score_the_newest_checkpoints_are_kept():
    (result,) = fit(Learns, checkpoint_frequency=1, num_to_keep=2, stop={"training_iteration": 6})

    assert [resumed_from(checkpoint) for checkpoint, _ in result.best_checkpoints] == [5, 6]


@pytest.mark.parity(44, 38)
def test_checkpoint_from_a_dict_is_loaded_as_a_dict(space):
    def train(config):
        checkpoint = tune.get_checkpoint()
        n = checkpoint.to_dict()["n"] if checkpoint else 0
        for step in range(n + 1, 6):
            if step == 4 and not Path(config["marker"]).exists():
                Path(config["marker"]).touch()
                raise RuntimeError("it fails once")
            tune.report({"step": step}, checkpoint=tune.Checkpoint.from_dict({"n": step}))

    (result,) = fit(train, space, max_failures=1)

    assert [line["step"] for line in results_of(result)] == [1, 2, 3, 4, 5]
    assert result.checkpoint.to_dict() == {"n": 5}


def test_results_of_a_search_whose_checkpoint_was_removed_stay_readable(space):
    def train(config):
        for step in range(1, 4):
            checkpoint = tune.Checkpoint.from_dict({"n": step})
            tune.report({"score": step * config["factor"]}, checkpoint=checkpoint)

    grid = fit(
        train, {"factor": tune.grid_search([1, 2])}, num_to_keep=2, metric="score", mode="max"
    )
    best, folder = grid.get_best_result(), Path(grid[1].checkpoint.path)
    shutil.rmtree(folder.parent)
    restored = tune.Tuner.restore(grid.experiment_path, train).get_results()

    assert [result.metrics["score"] for result in restored] == [3, 6]
    assert restored.errors == []
    assert len(restored.get_dataframe()) == 2
    again = restored.get_best_result()
    assert again.metrics["score"] == best.metrics["score"] == 6
    assert [metrics["score"] for _, metrics in again.best_checkpoints] == [4, 6]
    assert again.get_best_checkpoint("score", "min").to_dict() == {"n": 2}
    for use in (
        again.checkpoint.to_dict,
        again.checkpoint.to_directory,
        again.checkpoint.get_metadata,
        lambda: pickle.dumps(again.checkpoint),
        lambda: again.checkpoint.as_directory().__enter__(),
    ):
        with pytest.raises(CheckpointError, match=rf"{re.escape(str(folder))} is gone"):
            use()


class SlowlySaved(tune.Trainable):
    def setup(self, config):
        self.steps = 0

    def step(self):
        self.steps += 1
        return {"loss": self.steps}

    def save_checkpoint(self, checkpoint_dir):
        time.sleep(7)  # longer than a stopped trial may run on without saving
        Path(checkpoint_dir, "steps").write_text(str(self.steps))


def test_last_checkpoint_of_a_stopped_trial_that_saves_slowly_is_kept():
    scheduler = tune.schedulers.ASHAScheduler(max_t=2, grace_period=1)
    (result,) = fit(
        SlowlySaved, metric="loss", mode="min", scheduler=scheduler, checkpoint_at_end=True
    )

    assert result.metrics["training_iteration"] == 2
    assert Path(result.checkpoint.path, "steps").read_text() == "2"


def leaves_a_link(config):
    for step in (1, 2):
        checkpoint = save(Path("made"), step)
        if step == 2:
            os.symlink("/etc/hostname", "made/name")
        tune.report({"loss": step}, checkpoint=checkpoint)


@pytest.mark.parametrize(
    "how", [{"stop": {"training_iteration": 2}}, {"stop": lambda _, result: result["loss"] == 2}]
)
def test_last_checkpoint_that_cannot_be_saved_is_named_in_a_warning(how, capfd):
    (result,) = fit(leaves_a_link, verbose=1, **how)

    assert result.metrics["loss"] == 2
    said = capfd.readouterr().out
    assert "made/name' in a checkpoint is a link to '/etc/hostname' outside of it" in said
    assert "a checkpoint of that step is missing, its newest one is of step 1" in said
