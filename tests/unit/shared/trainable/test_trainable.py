"""Class trainables, stepped by hand."""

from __future__ import annotations

import functools
import logging
import os
import tempfile
from pathlib import Path

import pytest

from tests.unit.shared.fakes import World
from tunemq_shared.base.errors import CheckpointError, MetricError, TrainableError
from tunemq_shared.checkpoints.checkpoint_markers import make_null_checkpoint
from tunemq_shared.trainable import trainable as trainable_module
from tunemq_shared.trainable.trainable import Trainable, validate_trainable
from tunemq_shared.trial.session import active


@pytest.fixture(autouse=True)
def _temporary_folders_go_with_the_test(tmp_path, monkeypatch):
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))


class Counter(Trainable):
    """Counts up; saves a dict, a folder or a path in it, as ``config["as"]`` says."""

    def setup(self, config):
        self.total = 0
        self.by = config.get("by", 1)
        config["by"] = "changed by setup"

    def step(self):
        self.total += self.by
        return {"total": self.total, "timesteps_this_iter": 10}

    def save_checkpoint(self, checkpoint_dir):
        kind = self.config.get("as", "folder")
        if kind == "dict":
            return {"total": self.total}
        Path(checkpoint_dir, "total").write_text(str(self.total))
        if kind == "elsewhere":
            return os.path.dirname(checkpoint_dir)
        return os.path.join(checkpoint_dir, "total") if kind == "path" else None

    def load_checkpoint(self, checkpoint):
        self.loaded = checkpoint
        if isinstance(checkpoint, dict):
            self.total = checkpoint["total"]
        elif os.path.isdir(checkpoint):
            self.total = int(Path(checkpoint, "total").read_text())
        else:
            self.total = int(Path(checkpoint).read_text())

    def reset_config(self, new_config):
        if "refuse" in new_config:
            return False
        self.total, self.by = 0, new_config.get("by", 1)
        return True


@pytest.mark.parity(169, 170)
def test_train_steps_once_and_fills_in_the_automatic_keys(tmp_path):
    counter = Counter({"by": 2}, logdir=str(tmp_path))

    counter.train()
    result = counter.train()

    assert (result["total"], result["training_iteration"], result["timesteps_total"]) == (4, 2, 20)
    assert result["config"] == {"by": 2}
    assert result["pid"] == os.getpid()
    assert not result["done"]
    assert {"date", "timestamp", "hostname", "node_ip", "experiment_id"} <= result.keys()
    assert counter.iteration == counter.training_iteration == 2


@pytest.mark.parity(41, 169)
@pytest.mark.parametrize("form", ["folder", "dict", "path"])
def test_restored_object_continues_from_its_saved_state(tmp_path, form):
    config = {"as": form}
    before = Counter(config, logdir=str(tmp_path))
    before.train()
    before.train()
    folder = before.save(str(tmp_path / "saved"))

    after = Counter(config, logdir=str(tmp_path))
    after.restore(folder)
    result = after.train()

    expected = {"folder": folder, "dict": {"total": 2}, "path": os.path.join(folder, "total")}
    assert after.loaded == expected[form]
    assert (result["total"], result["training_iteration"]) == (3, 3)
    assert (result["iterations_since_restore"], result["timesteps_total"]) == (1, 30)


def test_checkpoint_goes_to_a_folder_named_by_its_iteration(tmp_path):
    counter = Counter(logdir=str(tmp_path))
    counter.train()

    assert counter.save() == str(tmp_path / "checkpoint_000001")


def test_path_outside_the_checkpoint_is_rejected(tmp_path):
    counter = Counter({"as": "elsewhere"})

    with pytest.raises(CheckpointError, match="which is not in"):
        counter.save(str(tmp_path / "saved"))


def test_damaged_metadata_is_named(tmp_path):
    counter = Counter()
    folder = counter.save(str(tmp_path / "saved"))
    Path(folder, ".tune_metadata.json").write_text("{")

    with pytest.raises(CheckpointError, match=r"tune_metadata\.json is damaged"):
        counter.restore(folder)


def test_foreign_folder_is_the_state_of_an_untrained_model(tmp_path):
    (tmp_path / "total").write_text("40")
    counter = Counter()

    counter.restore(tmp_path)

    assert counter.train()["total"] == 41
    assert counter.iteration == 1


@pytest.mark.parity(6, 43)
def test_restoring_a_null_checkpoint_changes_nothing(tmp_path):
    counter = Counter()
    counter.restore(make_null_checkpoint(str(tmp_path)))

    assert counter.train()["total"] == 1


@pytest.mark.parity(131, 169)
def test_reset_makes_a_new_trial_of_the_same_object():
    counter = Counter({"by": 1})
    counter.train()

    assert not counter.reset({"refuse": True})
    assert counter.reset({"by": 5})
    assert counter.get_config() == {"by": 5}
    assert counter.train()["total"] == 5
    assert counter.get_state()["training_iteration"] == 1


