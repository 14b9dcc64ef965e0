"""Optuna as a searcher: conversion of spaces, seeds, results passed on, and resuming."""

from __future__ import annotations

import builtins
import json
import math
from collections.abc import Callable
from typing import Any

import optuna
import pytest

from tunemq_scheduler.search import (
    Searcher,
    SearchGenerator,
    Suggestion,
    choice,
    create_searcher,
    grid_search,
    lograndint,
    loguniform,
    make_searcher,
    qlograndint,
    qloguniform,
    qrandint,
    quniform,
    randint,
    randn,
    sample_from,
    uniform,
)
from tunemq_scheduler.search.optuna.optuna_search import OptunaSearch
from tunemq_scheduler.search.optuna.optuna_space import ConfigMismatch, parameters
from tunemq_shared.base.errors import ConfigError, SearchSpaceError

SPACE = {
    "lr": loguniform(1e-4, 1e-1),
    "net": {"width": randint(1, 64), "act": choice(["relu", "tanh"])},
    "fixed": 3,
    "opt": choice([{"kind": "sgd", "momentum": uniform(0, 1)}, {"kind": "adam"}]),
}


def search(param_space: Any = None, num_samples: int = 50, seed: int = 1, **options: Any) -> Any:
    """Return an OptunaSearch as the loop sees it."""
    options = {"metric": "loss", "mode": "min", **options}
    space = SPACE if param_space is None else param_space
    return SearchGenerator(OptunaSearch(**options), space, num_samples, seed=seed)


def study(algorithm: Any) -> optuna.Study:
    return algorithm.searcher._study


def loss(config: dict[str, Any]) -> float:
    extra = config["opt"].get("momentum", 0.5)
    return abs(math.log10(config["lr"]) + 2) + config["net"]["width"] / 64 + extra


def run(algorithm: Any, first: int, last: int) -> list[dict[str, Any]]:
    """Run trials in pairs, as with two slots; each is completed before the next pair."""
    configs = []
    for n in range(first, last, 2):
        pair = [algorithm.suggest(k, f"t{k}").config for k in (n, n + 1)]
        for k, config in reversed([*enumerate(pair, n)]):
            algorithm.on_trial_complete(f"t{k}", {"loss": loss(config), "training_iteration": 1})
        configs += pair
    return configs


def test_optuna_finds_better_values_than_it_began_with() -> None:
    configs = run(search(num_samples=60), 0, 60)
    losses = [loss(config) for config in configs]
    assert sum(losses[-15:]) < 0.6 * sum(losses[:15])


def test_optuna_suggestions_are_configurations_with_tag_and_values() -> None:
    suggestion = search().suggest(0, "t0")
    assert suggestion.config.keys() == SPACE.keys()
    assert suggestion.config["fixed"] == 3
    assert 1e-4 <= suggestion.config["lr"] <= 1e-1
    assert 1 <= suggestion.config["net"]["width"] < 64
    assert {"lr", "net/width", "net/act", "opt/kind"} <= suggestion.evaluated_params.keys()
    assert "fixed" not in suggestion.evaluated_params
    assert suggestion.tag.startswith("0_")


def test_optuna_with_the_same_seed_and_results_gives_the_same_suggestions() -> None:
    assert run(search(), 0, 30) == run(search(), 0, 30)
    assert run(search(), 0, 6) != run(search(seed=2), 0, 6)


def test_optuna_seed_overrides_the_experiments_seed() -> None:
    own = [
        [generator.suggest(n, str(n)) for n in range(3)]
        for generator in (_with_own_seed(1), _with_own_seed(2))
    ]
    assert own[0] == own[1]


def _with_own_seed(experiment_seed: int) -> SearchGenerator:
    searcher = OptunaSearch(metric="loss", mode="min", seed=99)
    return SearchGenerator(searcher, SPACE, 9, seed=experiment_seed)


def test_resumed_optuna_search_continues_exactly() -> None:
    whole = search()
    configs = run(whole, 0, 20)
    pending = [whole.suggest(n, f"t{n}").config for n in (20, 21)]
    resumed = search()
    for n in range(0, 20, 2):
        for k in (n, n + 1):
            resumed.on_trial_restored(k, f"t{k}", configs[k])
        for k in (n + 1, n):
            resumed.on_trial_complete(f"t{k}", {"loss": loss(configs[k])})
    for n, config in zip((20, 21), pending, strict=True):
        resumed.on_trial_restored(n, f"t{n}", config)
    for algorithm in (whole, resumed):
        algorithm.on_trial_complete("t20", {"loss": 1.0})
    assert [whole.suggest(n, f"t{n}") for n in range(22, 30)] == [
        resumed.suggest(n, f"t{n}") for n in range(22, 30)
    ]


