"""Functions on search spaces: nested dicts, lists and tuples of constants and domains.

A path, a tuple of keys and indices, identifies a place; it is shown as ``optimizer/lr``. Grids may
be anywhere, also inside a grid's values. The number of combinations is computed, and the n-th one
picked, without enumerating the others.
"""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import Any

from tunemq_scheduler.search.domain_types import Choice, Domain, Function, GridSearch
from tunemq_scheduler.search.domains import grid_search
from tunemq_shared.base.depth_and_integer_limits import beyond_limits, parts_of
from tunemq_shared.base.errors import SearchSpaceError
from tunemq_shared.base.safe_text import plain_number, repr_of, text_of

SpacePath = tuple[Any, ...]

_LONGEST_IN_TAG = 60


def path_name(path: SpacePath) -> str:
    """Return a path as text: ``optimizer/lr``."""
    return "/".join(map(text_of, path))


def children(node: Any) -> Iterator[tuple[Any, Any]]:
    """Yield the keys and values of a dict, or the indices and values of a list or tuple."""
    if isinstance(node, dict):
        yield from node.items()
    elif isinstance(node, list | tuple):
        yield from enumerate(node)


def rebuild(node: Any, path: SpacePath, visit: Callable[[Any, SpacePath], Any]) -> Any:
    """Copy a container with ``visit(child, path)`` for each child; return a leaf unchanged."""
    if isinstance(node, dict):
        return {key: visit(child, (*path, key)) for key, child in node.items()}
    if isinstance(node, list | tuple):
        items = [visit(child, (*path, index)) for index, child in enumerate(node)]
        if isinstance(node, list):
            return items
        return type(node)(*items) if hasattr(node, "_fields") else tuple(items)  # a named tuple
    return node


def read_space(space: Any) -> dict[Any, Any]:
    """Copy a space, with grids written as ``{"grid_search": [...]}`` converted to `GridSearch`.

    Raises:
        SearchSpaceError: the space is not a dict, is nested too deeply or contains itself, or a
            grid is inside a random choice.
    """
    if not isinstance(space, Mapping):
        raise SearchSpaceError(
            f"the search space {repr_of(space)} is invalid: pass a dict, such as {{'lr': "
            "loguniform(1e-4, 1e-1)}."
        )
    check_depth(space, "param_space")
    read: dict[Any, Any] = _read(dict(space), ())
    return read


def check_depth(node: Any, name: str) -> None:
    """Raise SearchSpaceError, which names the place, if a space or value is nested too deeply."""
    if problem := beyond_limits(node, name, _parts_of):
        raise SearchSpaceError(f"{problem}.")


def _parts_of(node: Any) -> Iterable[tuple[str, Any]]:
    if isinstance(node, Choice):
        return parts_of(node.categories)
    return parts_of(node.values) if isinstance(node, GridSearch) else parts_of(node)


def _read(node: Any, path: SpacePath) -> Any:
    if isinstance(node, dict) and len(node) == 1 and "grid_search" in node:
        try:
            node = grid_search(node["grid_search"])
        except SearchSpaceError as error:
            raise SearchSpaceError(f"{path_name(path)}: {error}") from None
    if isinstance(node, GridSearch):
        return GridSearch(tuple(_read(value, path) for value in node.values))
    if isinstance(node, Choice):
        options = tuple(_read(option, path) for option in node.categories)
        if any(count_grid(option) != 1 or has_grid(option) for option in options):
            raise SearchSpaceError(
                f"{path_name(path)}: a grid_search stands inside a choice, so the number of trials "
                "would be random; use choice for the inner one, or grid_search for both."
            )
        return Choice(options)
    return rebuild(node, path, _read)


def variables(node: Any, path: SpacePath = ()) -> Iterator[tuple[SpacePath, Domain]]:
    """Yield all domains that are not inside other domains, with their paths."""
    if isinstance(node, Domain):
        yield path, node
        return
    for key, child in children(node):
        yield from variables(child, (*path, key))


def parameter_names(node: Any, path: SpacePath = ()) -> Iterator[tuple[str, bool]]:
    """Yield the names of a configuration's parameters, groups included: ``opt``, ``opt.lr``.

    Each comes with a flag: True if it may contain further names that are unknown in advance.
    """
    if path:
        yield ".".join(map(text_of, path)), isinstance(node, Function)
    if isinstance(node, Choice | GridSearch):
        values = node.categories if isinstance(node, Choice) else node.values
        for value in values:
            if isinstance(value, dict | Domain):
                yield from parameter_names(value, path)
    elif isinstance(node, dict):
        for key, child in node.items():
            yield from parameter_names(child, (*path, key))


def has_grid(node: Any) -> bool:
    """Return whether a space contains a grid, also inside a grid's values."""
    return any(isinstance(domain, GridSearch) for _, domain in variables(node))


# --- grids ----------------------------------------------------------------------------------------


def count_grid(node: Any) -> int:
    """Return the number of grid combinations of a space; 1 without grids."""
    if isinstance(node, GridSearch):
        return sum(map(count_grid, node.values))
    if isinstance(node, Domain):
        return 1
    return math.prod(count_grid(child) for _, child in children(node))


