"""Configurations of a search, their order, and the conditions that end trials and the search."""

from __future__ import annotations

import datetime as dt
import time

import pytest

import tunemq as tune
from tests.support.searches.journals import ended_searches
from tests.support.searches.searches import fit, results_of
from tests.support.waiting import need
from tunemq.schedulers import ASHAScheduler, FIFOScheduler
from tunemq.search import Searcher
from tunemq.stopper import CostStopper, MaximumTrialsStopper, Stopper

__all__ = ["ended_searches"]

pytestmark = pytest.mark.integration


def climbs(config):
    """Report a score that grows by ``slope`` per step."""
    for step in range(1, config.get("steps", 100) + 1):
        tune.report({"score": config.get("slope", 1.0) * step, "inner": {"half": step / 2}})


def steps_of(results):
    return [result.metrics["training_iteration"] for result in results]


# --- stop criteria --------------------------------------------------------------------------------


@pytest.mark.parity(98)
def test_a_dict_of_criteria_stops_at_the_exact_step_whichever_is_first():
    results = fit(
        climbs,
        {"slope": tune.grid_search([1.0, 10.0])},
        stop={"training_iteration": 7, "score": 35},
    )

    assert steps_of(results) == [7, 4]
    assert [len(results_of(result)) for result in results] == [7, 4]


@pytest.mark.parity(100)
def test_nested_keys_are_written_with_a_slash():
    assert steps_of(fit(climbs, stop={"inner/half": 2.5})) == [5]


@pytest.mark.parity(99)
def test_a_criterion_that_no_result_has_stops_nothing():
    (result,) = fit(climbs, {"steps": 4}, stop={"typo": 1})

    assert result.status == "TERMINATED"
    assert result.metrics["training_iteration"] == 4


def test_a_function_that_stops_is_asked_about_each_result():
    asked = []

    def stop(trial_id, result):
        asked.append(result["training_iteration"])
        return result["score"] >= 6

    assert steps_of(fit(climbs, stop=stop)) == [6]
    assert asked == [1, 2, 3, 4, 5, 6]


def test_a_stopper_may_end_the_whole_search():
    class AfterThree(Stopper):
        seen = 0

        def __call__(self, trial_id, result):
            return False

        def stop_all(self):
            AfterThree.seen += 1
            return AfterThree.seen >= 3

    results = fit(climbs, num_samples=10, max_concurrent_trials=1, stop=AfterThree())

    assert len(results) == 1


def test_maximum_of_trials_ends_an_endless_search():
    results = fit(climbs, num_samples=-1, max_concurrent_trials=1, stop=MaximumTrialsStopper(3))

    assert 3 <= len(results) <= 4, "one may have started before the third had ended"
    assert steps_of(results)[:3] == steps_of(fit(climbs)) * 3


class Bill(tune.Trainable):
    """Costs 1 at first and then 9 more, with which it ends by itself."""

    def setup(self, config):
        self.cost = 0

    def step(self):
        self.cost += 1 + 8 * bool(self.cost)
        return {"score": 1, "cost": self.cost, "done": self.cost > 1}


def test_cost_of_the_result_with_which_a_trial_ends_by_itself_counts():
    results = fit(Bill, num_samples=10, max_concurrent_trials=1, stop=CostStopper(20, "cost"))

    assert 2 <= len(results) <= 3, "one may have started before the second had ended"
    assert steps_of(results)[:2] == [2, 2]


def test_a_list_of_criteria_and_functions_stops_at_the_first():
    stop = [{"training_iteration": 8}, lambda trial_id, result: result["score"] >= 30]

    results = fit(climbs, {"slope": tune.grid_search([1.0, 10.0])}, stop=stop)

    assert steps_of(results) == [8, 3]


def forever(config):
    while True:
        time.sleep(0.01)
        tune.report({"score": 1})


@pytest.mark.parity(54)
@pytest.mark.parametrize("budget", [3.0, dt.timedelta(seconds=3)])
def test_a_time_budget_ends_an_endless_search(budget):
    fit(returns_config)  # a farm that starts takes its time from the budget
    began = time.monotonic()
    results = fit(forever, num_samples=-1, time_budget_s=budget)

    assert time.monotonic() - began < 60
    assert results.num_errors == 0
    assert {result.status for result in results} == {"TERMINATED"}


