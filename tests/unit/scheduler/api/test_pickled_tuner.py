"""Pickling a whole Tuner, and errors that name the part that cannot be pickled."""

from __future__ import annotations

import threading

import msgspec
import pytest

import tunemq as tune
from tunemq_scheduler.api.pickled_tuner import load_tuner_parts, pickle_tuner_parts
from tunemq_shared.base.errors import ConfigError, TrainableError
from tunemq_shared.trainable.attached import attached_to
from tunemq_shared.trainable.resources import resources_of


def pickled(trainable, space=None, tune_config=None, run_config=None):
    return pickle_tuner_parts(
        trainable, space, tune_config or tune.TuneConfig(), run_config or tune.RunConfig()
    )


def test_tuner_pickled_and_loaded_is_unchanged():
    def train(config, data):
        return {"loss": config["x"] + len(data)}

    wrapped = tune.with_resources(tune.with_parameters(train, data=[1, 2]), {"gpu": 0.5})
    loaded = load_tuner_parts(
        pickled(
            wrapped,
            {"x": tune.uniform(0, 1)},
            tune.TuneConfig(metric="loss", mode="min", num_samples=4),
            tune.RunConfig(name="exp"),
        )
    )

    assert loaded.trainable({"x": 1}) == {"loss": 3}
    assert resources_of(loaded.trainable, {})["gpu"] == 0.5
    assert attached_to(loaded.trainable).parameters.objects == {"data": [1, 2]}
    assert (loaded.tune.num_samples, loaded.run.name) == (4, "exp")
    assert list(loaded.param_space) == ["x"]


def test_tuner_with_an_unpicklable_part_names_it():
    lock = threading.Lock()

    def train(config):
        return lock

    with pytest.raises(TrainableError, match="lock"):
        pickled(train)
    with pytest.raises(ConfigError, match="param_space"):
        pickled(print, {"x": lock})


def test_pickle_of_another_python_version_is_rejected_with_both_versions():
    data = msgspec.msgpack.decode(pickled(print))
    with pytest.raises(ConfigError, match=r"python 2\.7, and this farm's scheduler has python 3"):
        load_tuner_parts(msgspec.msgpack.encode({**data, "python": "2.7"}))
    with pytest.raises(ConfigError, match="cannot be read"):
        load_tuner_parts(b"garbage")
