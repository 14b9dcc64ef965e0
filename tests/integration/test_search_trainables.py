"""Trainables of every form, from the script through a node to the results and back."""

from __future__ import annotations

import os
import threading
import time
from pathlib import Path

import pytest

import tunemq as tune
from tests.support.searches.journals import ended_searches
from tests.support.searches.searches import fit, printed_by, results_of
from tests.support.waiting import eventually
from tunemq.trainable import wrap_function

__all__ = ["ended_searches"]

pytestmark = pytest.mark.integration


def reports(config):
    for step in range(1, 4):
        tune.report({"loss": config["a"] / step})


def reports_by_keywords(config):
    for step in range(1, 4):
        tune.report(loss=config["a"] / step)


def takes_a_checkpoint_dir(config, checkpoint_dir=None):
    assert checkpoint_dir is None
    reports(config)


def takes_a_reporter(config, reporter):
    for step in range(1, 4):
        reporter(loss=config["a"] / step)


def yields(config):
    for step in range(1, 4):
        yield {"loss": config["a"] / step}


class Callable:
    def __call__(self, config):
        reports(config)


FORMS = [
    reports,
    reports_by_keywords,
    takes_a_checkpoint_dir,
    takes_a_reporter,
    yields,
    Callable().__call__,
    wrap_function(reports),
]


@pytest.mark.parity(14, 17, 32, 47, 49, 50, 51)
@pytest.mark.parametrize("form", FORMS, ids=lambda form: getattr(form, "__name__", "callable"))
def test_a_function_of_each_form_reports_three_results(form):
    results = fit(form, {"a": tune.grid_search([3.0, 6.0])}, metric="loss", mode="min")

    assert [result.metrics["loss"] for result in results] == [1.0, 2.0]
    for result in results:
        lines = results_of(result)
        assert [line["training_iteration"] for line in lines] == [1, 2, 3]
        assert result.metrics["done"]
    assert results.get_best_result().config == {"a": 3.0}


def reports_from_threads(config):
    def report(name):
        for step in range(20):
            tune.report({"thread": name, "count": step})

    threads = [threading.Thread(target=report, args=(name,)) for name in range(config["threads"])]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    tune.report({"thread": -1, "count": 0})


def test_threads_of_a_trial_may_report_concurrently():
    (result,) = fit(reports_from_threads, {"threads": 3})

    lines = results_of(result)
    assert [line["training_iteration"] for line in lines] == list(range(1, 62))
    for name in range(3):
        assert [line["count"] for line in lines if line["thread"] == name] == list(range(20))


def leaves_a_thread_that_reports(config):
    def report():
        while True:
            tune.report({"count": 1})

    threading.Thread(target=report, daemon=True).start()
    time.sleep(0.5)


def test_thread_that_reports_after_its_trial_ended_does_no_harm():
    (result,) = fit(leaves_a_thread_that_reports, {})

    lines = results_of(result)
    assert [line["training_iteration"] for line in lines] == list(range(1, len(lines) + 1))
    assert lines


def test_a_dict_that_is_returned_is_the_last_result():
    (result,) = fit(lambda config: {"loss": config["a"]}, {"a": 5})

    assert [line["loss"] for line in results_of(result)] == [5]


def test_a_number_that_is_returned_is_the_last_result():
    (result,) = fit(lambda config: config["a"] * 2.0, {"a": 5})

    assert [line["_metric"] for line in results_of(result)] == [10.0]


def test_numbers_that_are_yielded_are_results():
    def train(config):
        yield 1
        yield 2.5

    (result,) = fit(train)

    assert [line["_metric"] for line in results_of(result)] == [1, 2.5]


@pytest.mark.parity(30)
def test_function_without_reports_and_without_metric_terminates():
    (result,) = fit(lambda config: None)

    assert (result.status, result.metrics, result.error) == ("TERMINATED", {}, None)


class Counts(tune.Trainable):
    """Writes each call that it gets to its standard output."""

    def setup(self, config):
        print("setup", config["a"], os.getpid(), flush=True)
        self.value = 0

    def step(self):
        self.value += self.config["a"]
        return {"value": self.value}

    def save_checkpoint(self, checkpoint_dir):
        Path(checkpoint_dir, "value").write_text(str(self.value))

    def load_checkpoint(self, checkpoint):
        print("load", flush=True)
        self.value = int(Path(checkpoint, "value").read_text())

    def reset_config(self, new_config):
        print("reset", new_config["a"], os.getpid(), flush=True)
        self.value = 0
        return True

    def cleanup(self):
        print("cleanup", self.value, flush=True)


