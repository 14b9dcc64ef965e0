"""`simulate`: searches in virtual time over learning curves."""

from __future__ import annotations

import json
import math
import random
from typing import Any

import pytest

import tunemq as tune
from tunemq.schedulers import (
    PASHA,
    ASHAScheduler,
    FIFOScheduler,
    HyperBandScheduler,
    MedianStoppingRule,
    PopulationBasedTraining,
    Resume,
    SetConfig,
    SetResources,
    TrialScheduler,
)
from tunemq.stopper import MaximumTrialsStopper
from tunemq.testing import Simulation, simulate
from tunemq_shared.base.errors import ConfigError, SearchFailed

SPACE = {"x": tune.uniform(0, 1)}
ASKED = {"param_space": SPACE, "metric": "loss", "mode": "min", "num_samples": 30, "workers": 4}


def curves(config: dict[str, Any], step: int) -> dict[str, Any]:
    rng = random.Random(f"{config['x']} {step}")
    return {"loss": config["x"] + 1 / step + rng.random() / 9, "time_this_iter_s": 1 + rng.random()}


def two_seconds(config: dict[str, Any], step: int) -> dict[str, Any]:
    return {"loss": config["x"] / step, "time_this_iter_s": 2}


SCHEDULERS = {
    "fifo": FIFOScheduler(),
    "asha": ASHAScheduler(max_t=9, reduction_factor=3),
    "promotion": ASHAScheduler(max_t=9, reduction_factor=3, type="promotion"),
    "pasha": PASHA(max_t=9),
    "hyperband": HyperBandScheduler(max_t=9),
    "median": MedianStoppingRule("training_iteration", grace_period=2),
    "pbt": PopulationBasedTraining(
        "training_iteration",
        perturbation_interval=2,
        hyperparam_mutations={"x": tune.uniform(0, 1)},
    ),
}


@pytest.mark.parametrize("name", SCHEDULERS)
def test_simulate_twice_gives_equal_simulations(name: str) -> None:
    options: Any = {**ASKED, "stop": {"training_iteration": 9}, "seed": 3, "restart_s": 0.5}

    first = simulate(SCHEDULERS[name], None, curves, **options)
    second = simulate(SCHEDULERS[name], None, curves, **options)

    assert first == second
    other = simulate(SCHEDULERS[name], None, curves, **{**options, "seed": 4})
    assert first.results != other.results
    assert name == "fifo" or first.decisions
    assert [trial.number for trial in first.trials] == list(range(30))
    assert {trial.status for trial in first.trials} == {"TERMINATED"}


@pytest.mark.parametrize("name", SCHEDULERS)
def test_simulate_with_busy_workers_uses_all_their_time(name: str) -> None:
    found = simulate(SCHEDULERS[name], None, curves, stop={"training_iteration": 9}, **ASKED)

    assert found.worker_s == pytest.approx(sum(trial.worker_s for trial in found.trials))
    assert found.worker_s <= 4 * found.time_s
    assert found.worker_s >= 0.8 * 4 * found.time_s
    trained = sum(curves(one.config, one.step)["time_this_iter_s"] for one in found.results)
    assert found.worker_s >= trained - 1e-6


def test_simulate_without_scheduler_takes_the_time_of_all_steps() -> None:
    found = simulate(
        None,
        None,
        two_seconds,
        param_space=SPACE,
        num_samples=6,
        workers=2,
        stop={"training_iteration": 5},
    )

    assert (found.time_s, found.worker_s) == (30, 60)
    assert len(found.results) == 30
    assert [trial.step for trial in found.trials] == [5] * 6
    assert [one.time_s for one in found.results[:4]] == [2, 2, 4, 4]
    assert [one.worker_s for one in found.results[:4]] == [4, 4, 8, 8]
    assert found.trials[0].metrics == {"loss": found.trials[0].config["x"] / 5}
    assert not found.decisions


def test_simulate_names_each_decision_with_its_reason() -> None:
    found = simulate(SCHEDULERS["asha"], None, curves, **ASKED)

    assert found.decisions
    for one in found.decisions:
        assert one in found.trials[one.trial].decisions
        assert one.action == "STOP"
        assert f"rung {one.step}" in one.reason or "reached" in one.reason
        assert found.trials[one.trial].reason == one.reason


