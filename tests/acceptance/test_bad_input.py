"""Bad input is an error that names the field, the value and the fix, as early as can be."""

from __future__ import annotations

import math
import os
import threading

import numpy as np
import pytest

import tunemq as tune
from tests.support.searches.searches import farm_processes, fit
from tunemq.schedulers import ASHAScheduler, TrialScheduler
from tunemq.search import ConcurrencyLimiter, Searcher
from tunemq.stopper import CombinedStopper, Stopper
from tunemq_scheduler.base.experiment_plan import ExperimentPlan
from tunemq_scheduler.embedded import warm_farms
from tunemq_scheduler.transport.celery_executor import CeleryTrialExecutor
from tunemq_shared.base.errors import RedisUnavailable
from tunemq_shared.protocol.messages import BlobRef, Environment

pytestmark = pytest.mark.integration


@pytest.fixture
def nothing_started():
    """No process of a farm is there, neither before nor after the test."""
    warm_farms.stop_all()
    yield
    assert [process.name() for process in farm_processes()] == []


def trains(config):
    tune.report({"loss": 1.0})


def rejected(*words, of=ValueError):
    """The error is one of ours, is short, and holds all the words."""
    pattern = "".join(f"(?=.*{word})" for word in words)
    return pytest.raises(of, match=f"(?s){pattern}")


# --- refused before anything starts ---------------------------------------------------------------


