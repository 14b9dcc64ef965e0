"""Reads a search space from a YAML or JSON file.

    lr: {loguniform: [1e-4, 1e-1]}
    layers: {choice: [1, 2, 3]}
    optimizer:
      name: {grid_search: [adam, sgd]}
      momentum: {uniform: {lower: 0.5, upper: 0.99}}
    epochs: 20

A dict whose only key names a domain is that domain, with its arguments in order or by name. Every
other dict is a group of parameters, and everything else a constant. YAML follows version 1.2:
``1e-4`` is a number, ``no`` and ``2026-01-31`` are texts.
"""

from __future__ import annotations

import difflib
import inspect
import json
import os
import re
from collections.abc import Callable, Iterator, Mapping
from typing import Any, Final, NamedTuple

from tunemq_scheduler.search import domains
from tunemq_scheduler.search.space import SpacePath, path_name
from tunemq_shared.base.decoding_errors import NO_JSON
from tunemq_shared.base.errors import SearchSpaceError

_OF_NUMBERS: Final[Mapping[str, Callable[..., Any]]] = {
    "uniform": domains.uniform,
    "quniform": domains.quniform,
    "loguniform": domains.loguniform,
    "qloguniform": domains.qloguniform,
    "randn": domains.randn,
    "qrandn": domains.qrandn,
    "randint": domains.randint,
    "qrandint": domains.qrandint,
    "lograndint": domains.lograndint,
    "qlograndint": domains.qlograndint,
}
_OF_VALUES: Final[Mapping[str, Callable[..., Any]]] = {
    "choice": domains.choice,
    "grid_search": domains.grid_search,
}
_DOMAINS: Final = (*_OF_NUMBERS, *_OF_VALUES)
#: The similarity above which a key counts as a misspelt domain name.
_ALIKE: Final = 0.75
_SCALARS: Final = {
    "null": r"|~|null|Null|NULL",
    "bool": r"true|True|TRUE|false|False|FALSE",
    "int": r"[-+]?(?:0|[1-9][0-9]*)|0x[0-9a-fA-F]+",
    "float": r"[-+]?(?:\.[0-9]+|[0-9]+\.[0-9]*)(?:[eE][-+]?[0-9]+)?|[-+]?[0-9]+[eE][-+]?[0-9]+"
    r"|[-+]?\.(?:inf|Inf|INF)|\.(?:nan|NaN|NAN)",
}


class _Content(NamedTuple):
    """A file's content, and the line of each place if known."""

    value: Any
    lines: dict[SpacePath, int]


def read_space_file(path: str) -> dict[str, Any]:
    """Read the search space in a file.

    Raises:
        SearchSpaceError: it cannot be read; the message names the file, the line, the key and the
            fix.
    """
    try:
        with open(path, encoding="utf-8") as file:
            text = file.read()
    except (OSError, UnicodeDecodeError) as error:
        raise SearchSpaceError(f"the search space {path!r} cannot be read: {error}.") from error
    is_json = os.path.splitext(path)[1].lower() == ".json"
    content = _json(path, text) if is_json else _yaml(path, text)
    if not isinstance(content.value, dict) or not content.value:
        raise SearchSpaceError(
            f"the search space {path} has no parameters; write one in each line, such as lr: "
            "{loguniform: [1e-4, 1e-1]}"
        )
    space: dict[str, Any] = _Reader(path, content.lines).read(content.value, ())
    return space


