"""BOHB's search algorithm: budgets, the model and random suggestions, arguments, and resuming."""

from __future__ import annotations

import builtins
import copy
import json
import math
import random
from typing import Any

import optuna
import pytest

from tunemq.schedulers import HyperBandForBOHB
from tunemq.testing import simulate
from tunemq_scheduler.search import (
    SearchGenerator,
    choice,
    create_searcher,
    grid_search,
    loguniform,
    randint,
    randn,
    sample_from,
    uniform,
)
from tunemq_scheduler.search.optuna.budget_observations import BudgetObservations
from tunemq_scheduler.search.optuna.optuna_space import count_parameters
from tunemq_scheduler.search.optuna.tune_bohb import TuneBOHB
from tunemq_shared.base.errors import ConfigError, SearchSpaceError

SPACE = {
    "lr": loguniform(1e-4, 1e-1),
    "width": randint(1, 64),
    "opt": choice([{"kind": "sgd", "momentum": uniform(0, 1)}, {"kind": "adam"}]),
}
LINE = {"x": uniform(0, 1)}
#: No random suggestions once there is a model, of two observations and the two that BOHB adds.
MODEL_ONLY = {"random_fraction": 0.0, "min_points_in_model": 2}


def search(space: Any = None, seed: int = 1, mode: str = "min", **options: Any) -> SearchGenerator:
    """Return a TuneBOHB as the loop sees it."""
    searcher = TuneBOHB(**options)
    return SearchGenerator(searcher, LINE if space is None else space, -1, "loss", mode, seed)


def report(
    algorithm: SearchGenerator, n: int, step: int, loss: Any, *, pause: bool = False
) -> None:
    algorithm.on_trial_result(f"t{n}", {"loss": loss, "training_iteration": step})
    if pause:
        algorithm.on_trial_pause(f"t{n}")


def end(algorithm: SearchGenerator, n: int, step: int, loss: Any, **options: Any) -> None:
    result = {"loss": loss, "training_iteration": step}
    algorithm.on_trial_complete(f"t{n}", result, **options)


def suggest(algorithm: SearchGenerator, n: int) -> dict[str, Any]:
    suggestion = algorithm.suggest(n, f"t{n}")
    assert suggestion is not None
    assert not isinstance(suggestion, str)
    return suggestion.config


def budget(algorithm: SearchGenerator) -> int | None:
    found: int | None = algorithm.searcher._observations.model_budget
    return found


def loss_of(config: dict[str, Any], step: int) -> float:
    extra = config["opt"].get("momentum", 0.5)
    return abs(math.log10(config["lr"]) + 2) + config["width"] / 64 + extra + 1 / step