def test_simulate_continues_an_exploited_trial_on_the_curve_of_its_new_configuration() -> None:
    def accuracy(config: dict[str, Any], step: int) -> dict[str, Any]:
        return {"score": config["rate"] * 1000 + step}

    found = simulate(
        PopulationBasedTraining(
            "training_iteration",
            perturbation_interval=3,
            quantile_fraction=0.5,
            hyperparam_mutations={"rate": [1, 2, 4, 8]},
        ),
        None,
        accuracy,
        param_space={"rate": tune.grid_search([1, 2, 4, 8])},
        metric="score",
        mode="max",
        workers=4,
        stop={"training_iteration": 12},
        seed=3,
    )

    exploits = [one for one in found.decisions if one.action == "EXPLOIT"]
    assert exploits
    for one in exploits:
        trial = found.trials[one.trial]
        behind = [step for step, _ in trial.configs[1:]]
        assert set(behind) <= {3, 6, 9}
    for result in found.results:
        assert result.metrics["score"] == result.config["rate"] * 1000 + result.step
    assert found.trials[0].config["rate"] != 1


class OneAfterTheOther(TrialScheduler):
    """Pauses each trial at step 2, and resumes all when nothing else runs."""

    def on_trial_result(self, runner: Any, trial: Any, result: dict[str, Any]) -> Any:
        return self.PAUSE if result["training_iteration"] == 2 else self.CONTINUE

    def choose_trial_to_run(self, runner: Any) -> Any:
        return next((one for one in runner.waiting() if one.status == "PENDING"), None)

    def on_stall(self, runner: Any) -> Any:
        return [Resume(one, "all are there") for one in runner.get_trials()]


def test_simulate_with_restart_cost_adds_it_for_each_resumed_trial() -> None:
    options: Any = {"param_space": SPACE, "num_samples": 3, "workers": 1}
    stop = {"training_iteration": 4}

    free = simulate(OneAfterTheOther(), None, two_seconds, stop=stop, **options)
    costly = simulate(OneAfterTheOther(), None, two_seconds, stop=stop, restart_s=10, **options)

    assert (free.time_s, costly.time_s) == (24, 54)
    assert [one.step for one in costly.results] == [1, 2, 1, 2, 1, 2, 3, 4, 3, 4, 3, 4]
    assert [one.action for one in costly.decisions] == ["PAUSE"] * 3 + ["RESUME"] * 3


def test_simulate_gives_a_curve_the_resources_that_a_scheduler_set() -> None:
    class Doubles(TrialScheduler):
        def on_trial_result(self, runner: Any, trial: Any, result: dict[str, Any]) -> Any:
            if result["training_iteration"] != 2:
                return self.CONTINUE
            return [self.CONTINUE, SetResources(trial, "it may have more", {"cpu": 2})]

    def faster(config: dict[str, Any], step: int, resources: dict[str, float]) -> dict[str, Any]:
        return {"cpus": resources["cpu"], "time_this_iter_s": 4 / resources["cpu"]}

    found = simulate(Doubles(), None, faster, workers=2, stop={"training_iteration": 4})

    assert [one.metrics["cpus"] for one in found.results] == [1, 1, 2, 2]
    assert (found.time_s, found.worker_s) == (12, 16)


def test_simulate_with_set_config_continues_at_the_next_step() -> None:
    class Changes(TrialScheduler):
        def on_trial_result(self, runner: Any, trial: Any, result: dict[str, Any]) -> Any:
            if result["training_iteration"] != 2:
                return self.CONTINUE
            return [self.CONTINUE, SetConfig(trial, "another", {"x": 100})]

    found = simulate(
        Changes(), None, two_seconds, param_space={"x": 1}, stop={"training_iteration": 5}
    )

    assert [one.step for one in found.results] == [1, 2, 3, 4, 5]
    assert found.trials[0].configs == [(0, {"x": 1}), (2, {"x": 100})]