@pytest.mark.parity(169, 170)
def test_a_class_is_set_up_stepped_to_its_criterion_and_cleaned_up():
    (result,) = fit(Counts, {"a": 2}, stop={"training_iteration": 3})

    assert [line["value"] for line in results_of(result)] == [2, 4, 6]
    setup, cleanup = printed_by(result).splitlines()
    assert setup.startswith("setup 2 ")
    assert cleanup == "cleanup 6"


@pytest.fixture
def one_slot(monkeypatch):
    """With one slot, a trial waits for the process before it and reuses that process."""
    monkeypatch.setenv("TUNEMQ_CPUS", "1")


@pytest.mark.parity(131)
@pytest.mark.usefixtures("one_slot")
def test_reuse_actors_resets_the_object_and_shares_the_process():
    results = fit(
        Counts,
        {"a": tune.grid_search([1, 2, 3])},
        stop={"training_iteration": 2},
        reuse_actors=True,
        max_concurrent_trials=1,
    )

    assert [result.metrics["value"] for result in results] == [2, 4, 6]
    assert len({result.metrics["pid"] for result in results}) == 1
    assert [printed_by(result).split()[0] for result in results] == ["setup", "reset", "reset"]


def test_without_reuse_each_trial_gets_a_new_process():
    results = fit(Counts, {"a": tune.grid_search([1, 2, 3])}, stop={"training_iteration": 1})

    assert len({result.metrics["pid"] for result in results}) == 3


class RejectsReset(Counts):
    def reset_config(self, new_config):
        return False


@pytest.mark.usefixtures("one_slot")
def test_an_object_that_cannot_be_reset_is_cleaned_up_and_replaced():
    results = fit(
        RejectsReset,
        {"a": tune.grid_search([1, 2])},
        stop={"training_iteration": 1},
        reuse_actors=True,
        max_concurrent_trials=1,
    )

    assert [result.metrics["value"] for result in results] == [1, 2]
    replaced = ["cleanup", "setup", "cleanup"]
    eventually(
        lambda: [line.split()[0] for line in printed_by(results[1]).splitlines()] == replaced,
        message=lambda: printed_by(results[1]),
    )


@pytest.mark.parity(26)
def test_a_trial_knows_its_names_its_folder_and_its_resources():
    def train(config):
        context = tune.get_context()
        tune.report(
            {
                "experiment": context.get_experiment_name(),
                "id": context.get_trial_id(),
                "name": context.get_trial_name(),
                "folder": context.get_trial_dir(),
                "cwd": os.getcwd(),
                "resources": context.get_trial_resources(),
            }
        )

    results = fit(train, name="known")
    (result,) = results

    said = result.metrics
    assert said["experiment"] == "known"
    assert said["id"] == result.trial_id
    assert said["name"] == result.trial_name
    assert said["folder"] == said["cwd"] == result.path
    assert Path(result.path).parent == Path(results.experiment_path)
    assert said["resources"] == {"cpu": 1.0}


@pytest.mark.parity(18)
def test_a_stopped_function_unwinds_its_finally_blocks_and_its_process_is_gone(tmp_path):
    said = tmp_path / "said"

    def train(config):
        try:
            while True:
                tune.report({"x": 1})
        except Exception:  # noqa: BLE001  must not catch the stop
            said.write_text("caught")
        finally:
            with said.open("a") as file:
                file.write("unwound")

    (result,) = fit(train, stop=lambda trial_id, result: result["training_iteration"] >= 3)

    assert said.read_text() == "unwound"
    assert result.metrics["training_iteration"] == 3
    eventually(lambda: not os.path.exists(f"/proc/{result.metrics['pid']}"))


@pytest.mark.parity(25)
@pytest.mark.parametrize(("code", "status"), [(0, "TERMINATED"), (3, "ERROR")])
def test_function_that_calls_sys_exit_ends_its_trial(code, status):
    def train(config):
        tune.report({"x": 1})
        raise SystemExit(code)

    (result,) = fit(train)

    assert result.status == status


def test_a_trial_may_use_a_pool_of_processes():
    def train(config):
        import multiprocessing

        with multiprocessing.get_context("fork").Pool(2) as pool:
            tune.report({"total": sum(pool.map(abs, [-1, -2, -3]))})

    (result,) = fit(train)

    assert result.error is None
    assert result.metrics["total"] == 6
