"""A Gaussian process bandit: proposes the inputs that promise the greatest improvement.

The function changes with time. Its kernel is that of I. Bogunovic, J. Scarlett, V. Cevher:
Time-Varying Gaussian Process Bandit Optimization, AISTATS 2016 (arXiv:1601.06650), section 2.1.
Observations whose values are still to come narrow the confidence bounds, as in T. Desautels, A.
Krause, J. Burdick: Parallelizing Exploration-Exploitation Tradeoffs in Gaussian Process Bandit
Optimization, JMLR 15 (2014), section 3.2.

Needs numpy.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Sequence
from typing import Any, Final, NamedTuple

import numpy as np
from numpy.typing import NDArray
from threadpoolctl import threadpool_limits

Array = NDArray[np.floating[Any]]

#: The parameters that `fit` compares.
_LENGTHS: Final = (0.15, 0.3, 0.6, 1.2, 2.4)
_FORGETTING: Final = (0.0, 0.02, 0.1, 0.3)
_NOISE: Final = (0.01, 0.1, 0.3, 0.6, 0.9)
#: How many random inputs are compared, and how far from the best of them further ones are drawn.
_CANDIDATES: Final = 512
_RADII: Final = (0.1, 0.03, 0.01)


class Points(NamedTuple):
    """Where and when a function is observed.

    Attributes:
        times: shape (n,).
        inputs: shape (n, dimensions).
    """

    times: Array
    inputs: Array

    def and_those(self, others: Points) -> Points:
        """Return both together."""
        times = np.concatenate((self.times, others.times))
        return Points(times, np.concatenate((self.inputs, others.inputs)))


class Kernel(NamedTuple):
    """The prior of a function whose observations have a variance of 1.

    Attributes:
        length: the length scale of the squared exponential kernel of the inputs.
        forgetting: epsilon, from 0 to 1: two observations that are one unit of time apart are less
            alike by the factor of the square root of 1 - epsilon.
        noise: the part of the variance that is noise, above 0 and below 1.
    """

    length: float
    forgetting: float
    noise: float

    def correlations(self, points: Points, others: Points) -> Array:
        """Return how alike the function is at points and at others; shape (points, others)."""
        squares = ((points.inputs[:, None, :] - others.inputs[None, :, :]) ** 2).sum(axis=2)
        ages = np.abs(points.times[:, None] - others.times[None, :])
        alike: Array = np.exp(-squares / (2 * self.length**2))
        return alike * (1 - self.forgetting) ** (ages / 2)

    def covariances(self, points: Points, others: Points) -> Array:
        """Return the covariances of the function at points and at others."""
        return (1 - self.noise) * self.correlations(points, others)

    def observed(self, points: Points) -> Array:
        """Return the covariances of observations, which have noise."""
        return self.covariances(points, points) + self.noise * np.eye(len(points.times))


class Posterior:
    """What observations tell about a function.

    Args:
        kernel: the prior.
        points: the observations.
        values: what was observed there, shape (n,), with mean 0.
        pending: observations whose values are still to come: they make the function more certain,
            and leave its mean as it is.
    """

    def __init__(self, kernel: Kernel, points: Points, values: Array, pending: Points) -> None:
        self._kernel, self._points, self._all = kernel, points, points.and_those(pending)
        self._weights: Array = np.linalg.solve(kernel.observed(points), values)
        self._whitening: Array = np.linalg.inv(np.linalg.cholesky(kernel.observed(self._all)))

    def predict(self, points: Points) -> tuple[Array, Array]:
        """Return the function's means and standard deviations at points."""
        means: Array = self._kernel.covariances(points, self._points) @ self._weights
        known = self._kernel.covariances(points, self._all) @ self._whitening.T
        variances = (1 - self._kernel.noise) - (known**2).sum(axis=1)
        return means, np.sqrt(np.maximum(variances, 0))


def fit(points: Points, values: Array) -> Kernel:
    """Return the kernel with the greatest marginal likelihood among those of a grid."""
    best, found = -math.inf, Kernel(_LENGTHS[0], _FORGETTING[0], _NOISE[0])
    for length, forgetting in itertools.product(_LENGTHS, _FORGETTING):
        # Noise changes the eigenvalues of the covariances, and leaves the eigenvectors.
        kernel = Kernel(length, forgetting, 0.0)
        sizes, directions = np.linalg.eigh(kernel.correlations(points, points))
        squares = (directions.T @ values) ** 2
        for noise in _NOISE:
            variances = (1 - noise) * np.maximum(sizes, 0) + noise
            likelihood = -float((squares / variances + np.log(variances)).sum())
            if likelihood > best:
                best, found = likelihood, kernel._replace(noise=noise)
    return found


class Step(NamedTuple):
    """An observation, or one that is still to come.

    Attributes:
        time: when.
        context: what cannot be chosen, in any unit.
        inputs: what was chosen, each about from 0 to 1.
        value: what was observed, in any unit.
    """

    time: float
    context: float
    inputs: list[float]
    value: float = 0.0


class Bandit:
    """Chooses inputs for a function of which some values are known.

    Args:
        steps: the observations, at least one.
    """

    def __init__(self, steps: Sequence[Step]) -> None:
        contexts = [one.context for one in steps]
        self._low, self._span = min(contexts), (max(contexts) - min(contexts)) or 1.0
        self._dimensions = len(steps[0].inputs)
        self._observed = self._points(steps)
        self._values = _standardized(np.array([one.value for one in steps], dtype=float))
        # More threads than one make calculations of this size slower.
        with threadpool_limits(1):
            self._kernel = fit(self._observed, self._values)

    def propose(
        self, time: float, context: float, pending: Sequence[Step], seed: int
    ) -> list[float]:
        """Return the inputs from 0 to 1 with the greatest upper confidence bound.

        Args:
            time: the time for which inputs are chosen.
            context: the context at that time.
            pending: observations whose values are still to come.
            seed: determines which inputs are compared.
        """
        rng = np.random.default_rng(seed)
        with threadpool_limits(1):
            known = (self._kernel, self._observed, self._values)
            posterior = Posterior(*known, self._points(pending))
            inputs = rng.random((_CANDIDATES, self._dimensions))
            best = inputs[np.argmax(self._bounds(posterior, time, context, inputs))]
            for radius in _RADII:
                moves = radius * rng.uniform(-1, 1, (_CANDIDATES // 4, self._dimensions))
                inputs = np.vstack((best, np.clip(best + moves, 0, 1)))
                best = inputs[np.argmax(self._bounds(posterior, time, context, inputs))]
        return [float(one) for one in best]

    def _bounds(self, posterior: Posterior, time: float, context: float, inputs: Array) -> Array:
        """Return the upper confidence bounds for these inputs."""
        count = len(inputs)
        contexts = np.full((count, 1), (context - self._low) / self._span)
        points = Points(np.full(count, time), np.hstack((contexts, inputs)))
        means, deviations = posterior.predict(points)
        return means + math.sqrt(0.2 + math.log(max(1.0, 0.4 * len(self._values)))) * deviations

    def _points(self, steps: Sequence[Step]) -> Points:
        inputs = [[(one.context - self._low) / self._span, *one.inputs] for one in steps]
        shape = (len(steps), 1 + self._dimensions)
        times = np.array([one.time for one in steps], dtype=float)
        return Points(times, np.array(inputs, dtype=float).reshape(shape))


def _standardized(values: Array) -> Array:
    """Return the values with mean 0 and variance 1, and at most 2 away from 0."""
    spread = float(values.std())
    scaled: Array = (values - values.mean()) / (spread or 1.0)
    return np.clip(scaled, -2, 2)