@pytest.mark.usefixtures("nothing_started")
class TestRejectedBeforeTheStart:
    def test_unknown_mode_is_refused(self):
        with rejected("mode", "'best'", "'min'", "'max'"):
            fit(trains, metric="loss", mode="best")

    def test_mode_without_a_metric_is_refused(self):
        with rejected("metric", "mode='min'"):
            fit(trains, mode="min")

    def test_metric_that_is_no_name_is_refused(self):
        with rejected("metric", "3"):
            fit(trains, metric=3, mode="min")

    def test_scheduler_without_a_metric_is_refused(self):
        with rejected("metric", "HyperBandScheduler", "TuneConfig"):
            fit(trains, scheduler=ASHAScheduler())

    @pytest.mark.parametrize(("field", "name"), [("scheduler", "ashha"), ("search_alg", "optona")])
    def test_unknown_algorithm_is_refused(self, field, name):
        with rejected(name):
            fit(trains, metric="loss", mode="min", **{field: name})

    @pytest.mark.parity(47)
    @pytest.mark.parametrize(
        "function",
        [lambda: None, lambda config, data: None, lambda a, b, c: None],
        ids=["none", "two", "three"],
    )
    def test_function_with_wrong_arguments_is_refused(self, function):
        with rejected("lambda", "takes", r"f\(config\)", "with_parameters"):
            fit(function)

    def test_coroutine_function_is_refused(self):
        async def train(config):
            pass

        with rejected("train", "coroutine", "asyncio.run"):
            fit(train)

    @pytest.mark.parametrize(
        ("what", "word"), [(None, "None"), ("PPO", "'PPO'"), (int, "int"), (7, "7")]
    )
    def test_object_that_is_no_trainable_is_refused(self, what, word):
        with rejected(word):
            fit(what)

    @pytest.mark.parametrize(
        "make",
        [
            lambda: tune.uniform(2, 1),
            lambda: tune.loguniform(0, 1),
            lambda: tune.randint(5, 5),
            lambda: tune.quniform(0, 1, -0.5),
            lambda: tune.choice([]),
            lambda: tune.uniform("a", 1),
            lambda: tune.uniform(0, math.nan),
        ],
    )
    def test_bad_range_is_refused(self, make):
        with rejected(r"\("):
            fit(trains, {"lr": make()})

    def test_empty_grid_is_refused(self):
        with rejected("grid_search"):
            fit(trains, {"lr": tune.grid_search([])})

    def test_bad_range_error_names_parameter_values_and_fix(self):
        with rejected("uniform", "2", "1"):
            tune.uniform(2, 1)

    @pytest.mark.parametrize("value", [0, -2, 1.5, "3", True])
    def test_bad_number_of_samples_is_refused(self, value):
        with rejected("num_samples", repr(value), "whole number from 1", "-1"):
            fit(trains, num_samples=value)

    def test_space_that_is_no_dict_is_refused(self):
        with rejected("param_space", "dict"):
            fit(trains, [1, 2])

    def test_nested_stop_criteria_are_refused(self):
        with rejected("stop", "info", "info/loss"):
            fit(trains, stop={"info": {"loss": 3}})

    @pytest.mark.parametrize(
        "request_", [{"cpu": -1}, {"cpu": "two"}, {"gpu": 1.5}, {}, {"cpu": math.nan}]
    )
    def test_invalid_resources_are_refused(self, request_):
        with rejected("resources"):
            fit(tune.with_resources(trains, request_))

    def test_class_option_for_a_function_is_refused(self):
        with rejected("checkpoint_frequency", "2", "report"):
            fit(trains, checkpoint_frequency=2)

    def test_with_parameters_name_that_the_function_lacks_is_refused(self):
        with rejected("data", "trains"):
            fit(tune.with_parameters(trains, data=1))

    def test_results_folder_that_cannot_be_made_is_refused(self, tmp_path):
        (tmp_path / "file").write_text("in the way")
        with rejected(str(tmp_path / "file"), "storage_path", "TUNEMQ_RESULTS"):
            fit(trains, storage_path=str(tmp_path / "file" / "results"))

    @pytest.mark.skipif(os.getuid() == 0, reason="root may write everywhere")
    def test_results_folder_without_write_permission_is_refused(self, tmp_path):
        tmp_path.chmod(0o500)
        with rejected(str(tmp_path), "storage_path", "ermission"):
            fit(trains, storage_path=str(tmp_path))

    def test_results_folder_on_a_read_only_file_system_is_refused(self):
        with rejected("/proc", "storage_path"):
            fit(trains, storage_path="/proc/tunemq")

    @pytest.mark.parametrize(
        ("state", "place"),
        [
            (
                {"seen": {"best": [1.0, np.float32(2.0)]}},
                r"\['seen'\]\['best'\]\[1\], .*numpy.float32",
            ),
            ({"model": math.sqrt}, r"\['model'\], of the type builtin_function_or_method"),
            ({"seen": {(1, 2): 3}}, r"\['seen'\] has the key \(1, 2\) of the type tuple"),
            ({1, 2}, ", of the type set"),
        ],
    )
    def test_f25_algorithm_state_that_no_journal_can_hold_is_an_error(self, state, place):
        class Guesser(Searcher):
            def suggest(self, trial_id):
                return {}

            def on_trial_complete(self, trial_id, result=None, error=False):
                pass

            def get_state(self):
                return state

        class Patient(TrialScheduler):
            def get_state(self):
                return state

        class Never(Stopper):
            def __call__(self, trial_id, result):
                return False

            def stop_all(self):
                return False

            def get_state(self):
                return state

        with rejected(rf"Guesser.get_state\(\){place}", "not a JSON value", "None for no state"):
            fit(trains, search_alg=ConcurrencyLimiter(Guesser("loss", "min"), 2))
        with rejected(rf"Patient.get_state\(\){place}"):
            fit(trains, scheduler=Patient())
        with rejected(rf"Never.get_state\(\){place}"):
            fit(trains, stop=CombinedStopper(Never(), Never()))

    def test_unpicklable_trainable_is_refused(self):
        lock = threading.Lock()

        def train(config):
            with lock:
                pass

        with rejected("train", "'lock'", "inside the function"):
            fit(train)

    def test_unpicklable_class_attribute_is_refused(self):
        class Model(tune.Trainable):
            lock = threading.Lock()

            def step(self):
                return {"done": True}

        with rejected("Model", "'lock'", r"setup\(\)"):
            fit(Model)


def test_unpicklable_parameter_is_refused_with_its_place():
    def train(config, data):
        pass

    with rejected("'data'", "lock"):
        fit(tune.with_parameters(train, data=[threading.Lock()]))


# --- at the report --------------------------------------------------------------------------------


def error_of(trainable, **options):
    (result,) = fit(trainable, **options)
    assert result.status == "ERROR"
    return str(result.error)