def test_resumed_optuna_search_does_not_try_its_points_again() -> None:
    points = [{"lr": 0.01}, {"lr": 0.02}]
    whole, resumed = search(points_to_evaluate=points), search(points_to_evaluate=points)
    first = whole.suggest(0, "t0").config
    resumed.on_trial_restored(0, "t0", first)
    assert first["lr"] == 0.01
    assert resumed.suggest(1, "t1") == whole.suggest(1, "t1")


@pytest.mark.parametrize("with_state", [False, True])
def test_failed_trial_that_continues_replaces_no_point(with_state: bool) -> None:
    points = [{"lr": 0.01}, {"lr": 0.02}]
    resumed = search(points_to_evaluate=points)
    first = resumed.suggest(0, "t0").config
    resumed.on_trial_complete("t0", None, error=True)
    if with_state:
        state = resumed.get_state()
        resumed = search(points_to_evaluate=points)
        resumed.set_state(json.loads(json.dumps(state)))
    resumed.on_trial_restored(0, "t0", first)
    assert resumed.suggest(1, "t1").config["lr"] == 0.02


@pytest.mark.parametrize(
    "domain",
    [
        uniform(-1, 1),
        quniform(0.05, 0.95, 0.1),
        loguniform(1e-5, 1),
        qloguniform(0.2, 9, 0.2),
        randint(-3, 4),
        qrandint(3, 21, 4),
        lograndint(1, 100),
        qlograndint(5, 100, 5),
        choice([1, True, None, "a", 2.5]),
        choice([[1, 2], (3,), {"deep": [4]}, math.nan]),
        choice([uniform(0, 1), randint(5, 9), "none"]),
        choice([{"a": choice([1, 2])}, {"a": uniform(7, 8), "b": [randint(0, 3)]}]),
    ],
    ids=repr,
)
def test_optuna_values_of_each_domain_are_in_it_and_converted_back_exactly(domain: Any) -> None:
    algorithm = search({"x": {"y": domain}})
    for n in range(15):
        config = algorithm.suggest(n, f"t{n}").config
        asked = study(algorithm).trials[n].params
        assert parameters({"x": {"y": domain}}, config) == asked
        if not hasattr(domain, "categories"):
            assert domain.contains(config["x"]["y"])


def test_optuna_names_of_nested_parameters_are_joined_by_slashes() -> None:
    algorithm = search()
    algorithm.suggest(0, "t0")
    names = set(study(algorithm).trials[0].params)
    assert {"lr", "net/width", "net/act", "opt"} <= names <= {
        "lr", "net/width", "net/act", "opt", "opt[0]/momentum",
    }  # fmt: skip


def test_functions_of_other_values_are_evaluated_after_optuna() -> None:
    space = {"a": uniform(0, 1), "b": sample_from(lambda config: config["a"] * 2)}
    config = search(space).suggest(0, "t0").config
    assert config["b"] == config["a"] * 2


def test_trial_that_failed_or_has_no_finite_value_is_failed_in_optuna() -> None:
    algorithm = search()
    for n in range(5):
        algorithm.suggest(n, f"t{n}")
    algorithm.on_trial_complete("t0", {"loss": 1.0})
    algorithm.on_trial_complete("t1", {"loss": 1.0}, error=True)
    algorithm.on_trial_complete("t2", {"loss": math.nan})
    algorithm.on_trial_complete("t3", None, error=True)
    algorithm.on_trial_complete("t4", {"other": 1.0})
    assert [trial.state.name for trial in study(algorithm).trials] == ["COMPLETE"] + ["FAIL"] * 4


@pytest.mark.parity(66)
def test_trial_stopped_early_counts_with_its_last_result_in_optuna() -> None:
    algorithm = search()
    algorithm.suggest(0, "t0")
    algorithm.on_trial_complete("t0", {"loss": 0.5}, stopped_early=True)
    assert study(algorithm).trials[0].value == 0.5


