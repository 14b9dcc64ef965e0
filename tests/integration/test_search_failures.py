"""Failing trials, searchers and callbacks: messages, saved files, and what continues."""

from __future__ import annotations

import json
import os
from pathlib import Path

import pytest

import tunemq as tune
from tests.support.searches.journals import ended_searches
from tests.support.searches.searches import fit, results_of, tuner
from tunemq.search import Searcher

__all__ = ["ended_searches"]

pytestmark = pytest.mark.integration


def fails_at_one(config):
    tune.report({"x": config["a"]})
    if config["a"] == 1:
        raise ValueError("a is one")
    tune.report({"x": config["a"] + 10})


@pytest.mark.parity(24, 30, 72, 94)
def test_one_failing_trial_leaves_the_others_alone():
    results = fit(fails_at_one, {"a": tune.grid_search([0, 1, 2])}, metric="x", mode="max")

    assert [result.status for result in results] == ["TERMINATED", "ERROR", "TERMINATED"]
    assert (results.num_errors, results.num_terminated) == (1, 2)
    failed = results[1]
    assert "ValueError: a is one" in str(failed.error)
    assert "in fails_at_one" in str(failed.error)
    written = Path(failed.path, "error.txt").read_text()
    assert written.startswith("Failure # 1 (occurred at ")
    assert 'raise ValueError("a is one")' in written
    assert failed.metrics["x"] == 1
    assert not Path(results[0].path, "error.txt").exists()
    assert results.get_best_result().config == {"a": 2}


@pytest.mark.parity(31)
def test_results_come_before_the_error_that_follows_them():
    def train(config):
        for step in range(50):
            tune.report({"step": step})
        raise ValueError("after fifty")

    (result,) = fit(train)

    assert [line["step"] for line in results_of(result)] == list(range(50))
    assert result.status == "ERROR"


@pytest.mark.parity(94, 95)
def test_max_failures_counts_and_error_txt_holds_each_failure():
    def train(config):
        tune.report({"x": 1})
        raise ValueError("always")

    (result,) = fit(train, max_failures=2)

    assert result.status == "ERROR"
    written = Path(result.path, "error.txt").read_text()
    assert [f"Failure # {n} " in written for n in (1, 2, 3, 4)] == [True, True, True, False]
    assert len(results_of(result)) == 1


def test_stop_criterion_that_only_a_repeated_step_meets_ends_no_trial(tmp_path):
    died = tmp_path / "died"

    def train(config):
        again = died.exists()
        for step in range(1, 9):
            repeated = 0.85 if again and step <= 5 else 0.7
            tune.report({"acc": 0.8 if step == 8 else repeated})
            if step == 5 and not again:
                died.touch()
                os._exit(1)

    (result,) = fit(train, stop={"acc": 0.8}, max_failures=1)

    assert result.status == "TERMINATED"
    assert [line["acc"] for line in results_of(result)] == [0.7] * 7 + [0.8]


def hangs_with_a_child(config):
    """Hang as a trial does whose DataLoader waits for a worker."""
    import multiprocessing
    import time

    def waits_in_a_child():
        time.sleep(600)

    child = multiprocessing.get_context("fork").Process(target=waits_in_a_child)
    child.start()
    child.join()


def raises(config):
    raise ValueError("no luck")


def exits(config):
    os._exit(3)


DEEDS = [raises, exits, hangs_with_a_child]


def test_error_txt_ends_with_the_last_lines_of_output_and_of_a_hang_with_the_stacks():
    def train(config):
        print("\n".join(f"line {n}" for n in range(100)))
        os.write(2, b"\x1b[31mwarned\xff\n 10%\r100%\n")
        tune.report({"x": 1})
        DEEDS[config["n"]](config)

    limits = tune.TrialLimits(stall_s=4)
    results = fit(train, {"n": tune.grid_search([0, 1, 2])}, trial_limits=limits)

    written = [Path(result.path, "error.txt").read_text() for result in results]
    assert "ValueError: no luck" in written[0]
    assert "exited by itself with code 3" in written[1]
    for text in written:
        shown = "\n".join(f"line {n}" for n in range(80, 100))
        assert f"\nThe last lines of stdout:\n{shown}\n" in text
        assert "\nThe last lines of stderr:\n\ufffd[31mwarned\ufffd\n100%\n" in text
    assert "has not reported for" in written[2]
    stacks = written[2].partition("What its threads were doing:\n")[2]
    assert "in hangs_with_a_child\n" in stacks
    assert "in waits_in_a_child\n" in stacks


def test_a_trial_that_is_killed_names_the_signal():
    def train(config):
        tune.report({"x": 1})
        os.kill(os.getpid(), 11)

    (result,) = fit(train)

    assert result.status == "ERROR"
    assert "SIGSEGV" in str(result.error)