def test_f25_metric_that_no_trial_reports_is_an_error():
    error = error_of(trains, metric="los", mode="min")

    assert "'los' is missing from the result of step 1" in error
    assert "'loss'" in error
    assert "TuneConfig" in error


def test_f25_metric_that_a_later_result_lacks_is_an_error():
    def train(config):
        tune.report({"loss": 1.0})
        tune.report({"accuracy": 1.0})

    assert "'loss' is missing from the result of step 2" in error_of(
        train, metric="loss", mode="min"
    )


def test_function_without_reports_but_with_a_metric_ends_in_error():
    error = error_of(lambda config: None, metric="loss", mode="min")

    assert "without a result" in error
    assert "'loss'" in error


def test_configuration_that_is_too_large_is_an_error():
    with rejected(r"Trial \w+_00000 .* 5,242,\d+ bytes", "1,048,576", "tune.with_parameters"):
        fit(trains, {"data": "y" * (5 * 2**20)}, metric="loss", mode="min")


@pytest.mark.parametrize("value", [math.nan, math.inf, -math.inf])
def test_f25_metric_that_is_not_finite_is_an_error(value):
    error = error_of(lambda config: {"loss": value}, metric="loss", mode="min")

    assert f"'loss' is {value} at step 1" in error
    assert "nonfinite='worst'" in error


@pytest.mark.parametrize("value", ["low", None, [1.0]])
def test_f25_metric_that_is_no_number_is_an_error(value):
    error = error_of(lambda config: {"loss": value}, metric="loss", mode="min")

    assert f"'loss' is {value!r}" in error
    assert "report a number" in error


@pytest.mark.parametrize("value", [np.zeros(3), np.ones((2, 2))], ids=["1d", "2d"])
def test_array_as_a_metric_ends_the_trial_in_error(value):
    def train(config):
        tune.report({"loss": value})

    error = error_of(train)

    assert "'loss' at step 1 is numpy.ndarray of shape" in error
    assert ".item()" in error


def test_tensor_as_a_metric_ends_the_trial_in_error():
    class Tensor:  # what torch's looks like to a stranger
        shape = (4,)

        def item(self):
            raise ValueError("only one element tensors can be converted")

    def train(config):
        tune.report({"loss": Tensor()})

    assert "of shape (4,), not a number" in error_of(train)


def test_object_as_a_metric_ends_the_trial_in_error():
    def train(config):
        tune.report({"when": object()})

    assert "'when' at step 1 is object" in error_of(train)


def test_step_that_returns_no_dict_ends_in_error():
    class Model(tune.Trainable):
        def step(self):
            return 3

    assert "Model.step() returned int" in error_of(Model)


# --- when nodes are known -------------------------------------------------------------------------


@pytest.mark.parity(58)
@pytest.mark.parametrize(("name", "amount"), [("cpu", 999), ("gpu", 64), ("licence", 1)])
def test_resources_that_no_node_has_are_an_error(name, amount):
    most = r"\d+" if name == "cpu" else "[0-9]"
    with rejected(f"{name}={amount}", f"most on any node is {most}", "with_resources"):
        fit(tune.with_resources(trains, {name: amount}), time_budget_s=100)


def test_resources_that_no_node_has_for_one_configuration_are_an_error():
    trainable = tune.with_resources(trains, lambda config: {"cpu": config["cpus"]})
    with rejected("cpu=999", "most on any node"):
        fit(trainable, {"cpus": tune.grid_search([1, 999])}, time_budget_s=100)


@pytest.mark.parametrize("url", ["redis://127.0.0.1:9/0", "unix:///nowhere/redis.sock"])
def test_a_redis_that_cannot_be_reached_says_where_and_for_how_long(url, tmp_path):
    executor = CeleryTrialExecutor(url, term=1, connect_within=0.3)
    plan = ExperimentPlan(
        experiment="e",
        experiment_id="e",
        events_key="tunemq:events:e",
        folder=str(tmp_path),
        trainable_name="trains",
        code=BlobRef("", 0, ""),
        environment=Environment("", (), {}, ()),
    )
    try:
        with rejected(
            url.partition("://")[2].split("/0")[0], r"Tried for \d+\.\d s", of=RedisUnavailable
        ):
            executor.open(plan)
    finally:
        executor.close()
