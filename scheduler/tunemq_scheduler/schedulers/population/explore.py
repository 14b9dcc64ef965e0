"""Draws a new configuration from that of a better trial: the *explore* step of PBT."""

from __future__ import annotations

import copy
import random
import re
from collections.abc import Callable, Mapping, Sequence
from typing import Any, Final

from tunemq_scheduler.search.domains import Domain
from tunemq_scheduler.search.objective import is_real
from tunemq_shared.base.errors import ConfigError
from tunemq_shared.base.failure_text import shortened
from tunemq_shared.base.safe_text import repr_of

_ADDRESS: Final = re.compile(" at 0x[0-9a-f]+")
#: The most characters of a value in a reason.
_SHOWN: Final = 100

#: By name: a domain, a function without arguments, a list or tuple of values, or a dict of these.
Mutations = Mapping[str, Any]
#: A user's function that changes a new configuration, and returns it.
CustomExplore = Callable[[dict[str, Any]], dict[str, Any]]


def check_mutations(who: str, mutations: Mutations, place: str = "hyperparam_mutations") -> None:
    """Check each mutation.

    Raises:
        ConfigError: one is of no known kind, or has no values; the message names it.
    """
    for name, mutation in mutations.items():
        where = f"{place}[{name!r}]"
        if isinstance(mutation, Mapping):
            if not mutation:
                raise ConfigError(f"{who}({where}={{}}) is empty: name the values in it.")
            check_mutations(who, mutation, where)
        elif isinstance(mutation, list | tuple):
            if not mutation:
                raise ConfigError(f"{who}({where}={mutation!r}) is empty: give it values.")
        elif not (isinstance(mutation, Domain) or callable(mutation)):
            raise ConfigError(
                f"{who}({where}={mutation!r}) is invalid: give a domain such as "
                "tune.uniform(0, 1), a list of values, a function, or a dict of these."
            )


def check_config(
    who: str, config: Mapping[str, Any], mutations: Mutations, place: str = "hyperparam_mutations"
) -> None:
    """Check that a configuration has each value that is to be mutated, and that it can be.

    Raises:
        ConfigError: it lacks one, or one is no number where a number is scaled.
    """
    for name, mutation in mutations.items():
        where = f"{place}[{name!r}]"
        if name not in config:
            raise ConfigError(
                f"{who}({where}) mutates a value that the search space lacks: add {name!r} to "
                f"param_space, which has {', '.join(map(repr, config)) or 'nothing'}, or correct "
                "the name."
            )
        value = config[name]
        if isinstance(mutation, Mapping):
            if not isinstance(value, Mapping):
                raise ConfigError(f"{who}({where}) is a dict, and the configuration has {value!r}.")
            check_config(who, value, mutation, where)
        elif not (isinstance(mutation, list | tuple) or isinstance(value, bool) or is_real(value)):
            raise ConfigError(
                f"{who}({where}) scales a value, and the configuration has {value!r}, which is no "
                "number: list the values that are possible instead."
            )


class Explorer:
    """Perturb or resample the values of a configuration.

    Args:
        mutations: how to draw each value; see `Mutations`.
        resample_probability: the probability of a new draw instead of a perturbation.
        factors: the two factors by which numbers are perturbed.
        custom: changes the new configuration in the end, and returns it; None for none.
    """

    def __init__(
        self,
        mutations: Mutations,
        resample_probability: float,
        factors: Sequence[float],
        custom: CustomExplore | None,
    ) -> None:
        self._mutations = mutations
        self._resample_probability = resample_probability
        self._factors, self._custom = factors, custom

    def explore(self, config: dict[str, Any], rng: random.Random) -> dict[str, Any]:
        """Return a new configuration; ``config`` stays as it is.

        Raises:
            ConfigError: the custom function returned no dict.
        """
        return customised(self._mutated(copy.deepcopy(config), self._mutations, rng), self._custom)

    def _mutated(
        self, config: dict[str, Any], mutations: Mutations, rng: random.Random
    ) -> dict[str, Any]:
        for name, mutation in mutations.items():
            value = config[name]
            if isinstance(mutation, Mapping):
                config[name] = self._mutated(value, mutation, rng)
            elif isinstance(mutation, list | tuple):
                config[name] = self._among(value, mutation, rng)
            else:
                config[name] = self._scaled(value, mutation, rng)
        return config

    def _among(self, value: Any, values: Sequence[Any], rng: random.Random) -> Any:
        """Draw one of the values, or shift to a neighbour."""
        if rng.random() < self._resample_probability or value not in values:
            return rng.choice(values)
        index = values.index(value) + rng.choice((-1, 1))
        return values[min(max(index, 0), len(values) - 1)]

    def _scaled(self, value: Any, mutation: Any, rng: random.Random) -> Any:
        """Draw a value anew, or scale it; an integer stays one."""
        if rng.random() < self._resample_probability:
            new = mutation.sample(rng) if isinstance(mutation, Domain) else mutation()
        else:
            new = value * rng.choice(self._factors)
        if isinstance(value, bool):
            return bool(new)
        return round(float(new)) if isinstance(value, int) else new


def customised(config: dict[str, Any], custom: CustomExplore | None) -> dict[str, Any]:
    """Return a new configuration as the user's function changes it.

    Raises:
        ConfigError: the function returned no dict.
    """
    new = config if custom is None else custom(config)
    if not isinstance(new, dict):
        raise ConfigError(f"custom_explore_fn returned {new!r}; return the configuration.")
    return new


def changes(before: Mapping[str, Any], after: Mapping[str, Any], mutations: Mutations) -> str:
    """Describe how the mutated values changed, such as ``lr 0.01 to 0.012``."""
    told = []
    for name, mutation in mutations.items():
        one, other = before.get(name), after.get(name)
        if isinstance(mutation, Mapping) and isinstance(one, dict) and isinstance(other, dict):
            inner = changes(one, other, mutation)
            told += [f"{name}/{part}" for part in inner.split(", ") if part]
        elif one != other:
            told.append(f"{name} {_short(one)} to {_short(other)}")
    return ", ".join(told)


def _short(value: Any) -> str:
    """Return a value for people, without an address in memory, which differs between runs."""
    if isinstance(value, float):
        return f"{value:g}"
    return shortened(_ADDRESS.sub("", repr_of(value)), _SHOWN)