# --- the search space -----------------------------------------------------------------------------


def returns_config(config):
    return {"told": config}


@pytest.mark.parity(53)
def test_max_concurrent_trials_limits_running_trials(tmp_path):
    def train(config):
        marker = tmp_path / f"running_{tune.get_context().get_trial_id()}"
        marker.touch()
        for _ in range(3):
            tune.report({"running": len(list(tmp_path.glob("running_*")))})
        marker.unlink()

    results = fit(train, num_samples=5, max_concurrent_trials=1)

    assert [result.metrics["running"] for result in results] == [1] * 5


def test_a_grid_is_walked_whole_and_each_point_is_sampled_as_often_as_asked():
    results = fit(
        returns_config,
        {"a": tune.grid_search([1, 2]), "b": tune.grid_search(["x", "y"]), "c": tune.uniform(0, 1)},
        num_samples=2,
        seed=1,
    )

    told = [result.metrics["told"] for result in results]
    assert [(one["a"], one["b"]) for one in told].count((1, "x")) == 2
    assert len(told) == 8
    assert len({one["c"] for one in told}) == 8


def test_a_nested_space_arrives_nested_and_as_reported():
    space = {
        "model": {"kind": tune.choice(["a", "b"]), "layers": [tune.randint(1, 4), 7]},
        "twice": tune.sample_from(lambda config: config["model"]["layers"][1] * 2),
        "fixed": None,
    }
    results = fit(returns_config, space, num_samples=3, seed=5)

    for result in results:
        told = result.metrics["told"]
        assert told == result.config
        assert told["model"]["kind"] in {"a", "b"}
        assert told["model"]["layers"][1] == 7
        assert 1 <= told["model"]["layers"][0] < 4
        assert told["twice"] == 14
        assert told["fixed"] is None


def test_the_same_seed_gives_the_same_configurations():
    space = {"a": tune.loguniform(1e-4, 1), "b": tune.choice(list("abcdef"))}

    first, again, other = (
        [result.config for result in fit(returns_config, space, num_samples=4, seed=seed)]
        for seed in (3, 3, 4)
    )

    assert first == again
    assert first != other


def test_a_search_without_a_space_runs_its_function_as_often_as_asked():
    assert len(fit(returns_config, num_samples=3)) == 3


# --- algorithms -----------------------------------------------------------------------------------


@pytest.mark.parity(65, 66, 172)
def test_asha_stops_the_worse_trials_at_its_rungs():
    slopes = [4.0, 3.0, 2.0, 1.0, 0.5, 0.25]
    results = fit(
        climbs,
        {"slope": tune.grid_search(slopes), "steps": 9},
        metric="score",
        mode="max",
        scheduler=ASHAScheduler(max_t=9, grace_period=1, reduction_factor=3),
        max_concurrent_trials=1,
    )

    assert results.get_best_result().config["slope"] == 4.0
    steps = steps_of(results)
    assert steps[0] == 9
    assert set(steps) <= {1, 3, 9}
    assert steps.count(1) >= 3
    assert [len(results_of(result)) for result in results] == steps


def test_asha_by_its_name_with_trials_side_by_side_leaves_a_journal_that_is_exact(ended_searches):
    fit(
        climbs,
        {"slope": tune.uniform(0, 1), "steps": 20},
        metric="score",
        mode="max",
        scheduler="asha",
        num_samples=12,
        stop={"training_iteration": 20},
    )

    assert ended_searches[0].make_algorithms is not None


def bowl(config):
    return {"loss": (config["x"] - 0.3) ** 2 + (config["y"] - 0.7) ** 2}


def optuna_losses(**options):
    need("optuna", __import__("importlib").util.find_spec("optuna"))
    from tunemq.search.optuna import OptunaSearch

    results = fit(
        bowl,
        {"x": tune.uniform(0, 1), "y": tune.uniform(0, 1)},
        search_alg=OptunaSearch(),
        metric="loss",
        mode="min",
        **options,
    )
    return [result.metrics["loss"] for result in results]


