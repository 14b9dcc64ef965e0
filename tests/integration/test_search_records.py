"""Records and results of a search: folders, files, callbacks, return values."""

from __future__ import annotations

import json
import math
import re
import sys
from pathlib import Path

import numpy as np
import pytest

import tunemq as tune
from tests.support.searches.journals import ended_searches
from tests.support.searches.searches import fit, printed_by, results_of, table_of, tuner

__all__ = ["ended_searches"]

pytestmark = pytest.mark.integration


def falls(config):
    for step in range(1, 5):
        tune.report({"loss": config["a"] / step, "inner": {"step": step}})


@pytest.fixture
def results():
    space = {"a": tune.grid_search([4.0, 8.0])}
    return fit(falls, space, metric="loss", mode="min", name="falls")


AUTOMATIC = [
    *["done", "training_iteration", "timestamp", "date", "config"],
    *["time_this_iter_s", "time_total_s", "time_since_restore", "iterations_since_restore"],
    *["trial_id", "experiment_id", "experiment_tag", "pid", "hostname", "node_ip"],
]


# --- files ----------------------------------------------------------------------------------------


@pytest.mark.parity(90, 91, 174)
def test_the_folder_is_complete_and_its_names_are_short_and_safe(results, tmp_path):
    assert Path(results.experiment_path) == tmp_path / "tunemq_results" / "falls"
    for result in results:
        folder = Path(result.path)
        names = {path.name for path in folder.iterdir()}
        assert {"params.json", "result.json", "progress.csv", "stdout", "stderr"} <= names
        assert re.fullmatch(r"falls_\w{5}_\d{5}", folder.name)
        assert json.loads((folder / "params.json").read_text()) == result.config
        assert len(results_of(result)) == len(table_of(result)) == 4


@pytest.mark.parity(170)
def test_each_result_has_the_automatic_keys(results):
    line = results_of(results[0])[-1]

    assert set(AUTOMATIC) <= line.keys()
    assert line["done"] is False  # that it was the last became known after it was written
    assert results[0].metrics["done"] is True
    assert line["config"] == {"a": 4.0}
    assert line["time_total_s"] >= line["time_this_iter_s"] > 0


def test_nested_metrics_are_columns_with_a_slash(results):
    assert [row["inner/step"] for row in table_of(results[0])] == ["1", "2", "3", "4"]


def test_keys_that_appear_later_lose_nothing():
    def train(config):
        tune.report({"a": 1})
        tune.report({"a": 2, "late": {"b": "x,y"}})
        tune.report({"late": {"c": None}, "a": 3})

    (result,) = fit(train)
    rows = table_of(result)

    assert [row["a"] for row in rows] == ["1", "2", "3"]
    assert [row["late/b"] for row in rows] == ["", "x,y", ""]
    assert [line.get("late") for line in results_of(result)] == [None, {"b": "x,y"}, {"c": None}]


def test_a_failed_trial_has_its_error_in_a_file():
    def train(config):
        raise ValueError("no luck")

    (result,) = fit(train)

    assert "ValueError: no luck" in Path(result.path, "error.txt").read_text()


@pytest.mark.parity(171)
def test_output_of_a_trial_and_its_children_is_in_its_folder():
    def train(config):
        import subprocess

        print("out of the trial", config["a"])
        print("err of the trial", file=sys.stderr)
        subprocess.run(["sh", "-c", "echo out of a child; echo err of a child >&2"], check=True)
        tune.report({"x": 1})

    results = fit(train, {"a": tune.grid_search([1, 2])})

    for result in results:
        out, err = printed_by(result), printed_by(result, "stderr")
        assert f"out of the trial {result.config['a']}\n" in out
        assert "out of a child\n" in out
        assert "err of the trial\n" in err
        assert "err of a child\n" in err


def test_numpy_scalars_are_numbers():
    def train(config):
        tune.report(
            {
                "f32": np.float32(0.5),
                "i64": np.int64(7),
                "flag": np.bool_(True),
                "zero_d": np.array(2.5),
                "inner": {"f64": np.float64(0.25)},
                "listed": [np.int8(1)],
            }
        )

    (result,) = fit(train, metric="f32", mode="min")
    metrics = result.metrics

    assert (metrics["f32"], metrics["i64"], metrics["flag"]) == (0.5, 7, True)
    assert (metrics["zero_d"], metrics["inner"], metrics["listed"]) == (2.5, {"f64": 0.25}, [1])
    assert results_of(result)[0]["i64"] == 7