def test_simulate_ends_trials_at_done_and_searches_at_stoppers_and_budgets() -> None:
    def three(config: dict[str, Any], step: int) -> dict[str, Any]:
        return {"loss": 1, "done": step == 3}

    ended = simulate(None, None, three, num_samples=5, workers=1)
    stopper = MaximumTrialsStopper(2)
    stopped = simulate(None, None, three, num_samples=5, workers=1, stop=stopper)
    budget = simulate(None, None, three, num_samples=-1, workers=1, time_budget_s=7.5)

    assert [trial.step for trial in ended.trials] == [3] * 5
    assert [trial.step for trial in stopped.trials][:2] == [3, 3]
    assert len(stopped.trials) <= 3
    assert budget.time_s == 7.5
    assert [trial.step for trial in budget.trials] == [3, 3, 1]


def test_best_over_time_improves_and_ends_at_the_best() -> None:
    found = simulate(None, None, curves, stop={"training_iteration": 9}, **ASKED)

    best = found.best_over_time()
    values = [one.value for one in best]
    assert values == sorted(values, reverse=True)
    assert values[-1] == min(one.metrics["loss"] for one in found.results)
    assert found.best_over_time("loss", "max")[-1].value == max(
        one.metrics["loss"] for one in found.results
    )


def test_simulate_ranks_values_that_are_no_numbers_last() -> None:
    def diverges(config: dict[str, Any], step: int) -> dict[str, Any]:
        return {"loss": math.nan if config["x"] < 0.5 else 1 / step}

    found = simulate(SCHEDULERS["asha"], None, diverges, **ASKED)

    assert all(trial.step < 9 for trial in found.trials if trial.config["x"] < 0.5)
    assert found.best_over_time()[-1].value == 1 / 9


@pytest.mark.parametrize(
    ("change", "told"),
    [
        ({"curves": 3}, "simulate(curves=3): give a function of (config, step)"),
        ({"workers": 0}, "simulate(workers=0)"),
        ({"restart_s": -1}, "simulate(restart_s=-1): give seconds of at least 0."),
        ({"checkpoint_frequency": -1}, "simulate(checkpoint_frequency=-1)"),
        ({"resources_per_worker": {}}, "name a resource"),
        ({"resources_per_worker": {"cpu": 0}}, "'cpu': 0"),
        ({"scheduler": "ash"}, "the trial scheduler 'ash' is unknown"),
        ({"searcher": "rendom"}, "rendom"),
        ({"mode": "minimise"}, "mode='minimise'"),
        ({"metric": None}, "metric"),
        ({"num_samples": 0}, "num_samples=0"),
        ({"param_space": [1]}, "param_space=[1] is invalid"),
        ({"stop": 3}, "stop is 3"),
        ({"curves": lambda config, step: 3}, "returned 3; it must return a dict of metrics."),
        ({"curves": lambda config, step: {"los": 3}}, "it must return the metric 'loss'."),
        (
            {"curves": lambda config, step: {"loss": 3, "time_this_iter_s": 0}},
            "time_this_iter_s must be above 0.",
        ),
    ],
    ids=lambda one: next(iter(one)) if isinstance(one, dict) else None,
)
def test_simulate_with_bad_input_names_the_argument(change: dict[str, Any], told: str) -> None:
    options: Any = {"scheduler": "asha", "searcher": None, "curves": curves, **ASKED, **change}

    with pytest.raises(ConfigError) as raised:
        simulate(**options)

    assert told in str(raised.value)


def test_simulate_refuses_a_trial_that_nothing_ends(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("tunemq.testing.curves.curve_executor._MOST_STEPS", 50)

    with pytest.raises(ConfigError, match="has made 50 steps, and nothing ends it; pass stop="):
        simulate(None, None, two_seconds, param_space=SPACE)


def test_simulate_passes_on_what_an_algorithm_raises() -> None:
    class Broken(TrialScheduler):
        def on_trial_result(self, runner: Any, trial: Any, result: dict[str, Any]) -> Any:
            raise ValueError("broken")

    with pytest.raises(SearchFailed, match="the trial scheduler raised ValueError: broken"):
        simulate(Broken(), None, two_seconds, param_space=SPACE)


def test_simulation_can_be_written_as_json() -> None:
    found = simulate(None, None, curves, stop={"training_iteration": 2}, **ASKED)

    assert isinstance(found, Simulation)
    assert len(json.loads(json.dumps(found.results))) == 60
