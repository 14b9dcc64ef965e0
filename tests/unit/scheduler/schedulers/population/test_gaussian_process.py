"""The Gaussian process of PB2: posteriors in closed form, and what the bandit chooses."""

from __future__ import annotations

import itertools
import math

import numpy as np
import pytest
from sklearn.gaussian_process import GaussianProcessRegressor
from sklearn.gaussian_process.kernels import RBF, ConstantKernel

from tunemq_scheduler.schedulers.population import gaussian_process as gp
from tunemq_scheduler.schedulers.population.gaussian_process import (
    Bandit,
    Kernel,
    Points,
    Posterior,
    Step,
    fit,
)

KERNEL = Kernel(length=0.5, forgetting=0.2, noise=0.1)
NONE = Points(np.zeros(0), np.zeros((0, 1)))


def points(*pairs: tuple[float, float]) -> Points:
    """Return points of one dimension: a time and an input each."""
    return Points(np.array([one[0] for one in pairs]), np.array([[one[1]] for one in pairs]))


def covariance(one: tuple[float, float], other: tuple[float, float]) -> float:
    """Return the covariance of the function, as the papers write it."""
    age, distance = abs(one[0] - other[0]), one[1] - other[1]
    return 0.9 * math.exp(-(distance**2) / (2 * 0.5**2)) * (1 - 0.2) ** (age / 2)


def test_posterior_of_two_observations_equals_the_closed_form() -> None:
    first, second, there = (0.0, 0.2), (3.0, 0.6), (4.0, 0.5)
    means, deviations = Posterior(
        KERNEL, points(first, second), np.array([1.5, -0.5]), NONE
    ).predict(points(there))
    shared, one, other = (
        covariance(first, second),
        covariance(there, first),
        covariance(there, second),
    )
    determinant = 1 - shared**2  # each observation has the variance 0.9 + 0.1
    mean = (one * (1.5 + shared * 0.5) + other * (-0.5 - shared * 1.5)) / determinant
    variance = 0.9 - (one**2 - 2 * shared * one * other + other**2) / determinant
    assert means[0] == pytest.approx(mean)
    assert deviations[0] == pytest.approx(math.sqrt(variance))


def test_pending_observation_narrows_the_deviation_as_a_known_one_and_keeps_the_mean() -> None:
    known, waited, there = (0.0, 0.2), (1.0, 0.9), points((1.0, 0.8), (1.0, 0.1))
    values = np.array([1.0])
    alone = Posterior(KERNEL, points(known), values, NONE).predict(there)
    pending = Posterior(KERNEL, points(known), values, points(waited)).predict(there)
    both = Posterior(KERNEL, points(known, waited), np.array([1.0, 7.0]), NONE).predict(there)
    assert pending[0] == pytest.approx(alone[0])
    assert pending[1] == pytest.approx(both[1])
    assert pending[1][0] < alone[1][0] - 0.1


def test_posterior_without_forgetting_equals_that_of_scikit_learn() -> None:
    rng = np.random.default_rng(1)
    inputs, values, there = rng.random((20, 3)), rng.standard_normal(20), rng.random((9, 3))
    kernel = Kernel(0.7, 0.0, 0.3)
    told = Points(np.arange(20.0), inputs)
    none = Points(np.zeros(0), np.zeros((0, 3)))
    means, deviations = Posterior(kernel, told, values, none).predict(Points(np.ones(9), there))
    theirs = GaussianProcessRegressor(ConstantKernel(0.7) * RBF(0.7), alpha=0.3, optimizer=None)
    theirs.fit(inputs, values)
    expected = theirs.predict(there, return_std=True)
    assert means == pytest.approx(expected[0])
    assert deviations == pytest.approx(expected[1])


def test_fit_takes_the_kernel_of_the_greatest_marginal_likelihood() -> None:
    rng = np.random.default_rng(2)
    told = Points(np.repeat(np.arange(10.0), 3), rng.random((30, 2)))
    drawn = Kernel(0.6, 0.1, 0.1)
    values = np.linalg.cholesky(drawn.observed(told)) @ rng.standard_normal(30)

    def likelihood(kernel: Kernel) -> float:
        matrix = kernel.observed(told)
        return -0.5 * float(
            values @ np.linalg.inv(matrix) @ values + np.linalg.slogdet(matrix).logabsdet
        )

    grid = itertools.product(gp._LENGTHS, gp._FORGETTING, gp._NOISE)
    assert fit(told, values) == max((Kernel(*one) for one in grid), key=likelihood)


def test_bandit_chooses_near_the_greatest_value_of_many_observations() -> None:
    rng = np.random.default_rng(3)
    steps = [
        Step(0.0, 5.0, [x, y], -((x - 0.7) ** 2) - (y - 0.2) ** 2) for x, y in rng.random((80, 2))
    ]
    chosen = Bandit(steps).propose(1.0, 5.0, [], seed=4)
    assert chosen == pytest.approx([0.7, 0.2], abs=0.15)


def test_bandit_follows_a_function_that_changes_with_time() -> None:
    rng = np.random.default_rng(4)
    steps = [
        Step(time, 0.0, [x], -((x - (0.2 if time < 30 else 0.8)) ** 2))
        for time in range(40)
        for x in rng.random(3)
    ]
    assert Bandit(steps).propose(40.0, 0.0, [], seed=1)[0] == pytest.approx(0.8, abs=0.2)
    assert Bandit(steps[:60]).propose(20.0, 0.0, [], seed=1)[0] == pytest.approx(0.2, abs=0.2)


def test_bandit_looks_elsewhere_while_an_observation_is_pending() -> None:
    steps = [Step(0.0, 0.0, [0.5], 1.0), Step(0.0, 0.0, [0.4], 0.0), Step(0.0, 0.0, [0.6], 0.0)]
    bandit = Bandit(steps)
    first = bandit.propose(1.0, 0.0, [], seed=5)
    second = bandit.propose(1.0, 0.0, [Step(1.0, 0.0, first)] * 5, seed=5)
    assert abs(first[0] - second[0]) > 0.3


@pytest.mark.parametrize("values", [[1.0], [2.0, 2.0, 2.0]])
def test_bandit_without_differences_chooses_inputs_within_the_bounds(values: list[float]) -> None:
    bandit = Bandit([Step(0.0, 3.0, [0.5, 1.7], one) for one in values])
    chosen = bandit.propose(0.0, 3.0, [], seed=6)
    assert all(0 <= one <= 1 for one in chosen)
    assert chosen == bandit.propose(0.0, 3.0, [], seed=6)
