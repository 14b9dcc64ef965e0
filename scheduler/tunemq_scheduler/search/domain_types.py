"""The domains of a search space: small frozen classes that draw values.

They hold bounds that `domains` has checked, and draw from a `random.Random` that the caller seeds.
They need only the standard library, so that importing TuneMQ does not import numpy.
"""

from __future__ import annotations

import math
import random
from abc import ABC, abstractmethod
from collections.abc import Callable
from dataclasses import dataclass
from decimal import Decimal
from typing import Any

from tunemq_scheduler.search.same_values import same


class Domain(ABC):
    """Base class of values that differ from trial to trial."""

    __slots__ = ()

    @abstractmethod
    def sample(self, rng: random.Random) -> Any:
        """Draw one value; the same generator state gives the same value."""

    @abstractmethod
    def contains(self, value: Any) -> bool:
        """Return whether `sample` could return ``value``; ignores quantisation."""


def _is_real(value: Any) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool)


def multiple_of(q: float, index: int) -> float:
    """Return ``index * q`` without the extra digits of binary fractions: 3 times 0.1 is 0.3."""
    return float(Decimal(repr(q)) * index)


def index_above(bound: float, q: float) -> int:
    """Return the index of the lowest multiple of ``q`` that is not below ``bound``."""
    return math.ceil(Decimal(repr(bound)) / Decimal(repr(q)))


def index_below(bound: float, q: float) -> int:
    """Return the index of the highest multiple of ``q`` that is not above ``bound``."""
    return math.floor(Decimal(repr(bound)) / Decimal(repr(q)))


def _log_uniform(rng: random.Random, lower: float, upper: float) -> float:
    value = math.exp(rng.uniform(math.log(lower), math.log(upper)))
    return min(max(value, lower), upper)  # exp(log(x)) may miss x by a rounding error


@dataclass(frozen=True, slots=True)
class Float(Domain):
    """A real number in [lower, upper]; with ``q``, a multiple of ``q``."""

    lower: float
    upper: float
    log: bool = False
    q: float | None = None

    def sample(self, rng: random.Random) -> float:
        """Draw a number, uniformly or log-uniformly."""
        if self.q is None:
            if self.log:
                return _log_uniform(rng, self.lower, self.upper)
            return rng.uniform(self.lower, self.upper)
        first, last = index_above(self.lower, self.q), index_below(self.upper, self.q)
        if not self.log:
            return multiple_of(self.q, rng.randint(first, last))
        value = _log_uniform(rng, first * self.q, last * self.q)
        return multiple_of(self.q, min(max(round(value / self.q), first), last))

    def contains(self, value: Any) -> bool:
        """Return whether ``value`` is a number within the bounds."""
        return _is_real(value) and self.lower <= value <= self.upper


@dataclass(frozen=True, slots=True)
class Integer(Domain):
    """An integer in [lower, last], both included; with ``q`` above 1, a multiple of ``q``."""

    lower: int
    last: int
    log: bool = False
    q: int = 1

    def sample(self, rng: random.Random) -> int:
        """Draw a number, uniformly or log-uniformly."""
        first, last = -(-self.lower // self.q), self.last // self.q
        if not self.log:
            return self.q * rng.randint(first, last)
        # Each index owns the interval up to the next one, so that the last index is possible, too.
        return self.q * min(int(_log_uniform(rng, first, last + 1)), last)

    def contains(self, value: Any) -> bool:
        """Return whether ``value`` is an integer within the bounds."""
        return _is_real(value) and self.lower <= value <= self.last and value == int(value)


@dataclass(frozen=True, slots=True)
class Normal(Domain):
    """A normally distributed number; with ``q``, rounded to a multiple of ``q``."""

    mean: float
    sd: float
    q: float | None = None

    def sample(self, rng: random.Random) -> float:
        """Draw a number, which has no bounds."""
        value = rng.normalvariate(self.mean, self.sd)
        return value if self.q is None else multiple_of(self.q, round(value / self.q))

    def contains(self, value: Any) -> bool:
        """Return whether ``value`` is a finite number."""
        return _is_real(value) and math.isfinite(value)


@dataclass(frozen=True, slots=True)
class Choice(Domain):
    """One of several values, each equally likely; they may contain domains themselves."""

    categories: tuple[Any, ...]

    def sample(self, rng: random.Random) -> Any:
        """Draw one of the values."""
        return self.categories[rng.randrange(len(self.categories))]

    def contains(self, value: Any) -> bool:
        """Return whether ``value`` equals one of the values."""
        return any(same(category, value) for category in self.categories)


@dataclass(frozen=True, slots=True)
class Function(Domain):
    """A value that a function computes from the other values of the configuration.

    ``arguments`` is the number of its arguments: none, the configuration, or the configuration and
    a seeded `random.Random`.
    """

    function: Callable[..., Any]
    arguments: int

    def sample(self, rng: random.Random) -> Any:
        """Call the function with an empty configuration; a search uses `evaluate`."""
        return self.evaluate({}, rng)

    def evaluate(self, config: Any, rng: random.Random) -> Any:
        """Call the function with the number of arguments that it accepts."""
        return self.function(*(config, rng)[: self.arguments])

    def contains(self, value: Any) -> bool:  # noqa: ARG002  only the function knows
        """Return True: the function may return any value."""
        return True

    def __repr__(self) -> str:
        return f"sample_from({self.function!r})"


@dataclass(frozen=True, slots=True)
class GridSearch(Domain):
    """A grid of values; a search tries each, combined with all other grids of the space."""

    values: tuple[Any, ...]

    def sample(self, rng: random.Random) -> Any:
        """Draw one of the values; a search tries all of them instead."""
        return self.values[rng.randrange(len(self.values))]

    def contains(self, value: Any) -> bool:
        """Return whether ``value`` equals one of the values."""
        return any(same(one, value) for one in self.values)