@pytest.mark.parity(173)
def test_optuna_with_one_trial_at_a_time_finds_a_good_point_reproducibly():
    first = optuna_losses(num_samples=30, max_concurrent_trials=1, seed=2)

    assert min(first) < 0.01
    assert optuna_losses(num_samples=30, max_concurrent_trials=1, seed=2) == first


def test_optuna_works_with_trials_side_by_side():
    assert len(optuna_losses(num_samples=10, seed=2)) == 10


# --- resources ------------------------------------------------------------------------------------


def says_resources(config):
    return {"resources": tune.get_context().get_trial_resources()}


@pytest.mark.parity(53)
def test_fractions_of_a_cpu_let_more_trials_run_side_by_side(tmp_path):
    """Each trial waits for all the others: with fewer slots it would never end."""

    def train(config):
        (tmp_path / f"here_{config['n']}").touch()
        while len(list(tmp_path.glob("here_*"))) < 4:
            time.sleep(0.005)
            tune.report({"waits": True})

    results = fit(
        tune.with_resources(train, {"cpu": 0.25}),
        {"n": tune.grid_search([0, 1, 2, 3])},
        time_budget_s=100,
    )

    assert len(list(tmp_path.glob("here_*"))) == 4
    assert {result.status for result in results} == {"TERMINATED"}


def test_resources_may_be_a_function_of_the_configuration():
    trainable = tune.with_resources(says_resources, lambda config: {"cpu": config["cpus"]})
    results = fit(trainable, {"cpus": tune.grid_search([0.5, 1, 2])})

    assert [result.metrics["resources"]["cpu"] for result in results] == [0.5, 1.0, 2.0]


@pytest.mark.parity(85)
def test_placement_group_is_summed_and_one_cpu_is_the_default():
    bundles = tune.PlacementGroupFactory([{"CPU": 1}, {"CPU": 0.5}])

    (grouped,) = fit(tune.with_resources(says_resources, bundles))
    (plain,) = fit(says_resources)

    assert grouped.metrics["resources"] == {"cpu": 1.5}
    assert plain.metrics["resources"] == {"cpu": 1.0}


def test_a_class_may_ask_for_its_resources_itself():
    class Asks(tune.Trainable):
        @classmethod
        def default_resource_request(cls, config):
            return {"cpu": config["cpus"]}

        def step(self):
            return {"resources": self.trial_resources, "done": True}

    results = fit(Asks, {"cpus": tune.grid_search([0.5, 1.5])})

    assert [result.metrics["resources"] for result in results] == [{"cpu": 0.5}, {"cpu": 1.5}]


# --- results that algorithms change ---------------------------------------------------------------


def spoil(result):
    result["score"] = -7.0
    result["inner"]["half"] = -7.0
    del result["time_total_s"]


class SpoilingStopper(Stopper):
    def __call__(self, trial_id, result):
        spoil(result)
        return False

    def stop_all(self):
        return False


class SpoilingScheduler(FIFOScheduler):
    def on_trial_result(self, runner, trial, result):
        spoil(result)
        return self.CONTINUE


class SpoilingSearcher(Searcher):
    def __init__(self):
        super().__init__(metric="score", mode="max")

    def suggest(self, trial_id):
        return {"slope": 1.0, "steps": 3}

    def on_trial_result(self, trial_id, result):
        spoil(result)

    def on_trial_complete(self, trial_id, result=None, error=False):
        spoil(result)


@pytest.mark.parametrize(
    "options",
    [
        {"stop": SpoilingStopper()},
        {"scheduler": SpoilingScheduler()},
        {"search_alg": SpoilingSearcher()},
    ],
    ids=["stopper", "scheduler", "searcher"],
)
def test_algorithm_that_changes_a_result_changes_no_record_of_it(options):
    space = None if "search_alg" in options else {"slope": 1.0, "steps": 3}
    (result,) = fit(climbs, space, metric="score", mode="max", num_samples=1, **options)
    assert [one["score"] for one in results_of(result)] == [1.0, 2.0, 3.0]
    assert [one["inner"]["half"] for one in results_of(result)] == [0.5, 1.0, 1.5]
    assert all("time_total_s" in one for one in results_of(result))