class _Reader:
    """Converts a file's content to domains."""

    def __init__(self, file: str, lines: dict[SpacePath, int]) -> None:
        self._file, self._lines = file, lines

    def read(self, value: Any, path: SpacePath) -> Any:
        if isinstance(value, list):
            return [self.read(item, (*path, number)) for number, item in enumerate(value)]
        if not isinstance(value, dict):
            return value
        named = [key for key in value if key in _DOMAINS]
        if named and len(value) == 1:
            return self._domain(named[0], value[named[0]], path)
        for key, inner in value.items():
            self._check_key(key, inner, path, is_alone=len(value) == 1)
        return {key: self.read(inner, (*path, key)) for key, inner in value.items()}

    def _domain(self, name: str, given: Any, path: SpacePath) -> Any:
        inside = (*path, name)
        if name in _OF_VALUES:
            if not isinstance(given, list):
                raise self._error(inside, f"{given!r} is not a list; write {name}: [1, 2, 3]")
            return self._made(_OF_VALUES[name], inside, self.read(given, inside))
        function = _OF_NUMBERS[name]
        if isinstance(given, list):
            return self._made(function, inside, *given)
        if isinstance(given, dict):
            return self._made(function, inside, **given)
        raise self._error(inside, f"{given!r} is not a list; write {_usage(name)}")

    def _made(
        self, function: Callable[..., Any], path: SpacePath, *arguments: Any, **named: Any
    ) -> Any:
        name = function.__name__
        try:
            inspect.signature(function).bind(*arguments, **named)
        except TypeError as error:
            raise self._error(path, f"{name} is given {error}; write {_usage(name)}") from error
        try:
            return function(*arguments, **named)
        except SearchSpaceError as error:
            raise self._error(path, str(error).removesuffix(".")) from error

    def _check_key(self, key: Any, value: Any, path: SpacePath, *, is_alone: bool) -> None:
        inside = (*path, key)
        if not isinstance(key, str):
            raise self._error(inside, f"the name {key!r} is not text; put it into quotes")
        if key in _DOMAINS and isinstance(value, list):
            raise self._error(
                inside, f"{key} stands beside other keys; a domain is the only key of its dict"
            )
        if key == "sample_from":
            raise self._error(inside, "sample_from is a function, which only Python scripts have")
        if is_alone and isinstance(value, list) and path:
            close = difflib.get_close_matches(key, _DOMAINS, 1, _ALIKE)
            if close:
                raise self._error(
                    inside, (f"{key!r} is not a domain; did you mean {close[0]}? Valid domains: "
                        f"{', '.join(_DOMAINS)}"),
                )  # fmt: skip

    def _error(self, path: SpacePath, problem: str) -> SearchSpaceError:
        place = path
        while place and place not in self._lines:
            place = place[:-1]
        line = f", line {self._lines[place]}" if place in self._lines else ""
        return SearchSpaceError(f"{self._file}{line}: {path_name(path)}: {problem}.")


def _usage(name: str) -> str:
    if name in _OF_VALUES:
        return f"{name}: [1, 2, 3]"
    parameters = inspect.signature(_OF_NUMBERS[name]).parameters
    return f"{name}: [{', '.join(one for one in parameters if one != 'base')}]"


def _json(path: str, text: str) -> _Content:
    try:
        return _Content(json.loads(text), {})
    except NO_JSON as error:
        raise SearchSpaceError(f"the search space {path} is not JSON: {error}.") from error


def _yaml(path: str, text: str) -> _Content:
    import yaml

    # Remove the YAML 1.1 resolvers of PyYAML.
    kind: Any = type("Loader", (yaml.SafeLoader,), {"yaml_implicit_resolvers": {}})
    for name, pattern in _SCALARS.items():
        scalar = re.compile(f"^(?:{pattern})$")
        kind.add_implicit_resolver(f"tag:yaml.org,2002:{name}", scalar, None)
    loader = None
    try:
        loader = kind(text)
        node = loader.get_single_node()
        lines = dict(_lines(path, node, ()))
        value = None if node is None else loader.construct_document(node)
    except yaml.MarkedYAMLError as error:
        line = "" if error.problem_mark is None else f", line {error.problem_mark.line + 1}"
        raise SearchSpaceError(f"{path}{line}: this is not YAML: {error.problem}.") from error
    except (yaml.YAMLError, ValueError, RecursionError) as error:
        raise SearchSpaceError(f"the search space {path} is not YAML: {error}.") from error
    finally:
        if loader is not None:
            loader.dispose()
    return _Content(value, lines)


def _lines(file: str, node: Any, path: SpacePath) -> Iterator[tuple[SpacePath, int]]:
    """Yield the line of each place in a tree of YAML nodes.

    Raises:
        SearchSpaceError: a key is repeated, of which YAML readers silently use the last.
    """
    if node is None or node.id == "scalar":
        return
    seen: dict[str, int] = {}
    for number, entry in enumerate(node.value):
        if node.id == "sequence":
            yield (*path, number), entry.start_mark.line + 1
            yield from _lines(file, entry, (*path, number))
            continue
        key, inner = entry
        line = key.start_mark.line + 1
        if key.id == "scalar":
            if key.value in seen:
                raise SearchSpaceError(
                    f"{file}, line {line}: {path_name((*path, key.value))} stands on line "
                    f"{seen[key.value]} already; remove one of the two."
                )
            seen[key.value] = line
        yield (*path, key.value if key.id == "scalar" else "?"), line
        yield from _lines(file, inner, (*path, key.value if key.id == "scalar" else "?"))
