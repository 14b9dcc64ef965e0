"""Grid and random search: number and order of the configurations, and reproducibility."""

from __future__ import annotations

import random
import subprocess
import sys
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from tunemq_scheduler.search import (
    BasicVariantGenerator,
    ConcurrencyLimiter,
    Searcher,
    SearchGenerator,
    Suggestion,
    create_searcher,
    grid_search,
    make_searcher,
    randint,
    uniform,
)
from tunemq_shared.base.errors import ConfigError, SearchSpaceError

SPACE = {"a": grid_search([1, 2, 3]), "b": grid_search(["x", "y"]), "r": uniform(0, 1)}


def generator(space: dict[str, Any], num_samples: int = 1, seed: int = 0, **options: Any) -> Any:
    return SearchGenerator(BasicVariantGenerator(**options), space, num_samples, seed=seed)


def all_of(algorithm: SearchGenerator, limit: int = 1000) -> list[dict[str, Any]]:
    found = []
    for n in range(limit):
        answer = algorithm.suggest(n, str(n))
        if not isinstance(answer, Suggestion):
            break
        found.append(answer.config)
    return found


def test_grid_of_six_with_two_samples_gives_twelve_trials() -> None:
    algorithm = generator(SPACE, 2)
    found = all_of(algorithm)
    assert len(found) == algorithm.total == 12
    assert [(c["a"], c["b"]) for c in found[:6]] == [(c["a"], c["b"]) for c in found[6:]]
    assert len({c["r"] for c in found}) == 12
    assert algorithm.suggest(12, "12") is Searcher.FINISHED


def test_constant_grid_search_draws_once_for_all_combinations_of_a_sample() -> None:
    found = all_of(generator(SPACE, 2, constant_grid_search=True))
    assert len({c["r"] for c in found[:6]}) == 1
    assert len({c["r"] for c in found}) == 2


def test_space_of_constants_gives_num_samples_trials() -> None:
    assert all_of(generator({"a": 1}, 3)) == [{"a": 1}] * 3


def test_endless_search_does_not_end() -> None:
    algorithm = generator({"a": grid_search([1, 2])}, -1)
    assert algorithm.total is None
    assert [algorithm.searcher.config(n)["a"] for n in (0, 1, 2, 10**6 + 1)] == [1, 2, 1, 2]


@given(st.integers(0, 2**32), st.lists(st.integers(0, 500), max_size=8))
def test_configuration_depends_only_on_seed_and_number(seed: int, order: list[int]) -> None:
    one, other = (generator(SPACE, 100, seed).searcher for _ in range(2))
    asked = {n: one.config(n) for n in order}
    assert asked == {n: other.config(n) for n in sorted(order)}


def test_configurations_are_the_same_in_another_process() -> None:
    code = (
        "from tunemq_scheduler.search import *\n"
        "space = {'x': uniform(0, 1), 'y': choice(['p', 'q', 'r'])}\n"
        "search = SearchGenerator(BasicVariantGenerator(), space, 9, seed=5)\n"
        "print([search.suggest(n, str(n)) for n in range(9)])"
    )
    runs = {
        subprocess.run(
            [sys.executable, "-c", code],
            env={"PYTHONHASHSEED": str(seed), "PYTHONPATH": ":".join(sys.path)},
            capture_output=True, text=True, check=True,
        ).stdout
        for seed in (1, 2)
    }  # fmt: skip
    assert len(runs) == 1


def test_generator_seed_overrides_the_experiments_seed() -> None:
    space = {"r": uniform(0, 1)}
    assert all_of(generator(space, 3, seed=1)) != all_of(generator(space, 3, seed=2))
    fixed = [all_of(generator(space, 3, seed=s, random_state=9)) for s in (1, 2)]
    assert fixed[0] == fixed[1]


@pytest.mark.parametrize(
    "make",
    [lambda: random.Random(3), lambda: np.random.default_rng(3), lambda: np.random.RandomState(3)],
)
def test_random_generator_is_accepted_instead_of_a_seed(make: Any) -> None:
    space = {"r": uniform(0, 1)}
    assert all_of(generator(space, 2, random_state=make())) == all_of(
        generator(space, 2, random_state=make())
    )


def test_points_come_first_and_each_replaces_a_sample() -> None:
    space = {"a": grid_search([1, 2]), "b": randint(0, 1000)}
    points = [{"a": 2, "b": 2}, {"a": 1}, {"b": 2}]
    algorithm = generator(space, 4, points_to_evaluate=points)
    found = all_of(algorithm)
    assert len(found) == algorithm.total == 6
    assert found[0] == {"a": 2, "b": 2}
    assert found[1]["a"] == 1
    assert [(c["a"], c["b"]) for c in found[2:4]] == [(1, 2), (2, 2)]
    assert [c["a"] for c in found[4:]] == [1, 2]