def test_second_search_of_the_same_name_gets_another_folder():
    first = fit(falls, {"a": 1.0}, name="twice")
    second = fit(falls, {"a": 1.0}, name="twice")

    assert Path(first.experiment_path).name == "twice"
    assert Path(second.experiment_path).name == "twice_2"
    assert len(results_of(first[0])) == 4


def test_a_storage_path_is_used(tmp_path):
    found = fit(falls, {"a": 1.0}, storage_path=str(tmp_path / "else" / "where"), name="here")

    assert Path(found.experiment_path) == tmp_path / "else" / "where" / "here"


# --- callbacks ------------------------------------------------------------------------------------


class Follows(tune.Callback):
    def __init__(self):
        self.calls = []

    def setup(self, stop=None, num_samples=None, total_num_samples=None, **info):
        self.calls.append(("setup", stop, total_num_samples))

    def on_trial_start(self, iteration, trials, trial, **info):
        self.calls.append(("start", trial.config["a"]))

    def on_trial_result(self, iteration, trials, trial, result, **info):
        self.calls.append(("result", trial.config["a"], result["training_iteration"]))

    def on_checkpoint(self, iteration, trials, trial, checkpoint, **info):
        self.calls.append(("checkpoint", trial.config["a"]))

    def on_trial_complete(self, iteration, trials, trial, **info):
        self.calls.append(("complete", trial.config["a"], trial.last_result["loss"]))

    def on_trial_error(self, iteration, trials, trial, **info):
        self.calls.append(("error", trial.config["a"]))

    def on_experiment_end(self, trials, **info):
        self.calls.append(("end",))


def test_callbacks_are_called_for_everything_in_order():
    follows = Follows()
    fit(
        falls,
        {"a": tune.grid_search([1.0, 2.0])},
        callbacks=[follows],
        stop={"training_iteration": 2},
        max_concurrent_trials=1,
    )

    assert follows.calls == [
        ("setup", {"training_iteration": 2}, 2),
        ("start", 1.0),
        ("result", 1.0, 1),
        ("result", 1.0, 2),
        ("complete", 1.0, 0.5),
        ("start", 2.0),
        ("result", 2.0, 1),
        ("result", 2.0, 2),
        ("complete", 2.0, 1.0),
        ("end",),
    ]


def test_a_callback_sees_a_retried_trials_results_once(tmp_path):
    def train(config):
        for step in range(1, 4):
            if step == 3 and not (tmp_path / "failed").exists():
                (tmp_path / "failed").touch()
                raise ValueError("once")
            tune.report({"loss": step})

    follows = Follows()
    fit(train, {"a": 1}, callbacks=[follows], max_failures=1)

    told = [call[2] for call in follows.calls if call[0] == "result"]
    assert told == [1, 2, 3]
    assert [call[0] for call in follows.calls].count("start") == 2


# --- answers --------------------------------------------------------------------------------------


def test_result_grid_answers_common_questions(results):
    best = results.get_best_result()

    assert best.config == {"a": 4.0}
    assert best.metrics["loss"] == 1.0
    assert results.get_best_result(mode="max").config == {"a": 8.0}
    assert results.get_best_result("loss", "max", scope="all").metrics["trial_id"]
    assert len(results) == results.num_terminated == 2
    assert results.num_errors == 0
    assert results.errors == []
    assert [result.config["a"] for result in results] == [4.0, 8.0]
    assert "2 TERMINATED" in repr(results)


def test_a_results_history_is_a_table(results):
    history = results[0].metrics_dataframe

    assert list(history["loss"]) == [4.0, 2.0, 4.0 / 3, 1.0]
    assert list(history["training_iteration"]) == [1, 2, 3, 4]


def test_the_results_are_a_table_with_a_row_for_each_trial(results):
    table = results.get_dataframe()

    assert list(table["config/a"]) == [4.0, 8.0]
    assert list(table["loss"]) == [1.0, 2.0]


def test_a_result_can_be_read_from_its_folder_later(results):
    again = tune.Result.from_path(results[1].path)

    assert again.config == {"a": 8.0}
    assert again.metrics["loss"] == 2.0


def test_get_results_equals_the_result_of_fit():
    search = tuner(falls, {"a": 1.0})

    assert search.fit() is search.get_results()


def test_nonfinite_values_rank_worst_where_that_is_asked_for():
    results = fit(
        lambda config: {"loss": config["loss"]},
        {"loss": tune.grid_search([math.nan, 2.0, math.inf, 1.0])},
        metric="loss",
        mode="min",
        nonfinite="worst",
    )

    assert results.num_errors == 0
    assert results.get_best_result().config == {"loss": 1.0}