def halve(algorithm: SearchGenerator, first: int, count: int = 9) -> list[dict[str, Any]]:
    """Run a bracket: all trials pause at 1, a third of them continues to 3, one trial to 9."""
    numbers = [*range(first, first + count)]
    configs = {n: suggest(algorithm, n) for n in numbers}
    for step in (1, 3):
        for n in numbers[:-1]:
            report(algorithm, n, step, loss_of(configs[n], step), pause=True)
        # The bracket is halved when its last trial arrives, which therefore never pauses.
        report(algorithm, numbers[-1], step, loss_of(configs[numbers[-1]], step))
        ranked = sorted(numbers, key=lambda n, at=step: loss_of(configs[n], at))
        for n in ranked[len(ranked) // 3 :]:
            end(algorithm, n, step, loss_of(configs[n], step))
        numbers = sorted(ranked[: len(ranked) // 3])
    end(algorithm, numbers[0], 9, loss_of(configs[numbers[0]], 9))
    return [*configs.values()]


# --- the budget of the model ----------------------------------------------------------------------


def test_budget_of_the_model_is_the_largest_with_enough_observations() -> None:
    found = BudgetObservations(enough=3)
    for trial in "abcd":
        found.report(trial, 1, 0.5)
        found.compare(trial)
        assert found.model_budget == (None if trial in "ab" else 1)
    for trial in "abc":
        found.report(trial, 3, 0.25)
        found.compare(trial)
        assert found.model_budget == (1 if trial in "ab" else 3)
    assert found.at_model == {"a": 0.25, "b": 0.25, "c": 0.25}


def test_budget_with_more_observations_does_not_replace_a_larger_one() -> None:
    found = BudgetObservations(enough=2)
    for trial, step in [("c", 3), ("a", 9), ("b", 9), ("d", 3), ("e", 3)]:
        found.report(trial, step, 0.5)
        assert found.model_budget == (9 if trial in "bde" else None)
        found.compare(trial)
    assert found.model_budget == 9
    assert not found.is_observed("c")


def test_result_at_a_known_budget_is_an_observation_without_a_pause() -> None:
    found = BudgetObservations(enough=2)
    found.report("a", 3, 0.5)
    found.compare("a")
    found.report("b", 2, 0.5)
    assert found.model_budget is None
    found.report("b", 3, 0.25)
    assert found.at_model == {"a": 0.5, "b": 0.25}


def test_result_that_is_reported_again_replaces_the_observation_and_adds_none() -> None:
    found = BudgetObservations(enough=2)
    for value in (0.5, 0.25):
        found.report("a", 3, value)
        found.compare("a")
    assert found.model_budget is None
    found.report("b", 3, 0.5)
    assert found.at_model == {"a": 0.25, "b": 0.5}


def test_number_of_observations_that_a_model_needs_grows_with_the_space() -> None:
    assert count_parameters(SPACE) == 4
    for space, enough in [(LINE, 4), ({"x": uniform(0, 1), "y": uniform(0, 1)}, 5), (SPACE, 7)]:
        algorithm = search(space)
        for n in range(enough):
            suggest(algorithm, n)
            assert budget(algorithm) is None
            end(algorithm, n, 1, 0.5)
        assert budget(algorithm) == 1


def test_min_points_in_model_sets_the_number_of_observations() -> None:
    algorithm = search(bohb_config={"min_points_in_model": 7})
    for n in range(9):
        assert budget(algorithm) is None
        suggest(algorithm, n)
        end(algorithm, n, 1, 0.5)
    assert budget(algorithm) == 1


def test_model_learns_of_paused_trials_before_any_trial_has_ended() -> None:
    """Values at 1 favour x near 0.2: without them, suggestions would be uniform."""
    algorithm = search(bohb_config=MODEL_ONLY)
    for n in range(30):
        x = suggest(algorithm, n)["x"]
        report(algorithm, n, 1, abs(x - 0.2), pause=True)
    late = [suggest(algorithm, n)["x"] for n in range(30, 40)]
    assert sum(abs(x - 0.2) < 0.2 for x in late) >= 7


def test_suggestions_follow_the_larger_budget_when_budgets_disagree() -> None:
    algorithm = search(bohb_config=MODEL_ONLY)
    early = []
    for n in range(40):
        early.append(suggest(algorithm, n)["x"])
        report(algorithm, n, 1, abs(early[-1] - 0.1), pause=True)
    for n, x in list(enumerate(early))[::2]:
        report(algorithm, n, 9, abs(x - 0.9), pause=True)
    assert budget(algorithm) == 9
    late = [suggest(algorithm, n)["x"] for n in range(40, 50)]
    mean = sum(late) / len(late)
    assert mean > 0.5


def test_mode_decides_whether_small_or_large_values_are_good() -> None:
    means = {}
    for mode in ("min", "max"):
        algorithm = search(bohb_config=MODEL_ONLY, mode=mode)
        values = []
        for n in range(40):
            values.append(suggest(algorithm, n)["x"])
            end(algorithm, n, 1, values[-1])
        means[mode] = sum(values[10:]) / 30
    assert means["min"] + 0.2 < means["max"]


def test_failed_trial_and_values_that_are_not_finite_are_no_observations() -> None:
    algorithm = search()
    for n in range(8):
        suggest(algorithm, n)
    end(algorithm, 0, 1, 0.5)
    end(algorithm, 1, 1, 0.5, error=True)
    end(algorithm, 2, 1, math.nan)
    end(algorithm, 3, 1, math.inf)
    algorithm.on_trial_complete("t4", {"training_iteration": 1})
    algorithm.on_trial_complete("t5", None)
    report(algorithm, 6, 1, math.nan, pause=True)
    assert algorithm.searcher._observations.get_state()["observed"] == [[1, {"t0": 0.5}]]
    report(algorithm, 7, 1, 0.25)
    assert algorithm.searcher._observations.get_state()["observed"] == [
        [1, {"t0": 0.5, "t7": 0.25}]
    ]


def test_trial_that_fails_keeps_its_observations_at_earlier_budgets() -> None:
    algorithm = search()
    suggest(algorithm, 0)
    report(algorithm, 0, 3, 0.5, pause=True)
    end(algorithm, 0, 5, 0.5, error=True)
    assert algorithm.searcher._observations.get_state()["observed"] == [[3, {"t0": 0.5}]]


def test_ended_trials_that_cannot_count_any_more_are_forgotten() -> None:
    algorithm = search(SPACE, bohb_config=MODEL_ONLY)
    for first in range(0, 90, 9):
        halve(algorithm, first)
    assert budget(algorithm) == 9
    suggest(algorithm, 90)
    assert len(algorithm.searcher._trials) == len(algorithm.searcher._observations.at_model) + 1


# --- random suggestions ---------------------------------------------------------------------------


def suggestions(fraction: float, count: int = 220) -> list[float]:
    algorithm = search(bohb_config={"random_fraction": fraction})
    found = []
    for n in range(count):
        found.append(suggest(algorithm, n)["x"])
        if n < 20:
            end(algorithm, n, 1, abs(found[-1] - 0.5))
        else:
            algorithm.on_trial_complete(f"t{n}", None, error=True)  # it teaches the model nothing
    return found[20:]


def test_random_fraction_is_the_share_of_suggestions_without_the_model() -> None:
    drawn, third, modelled = suggestions(1.0), suggestions(1 / 3), suggestions(0.0)
    assert sum(one == other for one, other in zip(drawn, third, strict=True)) in range(45, 90)
    assert sum(one == other for one, other in zip(drawn, modelled, strict=True)) == 0
    assert len(set(drawn)) == len(drawn)


def test_random_suggestions_do_not_depend_on_results() -> None:
    chosen = []
    for sign in (1, -1):
        algorithm = search(bohb_config={"random_fraction": 1.0})
        configs = []
        for n in range(20):
            configs.append(suggest(algorithm, n))
            end(algorithm, n, 1, sign * configs[-1]["x"])
        chosen.append(configs)
    assert chosen[0] == chosen[1]


def test_model_is_asked_for_suggestions_at_the_same_places_whatever_the_results() -> None:
    """Which suggestions are random depends on the seed alone: the others differ."""
    chosen = []
    for sign in (1, -1):
        algorithm = search()
        configs = []
        for n in range(60):
            configs.append(suggest(algorithm, n)["x"])
            end(algorithm, n, 1, sign * configs[-1])
        chosen.append(configs)
    same = sum(one == other for one, other in zip(*chosen, strict=True))
    assert 4 + 10 <= same <= 4 + 30


def test_pending_trials_spread_suggestions() -> None:
    """Live trials count as bad: many suggestions without a result do not fall on one point."""
    algorithm = search(bohb_config=MODEL_ONLY)
    for n in range(20):
        end(algorithm, n, 1, abs(suggest(algorithm, n)["x"] - 0.5))
    assert budget(algorithm) == 1
    fresh = search(bohb_config=MODEL_ONLY)
    fresh.set_state(algorithm.get_state())
    live = [suggest(algorithm, n)["x"] for n in range(20, 40)]
    ended = []
    for n in range(20, 40):
        ended.append(suggest(fresh, n)["x"])
        fresh.on_trial_complete(f"t{n}", None, error=True)

    def spread(values: list[float]) -> float:
        return max(values) - min(values)

    assert spread(live) > spread(ended)


# --- the same suggestions again -------------------------------------------------------------------


def test_same_seed_and_results_give_the_same_suggestions() -> None:
    first, again = search(SPACE), search(SPACE)
    for start in range(0, 45, 9):
        assert halve(first, start) == halve(again, start)
    assert halve(search(SPACE, seed=2), 0) != halve(search(SPACE), 0)


def test_seed_of_the_searcher_overrides_that_of_the_experiment() -> None:
    made = [
        SearchGenerator(TuneBOHB(seed=7), SPACE, -1, "loss", "min", experiment)
        for experiment in (1, 2)
    ]
    assert halve(made[0], 0) == halve(made[1], 0)


@pytest.mark.parametrize("seed", range(3))
def test_state_restored_in_the_middle_of_a_search_continues_exactly(seed: int) -> None:
    whole = search(SPACE, seed)
    for start in range(0, 45, 9):
        halve(whole, start)
        pending = start + 100
        suggest(whole, pending)  # live trials and one that is paused are part of the state
        suggest(whole, pending + 1)
        report(whole, pending, 1, 0.5, pause=True)
        restored = search(SPACE, seed)
        restored.set_state(json.loads(json.dumps(whole.get_state())))
        continued = copy.deepcopy(whole)
        assert halve(continued, 1000) == halve(restored, 1000)
        for one in (continued, restored):
            report(one, pending, 9, 0.1)
            end(one, pending + 1, 9, 0.2)
        assert halve(continued, 2000) == halve(restored, 2000)
    assert budget(whole) is not None


class Recorded:
    """Passes calls to an algorithm, and repeats them with another as after a restart."""

    def __init__(self, algorithm: SearchGenerator) -> None:
        self.algorithm = algorithm
        self.calls: list[tuple[str, tuple[Any, ...], dict[str, Any]]] = []

    def suggest(self, n: int, trial_id: str) -> Any:
        suggestion: Any = self.algorithm.suggest(n, trial_id)
        self.calls.append(("on_trial_restored", (n, trial_id, suggestion.config), {}))
        return suggestion

    def __getattr__(self, name: str) -> Any:
        def call(*args: Any, **options: Any) -> Any:
            self.calls.append((name, args, options))
            return getattr(self.algorithm, name)(*args, **options)

        return call

    def replay(self, algorithm: SearchGenerator) -> None:
        for name, args, options in self.calls:
            getattr(algorithm, name)(*args, **options)


@pytest.mark.parametrize("seed", range(3))
def test_replayed_search_continues_exactly(seed: int) -> None:
    whole = Recorded(search(SPACE, seed))
    for k, start in enumerate(range(0, 36, 9)):
        halve(whole, start)  # type: ignore[arg-type]
        suggest(whole, 36 + k)  # type: ignore[arg-type]
    whole.on_trial_complete("t36", None, error=True)
    (config,) = (args[2] for _, args, _ in whole.calls if args[:2] == (36, "t36"))
    whole.on_trial_restored(36, "t36", config, is_continued=True)
    replayed = search(SPACE, seed)
    whole.replay(replayed)
    assert halve(whole.algorithm, 1000) == halve(replayed, 1000)


def test_trial_that_ended_and_runs_again_is_pending_and_learns_again() -> None:
    algorithm = search(bohb_config=MODEL_ONLY)
    for n in range(6):
        end(algorithm, n, 1, suggest(algorithm, n)["x"])
    config = suggest(algorithm, 6)
    algorithm.on_trial_complete("t6", None, error=True)
    algorithm.on_trial_restored(6, "t6", config, is_continued=True)
    suggest(algorithm, 7)
    end(algorithm, 6, 1, 0.125)
    assert algorithm.searcher._observations.at_model["t6"] == 0.125
    states = [one.state.name for one in algorithm.searcher._study.trials]
    assert (states.count("COMPLETE"), states.count("RUNNING")) == (7, 1)


def test_earlier_run_with_another_space_is_not_learned() -> None:
    algorithm = search()
    assert not algorithm.searcher.on_trial_restored("t0", {"y": 3}, number=0)
    assert algorithm.searcher._calls == 1


# --- spaces and points ----------------------------------------------------------------------------


def test_hyperparameters_of_a_choice_are_suggested_only_with_it() -> None:
    algorithm = search(SPACE, bohb_config={"random_fraction": 0.0})
    kinds = set()
    for n in range(40):
        config = suggest(algorithm, n)
        kinds.add(config["opt"]["kind"])
        assert ("momentum" in config["opt"]) == (config["opt"]["kind"] == "sgd")
        end(algorithm, n, 1, loss_of(config, 1))
    assert kinds == {"sgd", "adam"}
    assert budget(algorithm) == 1


def test_points_are_tried_first_and_may_be_partial() -> None:
    points = [{"lr": 0.01, "width": 5, "opt": {"kind": "adam"}}, {"width": 6}]
    algorithm = search(SPACE, points_to_evaluate=points)
    first, second, third = (suggest(algorithm, n) for n in range(3))
    assert first == points[0]
    assert second["width"] == 6
    assert third["width"] != 6


def test_points_are_not_tried_again_after_a_restart() -> None:
    points = [{"x": 0.25}, {"x": 0.5}]
    resumed = search(points_to_evaluate=points)
    resumed.on_trial_restored(0, "t0", {"x": 0.25})
    assert suggest(resumed, 1)["x"] == 0.5


def test_own_space_of_the_searcher_is_searched() -> None:
    algorithm = SearchGenerator(TuneBOHB(LINE, metric="loss", mode="min"), {"fixed": 3}, -1)
    config = suggest(algorithm, 0)
    assert config["fixed"] == 3
    assert 0 <= config["x"] <= 1


@pytest.mark.parametrize(
    ("space", "told"),
    [
        ({"x": randn(0, 1)}, r"x: TuneBOHB does not know .*; use uniform or loguniform"),
        ({"x": 3}, "TuneBOHB has nothing to search"),
        ({"x": grid_search([1, 2])}, "TuneBOHB does not support grid_search"),
        ({"x": sample_from(lambda _: 3)}, "TuneBOHB has nothing to search"),
    ],
)
def test_space_that_cannot_be_searched_is_refused(space: Any, told: str) -> None:
    with pytest.raises(SearchSpaceError, match=told):
        search(space)


def test_point_outside_the_space_is_refused() -> None:
    with pytest.raises(SearchSpaceError, match=r"points_to_evaluate\[1\] does not fit.*x is 2"):
        search(points_to_evaluate=[{"x": 0.5}, {"x": 2}])


# --- arguments ------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("config", "told"),
    [
        ({"random_fractions": 0.1}, "unknown key 'random_fractions'; did you mean random_fraction"),
        ({"zzz": 1}, "unknown key 'zzz'; it takes min_points_in_model, num_samples, random_fr"),
        ({"top_n_percent": 15}, "'top_n_percent', which TuneBOHB cannot set"),
        ({"bandwidth_factor": 3}, "'bandwidth_factor', which TuneBOHB cannot set"),
        ({"min_bandwidth": 1e-3}, "'min_bandwidth', which TuneBOHB cannot set"),
        ({"random_fraction": 1.5}, r"random_fraction=1.5\) is invalid: pass a number from 0 to 1"),
        ({"random_fraction": math.nan}, "random_fraction=nan"),
        ({"random_fraction": True}, "random_fraction=True"),
        ({"num_samples": 0}, r"num_samples=0\) is invalid: pass a whole number from 1"),
        ({"min_points_in_model": 0}, "min_points_in_model=0"),
        ([("num_samples", 3)], "pass a dict"),
    ],
    ids=str,
)
def test_bohb_config_that_cannot_be_honoured_is_refused(config: Any, told: str) -> None:
    with pytest.raises(ConfigError, match=told):
        TuneBOHB(bohb_config=config)


def test_several_metrics_are_refused() -> None:
    with pytest.raises(ConfigError, match="BOHB optimises one metric; use OptunaSearch"):
        SearchGenerator(TuneBOHB(), LINE, 1, ["a", "b"], ["min", "max"])


def test_metric_and_mode_are_needed() -> None:
    with pytest.raises(ConfigError, match="TuneBOHB does not know what to optimise"):
        SearchGenerator(TuneBOHB(), LINE, 1)


def test_space_that_is_no_dict_is_refused() -> None:
    with pytest.raises(SearchSpaceError, match="pass a dict"):
        TuneBOHB(space=object())  # type: ignore[arg-type]


@pytest.mark.parametrize("limit", [-1, 1.5])
def test_max_concurrent_must_be_a_whole_number(limit: Any) -> None:
    with pytest.raises(ConfigError, match="max_concurrent"):
        TuneBOHB(max_concurrent=limit)


def test_missing_optuna_is_said_with_the_command_that_installs_it(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    real = builtins.__import__

    def without(name: str, *args: Any, **kwargs: Any) -> Any:
        if name == "optuna":
            raise ImportError(name)
        return real(name, *args, **kwargs)

    monkeypatch.setattr(builtins, "__import__", without)
    with pytest.raises(ConfigError, match=r"TuneBOHB needs Optuna.*pip install 'optuna>=4'"):
        TuneBOHB()


def test_searcher_is_created_by_its_name() -> None:
    made = create_searcher("bohb", max_concurrent=3, bohb_config={"num_samples": 8})
    assert isinstance(made, TuneBOHB)
    with pytest.raises(ConfigError, match="use one of random, variant_generator, optuna, bohb"):
        create_searcher("bobh")


def test_paused_trials_do_not_count_against_the_limit() -> None:
    algorithm = search(max_concurrent=2)
    suggest(algorithm, 0)
    suggest(algorithm, 1)
    assert algorithm.suggest(2, "t2") is None
    report(algorithm, 0, 1, 0.5, pause=True)
    state = algorithm.get_state()
    algorithm = search(max_concurrent=2)
    algorithm.set_state(json.loads(json.dumps(state)))
    suggest(algorithm, 2)
    assert algorithm.suggest(3, "t3") is None
    report(algorithm, 0, 2, 0.5)
    algorithm.on_trial_complete("t2", None, error=True)
    assert algorithm.suggest(3, "t3") is None, "the first trial runs again"
    algorithm.on_trial_complete("t0", None, error=True)
    suggest(algorithm, 3)


# --- searches -------------------------------------------------------------------------------------


def test_bohb_finds_better_values_than_random_search() -> None:
    def curves(config: dict[str, Any], step: int) -> dict[str, Any]:
        return {"loss": sum((value - 0.3) ** 2 for value in config.values()) + 1 / step}

    space = {name: uniform(0, 1) for name in "abcd"}
    found: dict[str, list[float]] = {"random": [], "bohb": []}
    for seed in range(3):
        for name, values in found.items():
            made = simulate(
                HyperBandForBOHB(max_t=9, reduction_factor=3), name, curves, param_space=space,
                metric="loss", mode="min", num_samples=80, workers=4, seed=seed,
            )  # fmt: skip
            values.append(min(one.metrics["loss"] for one in made.results) - 1 / 9)
    assert sum(found["bohb"]) < 0.7 * sum(found["random"])


def test_simulated_search_is_repeatable() -> None:
    def run() -> list[dict[str, Any]]:
        made = simulate(
            HyperBandForBOHB(max_t=9),
            "bohb",
            lambda config, step: {"loss": random.Random(f"{config['x']} {step}").random()},
            param_space=LINE, metric="loss", mode="min", num_samples=40, workers=3,
        )  # fmt: skip
        return [one.config for one in made.trials]

    assert run() == run()


def test_optuna_logs_nothing_for_a_search(capsys: pytest.CaptureFixture[str]) -> None:
    before = optuna.logging.get_verbosity()
    halve(search(SPACE), 0)
    assert capsys.readouterr() == ("", "")
    assert optuna.logging.get_verbosity() == before