def test_tag_of_a_point_has_its_values() -> None:
    space = {"a": grid_search([1, 2]), "net": {"lr": uniform(0, 1), "k": 3}}
    algorithm = generator(space, points_to_evaluate=[{"a": 2, "net": {"lr": 0.5}}])
    suggestion = algorithm.suggest(0, "t0")
    assert suggestion.tag == "0_a=2,lr=0.5000"
    assert suggestion.evaluated_params == {"a": 2, "net/lr": 0.5}
    assert suggestion.config == {"a": 2, "net": {"lr": 0.5, "k": 3}}


def test_points_beyond_the_number_of_samples_are_all_tried() -> None:
    assert len(all_of(generator({"a": uniform(0, 1)}, 1, points_to_evaluate=[{"a": 1}] * 3))) == 3


def test_points_come_first_in_an_endless_search() -> None:
    algorithm = generator({"a": grid_search([1, 2])}, -1, points_to_evaluate=[{"a": 7}])
    assert [algorithm.searcher.config(n)["a"] for n in range(5)] == [7, 1, 2, 1, 2]


def test_trial_restored_twice_takes_the_place_of_one_configuration() -> None:
    whole, resumed = generator(SPACE, 2), generator(SPACE, 2)
    first = [whole.suggest(n, f"t{n}") for n in range(3)]
    for n in (0, 1, 0):
        resumed.on_trial_restored(n, f"t{n}", first[n].config)
    assert resumed.suggest(2, "t2") == first[2]


def test_generator_in_another_experiment_starts_from_the_beginning() -> None:
    searcher = BasicVariantGenerator()
    runs = [all_of(SearchGenerator(searcher, SPACE, 1, seed=3)) for _ in range(2)]
    assert runs[0] == runs[1]
    assert len(runs[0]) == 6


def test_generator_needs_no_metric() -> None:
    algorithm = generator(SPACE)
    assert not algorithm.wants_results
    assert algorithm.required_metrics == ()


@pytest.mark.parametrize(
    ("make", "error", "words"),
    [
        (lambda: generator({}, max_concurrent=-1), ConfigError, "max_concurrent=-1"),
        (lambda: generator({}, random_state="x"), ConfigError, "random_state='x'"),
        (
            lambda: generator({"a": {"x": 1}}, points_to_evaluate=[{"a": {"y": 1}}]),
            SearchSpaceError,
            r"points_to_evaluate\[0\] sets 'a/y'.*\['a'\]",
        ),
        (lambda: generator({}, points_to_evaluate=[3]), SearchSpaceError, r"\[0\] is 3"),
        (
            lambda: create_searcher("magic"),
            ConfigError,
            "'magic'.*random, variant_generator, optuna",
        ),
        (lambda: make_searcher(5), ConfigError, "search_alg is 5"),
        (
            lambda: make_searcher(BasicVariantGenerator),
            ConfigError,
            r"make one: BasicVariantGenerator\(\)",
        ),
        (
            lambda: make_searcher(BasicVariantGenerator(max_concurrent=2), 3),
            ConfigError,
            "max_concurrent_trials is 3.*is 2",
        ),
    ],
)
def test_generator_with_invalid_input_names_it(
    make: Any, error: type[Exception], words: str
) -> None:
    with pytest.raises(error, match=words):
        make()


def test_concurrency_limit_counts_wherever_it_was_given() -> None:
    for name in ("random", "variant_generator", None):
        searcher, limit = make_searcher(name, 1)
        assert isinstance(searcher, BasicVariantGenerator)
        assert limit == 1
    assert make_searcher("random")[1] == 0
    assert make_searcher(BasicVariantGenerator(max_concurrent=2))[1] == 2
    assert make_searcher(ConcurrencyLimiter(BasicVariantGenerator(), 2), 2)[1] == 2


def test_custom_searcher_gets_the_concurrency_limit() -> None:
    class Told(Searcher):
        limit = 0

        def set_max_concurrency(self, max_concurrent: int) -> bool:
            self.limit = max_concurrent
            return True

        def suggest(self, trial_id: str) -> None:
            return None

        def on_trial_complete(self, trial_id: str, result: Any = None, error: bool = False) -> None:
            pass

    searcher = Told()
    assert make_searcher(searcher, 3) == (searcher, 3)
    assert searcher.limit == 3


def test_search_and_schedulers_import_no_large_package() -> None:
    code = (
        "import sys, tunemq_scheduler.search, tunemq_scheduler.schedulers\n"
        "import tunemq_scheduler.stopping.plateau\n"
        "print([m for m in ('optuna', 'numpy', 'celery', 'redis', 'pandas') if m in sys.modules])"
    )
    done = subprocess.run(
        [sys.executable, "-c", code],
        env={"PYTHONPATH": ":".join(sys.path)}, capture_output=True, text=True, check=True,
    )  # fmt: skip
    assert done.stdout.strip() == "[]"
