"""Converts search spaces to Optuna parameters, and configurations back to parameter values.

A domain becomes one parameter, named by its path: ``optimizer/lr``. A quantised number becomes the
index of the multiple; a choice becomes the index of the choice unless its values are plain and
distinct. So every value can be converted back exactly. Domains inside the ``i``-th option of a
choice become separate parameters, named ``optimizer[i]/lr``, requested only if that option was
chosen.

`suggest` walks the space and asks a `ParameterChooser` for each parameter; `parameters` does the
reverse, from a configuration.
"""

from __future__ import annotations

import math
from typing import Any, Protocol

from tunemq_scheduler.search.domain_types import (
    Choice,
    Domain,
    Float,
    Function,
    Integer,
    index_above,
    index_below,
    multiple_of,
)
from tunemq_scheduler.search.same_values import same
from tunemq_scheduler.search.space import SpacePath, children, path_name, rebuild, variables
from tunemq_shared.base.errors import SearchSpaceError


class ParameterChooser(Protocol):
    """The part of Optuna's trial (also its ``FixedTrial``) that gives values to parameters."""

    def suggest_float(self, name: str, low: float, high: float, *, log: bool = False) -> float:
        """As in Optuna."""
        ...

    def suggest_int(self, name: str, low: int, high: int, *, log: bool = False) -> int:
        """As in Optuna."""
        ...

    def suggest_categorical(self, name: str, choices: Any) -> Any:
        """As in Optuna."""
        ...


class ConfigMismatch(Exception):
    """A configuration does not fit the space."""


def check_space(space: Any, who: str) -> None:
    """Check that Optuna has a distribution for every domain of a space.

    Raises:
        SearchSpaceError: it has not; the message names the class ``who``, the place, and what to
            use instead.
    """
    for path, domain in variables(space):
        _check_domain(domain, path, who)


def _check_domain(domain: Domain, path: SpacePath, who: str) -> None:
    if isinstance(domain, Choice):
        for option in domain.categories:
            for inner_path, inner in variables(option, path):
                _check_domain(inner, inner_path, who)
    elif not isinstance(domain, Float | Integer | Function):
        instead = {"Normal": "uniform or loguniform", "GridSearch": "choice"}
        raise SearchSpaceError(
            f"{path_name(path)}: {who} does not know {domain!r}; "
            f"use {instead.get(type(domain).__name__, 'another domain')} there."
        )


def count_parameters(space: Any) -> int:
    """Return the number of a space's parameters, including those inside the options of choices."""
    found = [domain for _, domain in variables(space) if not isinstance(domain, Function)]
    options = [one for domain in found if isinstance(domain, Choice) for one in domain.categories]
    return len(found) + sum(map(count_parameters, options))


def suggest(space: Any, chooser: ParameterChooser, name: str = "") -> Any:
    """Return a configuration with the chooser's values; leave `Function` domains to the caller."""
    match space:
        case Function():
            return space
        case Float(q=None):
            return chooser.suggest_float(name, space.lower, space.upper, log=space.log)
        case Float():
            index = chooser.suggest_int(name, *_indices(space), log=space.log)
            return multiple_of(space.q or 1, index)
        case Integer():
            return space.q * chooser.suggest_int(name, *_indices(space), log=space.log)
        case Choice():
            value = chooser.suggest_categorical(name, _options(space))
            index = _option_index(space, value)
            return suggest(space.categories[index], chooser, f"{name}[{index}]")
        case _:
            return rebuild(space, (name,), lambda child, path: suggest(child, chooser, _join(path)))


def _join(path: SpacePath) -> str:
    return "/".join(str(part) for part in path if part != "")


def _indices(domain: Float | Integer) -> tuple[int, int]:
    """Return the first and last index of a quantised domain's multiples."""
    if isinstance(domain, Integer):
        return -(-domain.lower // domain.q), domain.last // domain.q
    if domain.q is None:
        raise ValueError("not quantised")
    return index_above(domain.lower, domain.q), index_below(domain.upper, domain.q)


def _options(domain: Choice) -> list[Any]:
    """Return the options for Optuna: the values if it can distinguish them, else their indices."""
    values = domain.categories
    plain = all(value is None or isinstance(value, bool | int | float | str) for value in values)
    if plain and len(set(values)) == len(values) and not any(map(_is_nan, values)):
        return list(values)
    return list(range(len(values)))


def _is_nan(value: Any) -> bool:
    return isinstance(value, float) and math.isnan(value)


def _option_index(domain: Choice, value: Any) -> int:
    return _options(domain).index(value)


# --- from configurations to parameters ------------------------------------------------------------


def parameters(space: Any, config: Any, name: str = "", *, partial: bool = False) -> dict[str, Any]:
    """Return the parameters that produce a configuration.

    Args:
        space: the search space.
        config: a configuration of it.
        name: the name of this part of the space.
        partial: whether parts may be missing.

    Raises:
        ConfigMismatch: the space does not produce such a configuration; the message says where.
    """
    match space:
        case Function():
            return {}
        case Float() | Integer():
            if not space.contains(config):
                raise ConfigMismatch(f"{name} is {config!r}, which is outside {space!r}")
            return {name: _parameter(space, config)}
        case Choice():
            return _choice_parameters(space, config, name)
        case _:
            found: dict[str, Any] = {}
            inside = dict(children(config))
            for key, child in children(space):
                inner = _join((name, key))
                if key in inside:
                    found |= parameters(child, inside[key], inner, partial=partial)
                elif not partial:
                    raise ConfigMismatch(f"{inner} is missing")
            return found


def _parameter(domain: Float | Integer, value: Any) -> Any:
    if isinstance(domain, Float) and domain.q is None:
        return float(value)
    low, high = _indices(domain)
    return min(max(round(value / (domain.q or 1)), low), high)


def _choice_parameters(domain: Choice, value: Any, name: str) -> dict[str, Any]:
    for index, option in enumerate(domain.categories):
        if _like(option, value):
            return {name: _options(domain)[index]} | parameters(option, value, f"{name}[{index}]")
    raise ConfigMismatch(f"{name} is {value!r}, which is none of {list(domain.categories)!r}")


def _like(option: Any, value: Any) -> bool:
    """Return whether ``option`` could produce ``value``."""
    if isinstance(option, Choice):
        return any(_like(one, value) for one in option.categories)
    if isinstance(option, Domain):
        return option.contains(value)
    if isinstance(option, dict | list | tuple):
        inside, wanted = dict(children(value)), dict(children(option))
        return inside.keys() == wanted.keys() and all(
            _like(wanted[key], inside[key]) for key in wanted
        )
    return same(option, value)
