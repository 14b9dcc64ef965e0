"""The sampling functions: their samples, and the arguments that they reject."""

from __future__ import annotations

import math
import random
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from tunemq_scheduler.search import domains
from tunemq_shared.base.errors import SearchSpaceError

DRAWS = 400


def draw(domain: domains.Domain) -> list[Any]:
    rng = random.Random(7)
    return [domain.sample(rng) for _ in range(DRAWS)]


def test_uniform_stays_between_its_bounds() -> None:
    values = draw(domains.uniform(2, 5))
    assert all(2 <= value <= 5 for value in values)
    assert abs(sum(values) / DRAWS - 3.5) < 0.2


def test_quniform_gives_every_multiple_with_both_ends_and_no_stray_digits() -> None:
    assert set(draw(domains.quniform(0.1, 0.5, 0.1))) == {0.1, 0.2, 0.3, 0.4, 0.5}


def test_loguniform_gives_each_power_of_ten_as_many() -> None:
    values = draw(domains.loguniform(1e-4, 1e-2))
    assert all(1e-4 <= value <= 1e-2 for value in values)
    assert abs(sum(value < 1e-3 for value in values) - DRAWS / 2) < 60


def test_qloguniform_gives_multiples_of_q_within_the_bounds() -> None:
    values = draw(domains.qloguniform(0.3, 10, 0.5))
    assert all(0.3 <= value <= 10 and (value / 0.5).is_integer() for value in values)


def test_randn_has_its_mean_and_deviation() -> None:
    values = draw(domains.randn(10, 2))
    assert abs(np.mean(values) - 10) < 0.4
    assert abs(np.std(values) - 2) < 0.3


def test_qrandn_is_rounded_to_multiples_of_q() -> None:
    assert all((value / 0.25).is_integer() for value in draw(domains.qrandn(0, 1, 0.25)))


def test_randint_leaves_its_upper_bound_out() -> None:
    assert set(draw(domains.randint(1, 4))) == {1, 2, 3}


def test_qrandint_includes_its_upper_bound_unless_q_is_one() -> None:
    assert set(draw(domains.qrandint(2, 10, 4))) == {4, 8}
    assert set(draw(domains.qrandint(2, 8, 2))) == {2, 4, 6, 8}
    assert set(draw(domains.qrandint(2, 5))) == {2, 3, 4}


def test_lograndint_prefers_small_numbers_and_leaves_its_upper_bound_out() -> None:
    values = draw(domains.lograndint(1, 9))
    assert set(values) == set(range(1, 9))
    assert values.count(1) > 3 * values.count(8)


def test_qlograndint_gives_multiples() -> None:
    assert set(draw(domains.qlograndint(2, 8, 2))) == {2, 4, 6, 8}


def test_choice_gives_all_its_values() -> None:
    assert set(draw(domains.choice(["a", None, 3]))) == {"a", None, 3}


def test_integer_domains_give_integers() -> None:
    for domain in (domains.randint(0, 3), domains.qrandint(0, 9, 3), domains.lograndint(1, 5)):
        assert all(type(value) is int for value in draw(domain))


def test_domains_accept_numpy_numbers_and_arrays() -> None:
    assert type(domains.uniform(np.float32(0), np.float64(1)).lower) is float
    assert type(domains.randint(np.int64(0), np.int32(4)).last) is int
    assert [type(value) for value in domains.grid_search(np.arange(3)).values] == [int] * 3


def test_old_base_argument_is_accepted_and_changes_nothing() -> None:
    assert domains.loguniform(1e-4, 1e-1, 10) == domains.loguniform(1e-4, 1e-1)


def test_domains_with_the_same_arguments_are_equal() -> None:
    assert domains.uniform(0, 1) == domains.uniform(0.0, 1.0)
    assert domains.choice([1, 2]) != domains.choice([2, 1])


def test_sampling_function_gets_as_many_arguments_as_it_needs() -> None:
    rng = random.Random(1)
    assert domains.sample_from(lambda: 3).sample(rng) == 3
    assert domains.sample_from(lambda config: {**config}).sample(rng) == {}
    assert domains.sample_from(lambda config, k=5: k).sample(rng) == 5
    assert domains.sample_from(lambda config, rng: rng).sample(rng) is rng
    assert domains.sample_from(lambda *args: len(args)).sample(rng) == 1