def test_optuna_ignores_a_repeated_end_and_one_of_an_unknown_trial() -> None:
    algorithm = search()
    algorithm.suggest(0, "t0")
    for trial in ("t0", "t0", "t9"):
        algorithm.on_trial_complete(trial, {"loss": 0.5})
    assert len(study(algorithm).trials) == 1


def test_optuna_metric_may_be_nested_and_maximised() -> None:
    algorithm = search(metric="eval/acc", mode="max")
    algorithm.suggest(0, "t0")
    algorithm.on_trial_complete("t0", {"eval": {"acc": 0.9}})
    assert study(algorithm).best_value == 0.9
    assert study(algorithm).direction == optuna.study.StudyDirection.MAXIMIZE


def test_optuna_metric_and_mode_default_to_the_experiments() -> None:
    searcher, _ = make_searcher("optuna")
    algorithm = SearchGenerator(searcher, SPACE, 3, metric="loss", mode="min")
    assert algorithm.required_metrics == ("loss",)
    assert not algorithm.wants_results
    assert algorithm.total == 3


def test_optuna_ends_after_num_samples() -> None:
    algorithm = search(num_samples=1)
    assert isinstance(algorithm.suggest(0, "t0"), Suggestion)
    assert algorithm.suggest(1, "t1") is Searcher.FINISHED


def test_optuna_optimises_several_metrics_together() -> None:
    algorithm = search({"a": uniform(0, 1)}, metric=["x", "y"], mode=["min", "max"])
    for n in range(14):
        a = algorithm.suggest(n, f"t{n}").config["a"]
        algorithm.on_trial_complete(f"t{n}", {"x": a, "y": a * a})
    assert study(algorithm).trials[0].values is not None
    assert algorithm.required_metrics == ("x", "y")


def test_optuna_tries_complete_and_partial_points_first() -> None:
    points = [
        {"lr": 0.01, "net": {"width": 5, "act": "tanh"}, "opt": {"kind": "adam"}},
        {"net/width": 6},
    ]
    algorithm = search(points_to_evaluate=points)
    first, second = (algorithm.suggest(n, f"t{n}").config for n in range(2))
    assert first == {**points[0], "fixed": 3}
    assert second["net"]["width"] == 6


def test_optuna_does_not_try_points_with_known_values() -> None:
    points = [{"a": 0.25}, {"a": 0.5}]
    algorithm = search({"a": uniform(0, 1)}, points_to_evaluate=points, evaluated_rewards=[3, 4])
    assert [trial.value for trial in study(algorithm).trials] == [3, 4]
    assert algorithm.suggest(0, "t0").config["a"] not in (0.25, 0.5)


def test_optuna_accepts_a_space_of_optuna_distributions() -> None:
    space = {
        "net/lr": optuna.distributions.FloatDistribution(1e-4, 1, log=True),
        "layers": optuna.distributions.IntDistribution(1, 3),
    }
    algorithm = search({"fixed": 1}, space=space, points_to_evaluate=[{"layers": 2}])
    config = algorithm.suggest(0, "t0").config
    assert config["layers"] == 2
    assert 1e-4 <= config["net"]["lr"] <= 1
    assert config["fixed"] == 1
    resumed = search({"fixed": 1}, space=space, points_to_evaluate=[{"layers": 2}])
    resumed.on_trial_restored(0, "t0", config)
    assert resumed.suggest(1, "t1") == algorithm.suggest(1, "t1")


def test_optuna_accepts_a_space_as_a_function_of_the_trial() -> None:
    def space(trial: optuna.Trial) -> dict[str, Any]:
        kind = trial.suggest_categorical("kind", ["deep", "flat"])
        if kind == "deep":
            trial.suggest_int("net/layers", 2, 4)
        return {"net/bias": True}

    algorithm, resumed = (search({"fixed": 1}, space=space) for _ in range(2))
    configs = [algorithm.suggest(n, f"t{n}").config for n in range(12)]
    for n, config in enumerate(configs):
        assert ("layers" in config["net"]) == (config["kind"] == "deep")
        assert config["net"]["bias"] is True
        resumed.on_trial_restored(n, f"t{n}", config)
    for each in (algorithm, resumed):
        for n in range(12):
            each.on_trial_complete(f"t{n}", {"loss": float(n)})
    assert resumed.suggest(12, "t12") == algorithm.suggest(12, "t12")