def test_object_cannot_be_reset_by_default():
    assert Trainable().reset({}) is False


@pytest.mark.parity(169)
def test_undefined_method_is_named():
    class Empty(Trainable):
        pass

    empty = Empty()
    with pytest.raises(TrainableError, match=r"Empty does not define step"):
        empty.train()
    with pytest.raises(TrainableError, match="save_checkpoint"):
        empty.save()
    with pytest.raises(TrainableError, match="load_checkpoint"):
        empty.restore(empty.logdir)


def test_step_must_return_a_dict():
    class Scalar(Trainable):
        def step(self):
            return 0.5

    with pytest.raises(TrainableError, match=r"Scalar.step\(\) returned float; return a dict"):
        Scalar().train()


def test_unusable_metrics_of_a_step_are_rejected():
    class Odd(Trainable):
        def step(self):
            return {"m": {1, 2}}

    with pytest.raises(MetricError, match="'m' at step 1"):
        Odd().train()


@pytest.mark.parity(171)
def test_slow_setup_is_reported_with_advice_about_reuse(monkeypatch, caplog):
    times = iter([0.0, 11.0])
    monkeypatch.setattr(trainable_module.time, "monotonic", lambda: next(times))
    with caplog.at_level(logging.INFO):
        Counter()

    assert "reuse_actors=True" in caplog.text
    assert "11.0 s" in caplog.text


@pytest.mark.parity(171)
def test_advice_about_a_slow_setup_is_seen_without_logging_setup(monkeypatch, caplog):
    times = iter([0.0, 11.0])
    monkeypatch.setattr(trainable_module.time, "monotonic", lambda: next(times))
    Counter()

    (record,) = caplog.records
    assert record.levelno >= logging.WARNING


@pytest.mark.parity(169)
def test_stop_cleans_up_and_log_result_sees_each_result():
    seen = []

    class Watched(Counter):
        def cleanup(self):
            seen.append("cleanup")

        def log_result(self, result):
            seen.append(result["training_iteration"])

    watched = Watched()
    watched.train()
    watched.stop()

    assert seen == [1, "cleanup"]


@pytest.mark.parity(117, 169)
def test_export_formats_are_checked(tmp_path):
    class Exporting(Counter):
        def _export_model(self, export_formats, export_dir):
            return {name: os.path.join(export_dir, name) for name in export_formats}

    exporting = Exporting(logdir=str(tmp_path))

    assert exporting.export_model([" Model "]) == {"model": str(tmp_path / "model")}
    assert exporting.export_model("h5", "/x") == {"h5": "/x/h5"}
    with pytest.raises(TrainableError, match="'onnx' is not an export format"):
        exporting.export_model("onnx")
    assert Counter().export_model("model") == {}


@pytest.mark.parity(88)
def test_object_knows_its_trial(tmp_path):
    with active(World(tmp_path).session()):
        counter = Counter()

    assert (counter.trial_id, counter.trial_name) == ("t1", "train_00000")
    assert counter.trial_resources == {"cpu": 1.0}
    assert counter.logdir == str(tmp_path / "trial")


def test_object_outside_a_trial_has_a_separate_folder():
    counter = Counter()

    assert (counter.trial_id, counter.trial_name, counter.trial_resources) == (
        "default",
        "default",
        {},
    )
    assert os.path.isdir(counter.logdir)


@pytest.mark.parity(169)
def test_classes_may_request_resources_and_give_advice():
    assert Trainable.default_resource_request({}) is None
    assert Trainable.resource_help({}) == ""


def kw_only(config, *, checkpoint_dir=None): ...


def with_default(config, lr=0.1): ...


def anything(*args, **kwargs): ...


class Callable_:  # noqa: N801  an instance of it is the trainable
    def __call__(self, config): ...


@pytest.mark.parity(47, 49)
@pytest.mark.parametrize(
    "trainable",
    [
        Counter,
        kw_only,
        with_default,
        anything,
        Callable_(),
        lambda config: None,
        lambda config, reporter: None,
        functools.partial(lambda data, config: None, None),
        functools.partial(lambda config, data: None, data=None),
    ],
)
def test_valid_trainables_are_recognized(trainable):
    validate_trainable(trainable)


async def coroutine(config): ...


@pytest.mark.parity(47, 83)
@pytest.mark.parametrize(
    ("trainable", "words"),
    [
        (dict, "class dict is not a trainable.*tune.Trainable"),
        (Counter(), "object of Counter; give the class"),
        ("train", "str 'train'; give a function"),
        (None, "NoneType None"),
        (lambda: None, r"takes \(\).*f\(config\)"),
        (lambda config, data: None, r"takes \(config, data\).*with_parameters"),
        (lambda *, config: None, r"takes \(\*, config\)"),
        (coroutine, "coroutine function.*asyncio.run"),
        (max, "max"),
    ],
)
def test_other_values_are_not_trainables(trainable, words):
    with pytest.raises(TrainableError, match=f"(?s){words}"):
        validate_trainable(trainable)