def _grids(node: Any, path: SpacePath) -> list[tuple[SpacePath, GridSearch]]:
    found = [(p, d) for p, d in variables(node, path) if isinstance(d, GridSearch)]
    # As in Ray: in the order of their names, the first one changing fastest.
    return sorted(found, key=lambda item: [*map(_rank, item[0])])


def _rank(key: Any) -> tuple[bool, int, str]:
    """Sort key: indices in their order, and before names."""
    return (False, key, "") if isinstance(key, int) else (True, 0, text_of(key))


class GridCombinations:
    """The grid combinations of a space, by number.

    Attributes:
        size: the number of combinations.
    """

    def __init__(self, node: Any, path: SpacePath = ()) -> None:
        self._axes = [(where, _Axis(grid, where)) for where, grid in _grids(node, path)]
        self.size: int = math.prod(axis.size for _, axis in self._axes)

    def pick(self, number: int) -> dict[SpacePath, Any]:
        """Return the value at each grid's path in a combination, 0 <= number < size."""
        picked: dict[SpacePath, Any] = {}
        for path, axis in self._axes:
            number, digit = divmod(number, axis.size)
            axis.pick(path, digit, picked)
        return picked


class _Axis:
    """One grid; a value that contains grids counts once for each of their combinations."""

    def __init__(self, grid: GridSearch, path: SpacePath) -> None:
        self._values = grid.values
        nested = any(has_grid(value) for value in grid.values)
        self._inner = [GridCombinations(value, path) for value in grid.values] if nested else []
        self.size: int = sum(inner.size for inner in self._inner) if nested else len(grid.values)

    def pick(self, path: SpacePath, digit: int, picked: dict[SpacePath, Any]) -> None:
        """Store the ``digit``-th value, and those of the grids in it, in ``picked``."""
        if not self._inner:
            picked[path] = self._values[digit]
            return
        for value, inner in zip(self._values, self._inner, strict=True):
            if digit < inner.size:
                # A grid that is itself a value of a grid has the same path: use the inner value.
                picked.update({path: value} | inner.pick(digit))
                return
            digit -= inner.size


# --- plain configurations -------------------------------------------------------------------------


def merge(base: Any, over: Any) -> Any:
    """Return ``base`` overridden by ``over``: dicts are merged, everything else is replaced."""
    if not (isinstance(base, dict) and isinstance(over, dict)):
        return over
    return {**base, **{key: merge(base.get(key), value) for key, value in over.items()}}


def flatten(config: Mapping[Any, Any], path: SpacePath = ()) -> dict[SpacePath, Any]:
    """Return the leaves of nested dicts, by path; an empty dict, a list or a tuple is a leaf."""
    flat: dict[SpacePath, Any] = {}
    for key, value in config.items():
        if isinstance(value, dict) and value:
            flat.update(flatten(value, (*path, key)))
        else:
            flat[(*path, key)] = value
    return flat


def find(config: Any, path: SpacePath) -> Any:
    """Return the value at a path.

    Raises:
        LookupError: there is none.
    """
    for key in path:
        if not isinstance(config, dict | list | tuple):
            raise LookupError(key)  # noqa: TRY004  there is no such place
        config = config[key]
    return config


def searched(space: Any, config: Any, path: SpacePath = ()) -> dict[SpacePath, Any]:
    """Return the values of a configuration that its space does not fix, by path."""
    if not any(isinstance(space, one) and isinstance(config, one) for one in (dict, list, tuple)):
        return _leaves(config, path) if any(variables(space)) else {}
    known = dict(children(space))
    found: dict[SpacePath, Any] = {}
    for key, value in children(config):
        where = (*path, key)
        found |= searched(known[key], value, where) if key in known else _leaves(value, where)
    return found


def _leaves(value: Any, path: SpacePath) -> dict[SpacePath, Any]:
    return flatten(value, path) if isinstance(value, dict) and value else {path: value}


def format_tag(number: int, evaluated: Mapping[SpacePath, Any]) -> str:
    """Return a text that distinguishes a trial, usable in a file name: ``3_lr=0.0100,width=32``."""
    shown = [
        f"{_clean(path[-1])}={_clean(value)}"
        for path, value in sorted(evaluated.items(), key=lambda item: [*map(text_of, item[0])])
    ]
    return f"{number}_{','.join(shown)}" if shown else str(number)


def named_in_tag(tag: str, config: Mapping[Any, Any]) -> dict[str, Any]:
    """Return the values of a configuration that its tag shows, by ``outer/inner`` name."""
    shown = set(tag.partition("_")[2].split(","))
    return {
        path_name(path): value
        for path, value in flatten(config).items()
        if f"{_clean(path[-1])}={_clean(value)}" in shown
    }


def _clean(value: Any) -> str:
    value = plain_number(value)
    if isinstance(value, float) and math.isfinite(value):
        plain = value == 0 or 1e-3 <= abs(value) < 1e6
        return f"{value:.4f}" if plain else f"{value:.4g}".replace("+", "")
    return re.sub(r"[^a-zA-Z0-9_-]+", "_", text_of(value)).strip("_")[:_LONGEST_IN_TAG]