def test_optuna_accepts_another_sampler() -> None:
    sampler = optuna.samplers.RandomSampler(seed=3)
    algorithm = search(sampler=sampler)
    algorithm.suggest(0, "t0")
    assert study(algorithm).sampler is sampler


LINE = {"x": uniform(0, 1)}
SAMPLERS: dict[str, Callable[[], Any]] = {
    "random": lambda: optuna.samplers.RandomSampler(seed=3),
    "tpe": lambda: optuna.samplers.TPESampler(seed=3, n_startup_trials=3),
    "nsga": lambda: optuna.samplers.NSGAIISampler(seed=3, population_size=4),
    "grid": lambda: optuna.samplers.GridSampler({"x": [n / 20 for n in range(14)]}, seed=3),
}


def own_values(trial: optuna.Trial) -> dict[str, Any]:
    return {"n": 2 ** trial.suggest_int("n", 1, 5) + 40}


def by_number(trial: optuna.Trial) -> None:
    trial.suggest_int("n", 1, 5 if trial.number < 3 else 50)


def by_study(trial: optuna.Trial) -> None:
    trial.suggest_int("n", 1, 5 + len(trial.study.trials))


OWN: list[Any] = [
    *(pytest.param(LINE, lambda make=make: {"sampler": make()}, id=name)
      for name, make in SAMPLERS.items()),
    *(pytest.param({"fixed": 1}, lambda space=space: {"space": space}, id=space.__name__)
      for space in (own_values, by_number, by_study)),
]  # fmt: skip


@pytest.mark.parametrize("with_state", [False, True])
@pytest.mark.parametrize(("space", "options"), OWN)
def test_optuna_with_the_users_sampler_or_function_continues_exactly_after_restart(
    space: Any,
    options: Callable[[], dict[str, Any]],
    with_state: bool,
    caplog: pytest.LogCaptureFixture,
) -> None:
    whole, resumed = search(space, **options()), search(space, **options())
    configs = []
    for n in range(8):
        configs.append(whole.suggest(n, f"t{n}").config)
        resumed.on_trial_restored(n, f"t{n}", configs[n])
        if n > 0:
            for each in (whole, resumed):
                each.on_trial_complete(f"t{n - 1}", {"loss": n / 9}, error=n == 3)
        if n == 4 and with_state and (state := resumed.get_state()) is not None:
            resumed = search(space, **options())
            resumed.set_state(json.loads(json.dumps(state)))
    for each in (whole, resumed):
        each.on_trial_restored(2, "t2", configs[2], is_continued=True)
        each.on_trial_complete("t2", {"loss": 0.1})
    further = [whole.suggest(n, f"t{n}").config for n in range(8, 12)]
    assert [resumed.suggest(n, f"t{n}").config for n in range(8, 12)] == further
    assert study(resumed).trials[2].params == study(resumed).trials[8].params
    assert not caplog.records


def test_optuna_sampler_that_suggests_other_trials_after_restart_begins_with_a_new_seed(
    caplog: pytest.LogCaptureFixture,
) -> None:
    first, resumed = (
        search(LINE, sampler=optuna.samplers.RandomSampler(seed=3), points_to_evaluate=points)
        for points in ([{"x": 0.5}], [])
    )
    configs = [first.suggest(n, f"t{n}").config for n in range(9)]
    for n, config in enumerate(configs[:4]):
        resumed.on_trial_restored(n, f"t{n}", config)
    resumed.on_trial_complete("t0", {"loss": 0.5})
    assert [trial.params for trial in study(resumed).trials] == configs[:4]
    assert study(resumed).trials[0].value == 0.5
    assert resumed.suggest(4, "t4").config not in configs
    assert caplog.text.count("RandomSampler suggests other configurations") == 1


def test_optuna_search_ends_with_its_grid() -> None:
    algorithm = search(LINE, sampler=optuna.samplers.GridSampler({"x": [0.25, 0.5]}))
    tried = set()
    for n in range(2):
        tried.add(algorithm.suggest(n, f"t{n}").config["x"])
        algorithm.on_trial_complete(f"t{n}", {"loss": 1.0})
    assert tried == {0.25, 0.5}
    assert algorithm.suggest(2, "t2") is Searcher.FINISHED