@pytest.mark.parametrize(
    ("make", "words"),
    [
        (lambda: domains.uniform(1, 0), ["uniform", "1.0", "0.0", "swap"]),
        (lambda: domains.uniform(1, 1), ["uniform", "constant"]),
        (lambda: domains.uniform("0", 1), ["uniform", "lower='0'", "number"]),
        (lambda: domains.loguniform("1e-4", 1), ["loguniform", "YAML", "1.0e-4"]),
        (lambda: domains.uniform(0, math.inf), ["uniform", "upper=inf", "finite"]),
        (lambda: domains.uniform(True, 3), ["uniform", "lower=True", "number"]),
        (lambda: domains.loguniform(0, 1), ["loguniform", "above 0", "logarithm"]),
        (lambda: domains.loguniform(-4, -1), ["loguniform", "not their logarithms"]),
        (lambda: domains.quniform(0, 1, 0), ["quniform", "q=0", "above 0"]),
        (lambda: domains.quniform(0.1, 0.2, 0.5), ["quniform", "multiple of 0.5", "smaller"]),
        (lambda: domains.qloguniform(0, 1, 0.1), ["qloguniform", "above 0"]),
        (lambda: domains.randn(0, 0), ["randn", "sd=0"]),
        (lambda: domains.qrandn(0, 1, -1), ["qrandn", "q=-1"]),
        (lambda: domains.randint(0, 1.5), ["randint", "upper=1.5", "uniform"]),
        (lambda: domains.randint(3, 3), ["randint", "constant"]),
        (lambda: domains.qrandint(1, 2, 5), ["qrandint", "multiple of 5"]),
        (lambda: domains.qrandint(1, 9, 0), ["qrandint", "q=0"]),
        (lambda: domains.lograndint(0, 9), ["lograndint", "above 0"]),
        (lambda: domains.choice([]), ["choice", "no values to choose from"]),
        (lambda: domains.choice("adam"), ["choice", "'adam'", "list"]),
        (lambda: domains.choice({1, 2}), ["choice", "sorted"]),
        (lambda: domains.choice({"a": 1}), ["choice", "list"]),
        (lambda: domains.choice(3), ["choice", "3", "list"]),
        (lambda: domains.grid_search([]), ["grid_search", "no values"]),
        (lambda: domains.sample_from(3), ["sample_from", "3", "function"]),
        (lambda: domains.sample_from(lambda a, b, c: 0), ["sample_from", "partial"]),
        (lambda: domains.sample_from(lambda *, k: 0), ["sample_from", "partial"]),
    ],
)
def test_invalid_domain_argument_is_rejected_with_name_value_and_fix(
    make: Any, words: list[str]
) -> None:
    with pytest.raises(SearchSpaceError) as caught:
        make()
    assert [word for word in words if word not in str(caught.value)] == []


@given(st.floats(-1e6, 1e6), st.floats(1e-3, 1e6), st.floats(1e-3, 1e3), st.integers(0, 2**32))
def test_quantised_sample_is_within_the_bounds_and_a_multiple(
    lower: float, width: float, q: float, seed: int
) -> None:
    try:
        domain = domains.quniform(lower, lower + width, q)
    except SearchSpaceError:
        return
    value = domain.sample(random.Random(seed))
    assert domain.lower <= value <= domain.upper
    assert domain.contains(value)


@given(st.integers(1, 10**9), st.integers(1, 10**9), st.integers(1, 999), st.integers(0, 2**32))
def test_log_integer_sample_is_within_the_bounds_and_a_multiple(
    lower: int, width: int, q: int, seed: int
) -> None:
    try:
        domain = domains.qlograndint(lower, lower + width, q)
    except SearchSpaceError:
        return
    value = domain.sample(random.Random(seed))
    assert domain.lower <= value <= domain.last
    assert value % q == 0


def test_contains_distinguishes_integers_from_other_numbers() -> None:
    domain = domains.randint(0, 5)
    assert domain.contains(4)
    assert not domain.contains(5)
    assert not domain.contains(1.5)
    assert not domain.contains(math.nan)
    assert not domain.contains(True)
    assert not domain.contains("3")
    assert not domains.choice([1, 2]).contains(True)