def waits_unless_it_fails(config):
    if config["a"] == 0:
        raise ValueError("the first one fails")
    while True:
        tune.report({"x": 1})


def test_with_fail_fast_the_first_error_ends_the_search():
    results = fit(
        waits_unless_it_fails,
        {"a": tune.grid_search([1, 0, 1, 1])},
        fail_fast=True,
        max_concurrent_trials=2,  # on any number of cores
    )

    assert [result.status for result in results][:2] == ["TERMINATED", "ERROR"]
    assert len(results) < 4


def test_fail_fast_raise_makes_fit_raise_the_error_of_the_trial():
    with pytest.raises(tune.TuneError, match="ValueError: the first one fails") as caught:
        fit(waits_unless_it_fails, {"a": tune.grid_search([1, 0])}, fail_fast="raise")

    assert "in waits_unless_it_fails" in str(caught.value)


class Broken(Searcher):
    """Suggests two configurations, and then raises."""

    def __init__(self):
        super().__init__()
        self.asked = 0

    def suggest(self, trial_id):
        self.asked += 1
        if self.asked > 2:
            raise LookupError("nothing left to try")
        return {"a": self.asked}

    def on_trial_complete(self, trial_id, result=None, error=False):
        pass


def test_a_searcher_that_raises_ends_the_search_with_its_traceback_and_trials_are_saved(tmp_path):
    with pytest.raises(tune.TuneError, match="LookupError: nothing left to try") as caught:
        fit(
            lambda config: {"loss": config["a"]},
            search_alg=Broken(),
            num_samples=5,
            max_concurrent_trials=1,
            metric="loss",
            mode="min",
            storage_path=str(tmp_path),
            name="broken",
        )

    assert type(caught.value).__name__ == "SearchFailed"
    assert "in suggest" in str(caught.value)
    saved = sorted(tmp_path.glob("broken/*/result.json"))
    assert [json.loads(one.read_text())["loss"] for one in saved] == [1, 2]


class ForgetsTrials(Broken):
    """A searcher that raises when it gets a trial's outcome."""

    def on_trial_complete(self, trial_id, result=None, error=False):
        raise LookupError(f"no trial {trial_id}")


def test_results_reported_before_a_searcher_raised_are_saved(tmp_path):
    def train(config):
        for step in range(9):
            tune.report({"loss": step})

    with pytest.raises(tune.TuneError, match="LookupError: no trial"):
        fit(
            train,
            search_alg=ForgetsTrials(),
            stop={"training_iteration": 5},
            storage_path=str(tmp_path),
            name="forgets",
        )

    (saved,) = tmp_path.glob("forgets/*/result.json")
    assert [json.loads(line)["loss"] for line in saved.read_text().splitlines()] == [0, 1, 2, 3, 4]


class Raises(tune.Callback):
    def __init__(self, hook):
        self.hook = hook

    def on_trial_start(self, **info):
        self.called("on_trial_start")

    def on_trial_result(self, iteration, trials, trial, result, **info):
        self.called("on_trial_result")

    def on_trial_complete(self, **info):
        self.called("on_trial_complete")

    def on_experiment_end(self, trials, **info):
        self.called("on_experiment_end")

    def setup(self, **info):
        self.called("setup")

    def called(self, hook):
        if hook == self.hook:
            raise OSError("no space for plots")


@pytest.mark.parametrize(
    "hook",
    ["setup", "on_trial_start", "on_trial_result", "on_trial_complete", "on_experiment_end"],
)
def test_a_callback_that_raises_ends_the_search_and_says_where(hook):
    with pytest.raises(tune.TuneError, match=f"Raises.{hook} raised OSError: no space for plots"):
        fit(lambda config: {"x": 1}, callbacks=[Raises(hook)])


def test_a_stopper_that_raises_ends_the_search_with_its_traceback():
    def stop(trial_id, result):
        return result["typo"] > 1

    with pytest.raises(tune.TuneError, match="KeyError: 'typo'"):
        fit(lambda config: {"x": 1}, stop=stop)


def test_the_next_search_works_after_one_that_failed():
    with pytest.raises(tune.TuneError, match="no space for plots"):
        fit(lambda config: {"x": 1}, callbacks=[Raises("on_trial_result")])

    (result,) = fit(lambda config: {"x": 2})

    assert result.metrics["x"] == 2


def test_a_search_of_which_every_trial_failed_says_why_there_is_no_best():
    def train(config):
        raise ValueError("wrong path")

    results = tuner(train, {"a": tune.grid_search([1, 2])}, metric="x", mode="max").fit()

    assert results.num_errors == 2
    with pytest.raises(tune.TuneError, match="ValueError: wrong path"):
        results.get_best_result()