def test_optuna_search_ends_if_its_function_stops_the_study() -> None:
    def space(trial: optuna.Trial) -> None:
        trial.suggest_int("n", 1, 5)
        if trial.number == 1:
            trial.study.stop()

    algorithm = search({}, space=space)
    for n in range(2):
        assert isinstance(algorithm.suggest(n, f"t{n}"), Suggestion)
    state = json.loads(json.dumps(algorithm.get_state()))
    resumed = search({}, space=space)
    resumed.set_state(state)
    assert algorithm.suggest(2, "t2") is resumed.suggest(2, "t2") is Searcher.FINISHED


def changed(trial: optuna.Trial) -> None:
    raise KeyError("a")


@pytest.mark.parametrize(
    ("options", "config"),
    [({}, {"x": 7.0}), ({"space": changed}, {"x": 0.5}), ({"space": own_values}, {"n": 39})],
)
def test_optuna_skips_a_trial_of_another_space_with_a_warning(
    options: dict[str, Any], config: dict[str, Any], caplog: pytest.LogCaptureFixture
) -> None:
    algorithm = search({} if options else LINE, **options)
    for n in range(2):
        algorithm.on_trial_restored(n, f"t{n}", config)
        algorithm.on_trial_complete(f"t{n}", {"loss": 1.0})
    assert caplog.text.count("OptunaSearch cannot restore") == 1
    assert study(algorithm).trials == []


def test_optuna_prints_nothing_on_the_terminal(capfd: pytest.CaptureFixture[str]) -> None:
    before = optuna.logging.get_verbosity()
    run(search(), 0, 14)
    assert capfd.readouterr() == ("", "")
    assert optuna.logging.get_verbosity() == before


def test_missing_optuna_names_the_installation(monkeypatch: pytest.MonkeyPatch) -> None:
    real = builtins.__import__

    def none(name: str, *args: Any, **kwargs: Any) -> Any:
        if name == "optuna":
            raise ImportError(name)
        return real(name, *args, **kwargs)

    monkeypatch.setattr(builtins, "__import__", none)
    with pytest.raises(ConfigError, match=r"pip install 'optuna>=4'"):
        create_searcher("optuna")


@pytest.mark.parametrize(
    ("make", "error", "words"),
    [
        (lambda: search(mode=None), ConfigError, "mode is missing"),
        (lambda: search(metric=["a", "b"]), ConfigError, "as many modes as metrics"),
        (lambda: search({"a": 1}), SearchSpaceError, "nothing to search"),
        (lambda: search({"a": grid_search([1])}), SearchSpaceError, "grid_search; use choice"),
        (lambda: search({"o": {"a": randn()}}), SearchSpaceError, "o/a.*use uniform or loguniform"),
        (lambda: search({"o": choice([randn(), 1])}), SearchSpaceError, "uniform"),
        (
            lambda: search(space={"b": uniform(0, 1)}),
            SearchSpaceError,
            "varies 'lr'.*has its own space",
        ),
        (
            lambda: search({"a": uniform(0, 1)}, points_to_evaluate=[{"a": 2}]),
            SearchSpaceError,
            r"points_to_evaluate\[0\].*a is 2.*outside",
        ),
        (
            lambda: search({"a": choice(["x"])}, points_to_evaluate=[{"a": "y"}]),
            SearchSpaceError,
            r"\['x'\]",
        ),
        (
            lambda: search(points_to_evaluate=[{}], evaluated_rewards=[1, 2]),
            ConfigError,
            "1 points_to_evaluate and 2",
        ),
        (
            lambda: search(space={"a": optuna.distributions.IntDistribution(1, 2), "b": 3}),
            SearchSpaceError,
            "b is not a distribution",
        ),
        (
            lambda: search({}, space=lambda trial: 3).suggest(0, "t"),
            SearchSpaceError,
            "returned 3",
        ),
        (lambda: OptunaSearch(sampler="tpe"), ConfigError, "'tpe'"),
        (
            lambda: OptunaSearch(sampler=optuna.samplers.RandomSampler(), seed=1),
            ConfigError,
            "pass the seed to the sampler",
        ),
        (lambda: OptunaSearch().suggest("t"), ConfigError, "before set_search_properties"),
    ],
)
def test_optuna_search_with_invalid_input_names_it(
    make: Any, error: type[Exception], words: str
) -> None:
    with pytest.raises(error, match=words):
        make()


def test_configuration_that_lacks_a_part_does_not_match_the_space() -> None:
    with pytest.raises(ConfigMismatch, match="net/width is missing"):
        parameters({"net": {"width": randint(1, 4)}}, {"net": {}})
