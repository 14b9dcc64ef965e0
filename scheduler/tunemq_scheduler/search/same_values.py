"""Compares values of a search space with those that an earlier run pickled."""

from __future__ import annotations

import dataclasses
import functools
import types
from typing import Any

# Methods are equal only if their objects are identical; code, only if its lines did not move.
_COMPARED_BY_PARTS = (types.MethodType, types.CodeType)


def same(one: Any, other: Any) -> bool:
    """Return whether two values are equal; values that cannot be compared only if identical.

    Functions, and objects without ``__eq__``, equal only themselves, and not what an earlier run
    pickled. So they are the same if they consist of the same.
    """
    # Parts may contain each other, and be contained many times. The pairs are kept, because the id
    # of a removed object may become that of another one.
    compared: dict[tuple[int, int], tuple[Any, Any]] = {}
    pending = [(one, other)]
    while pending:
        pair = pending.pop()
        ids = (id(pair[0]), id(pair[1]))
        if ids[0] == ids[1] or ids in compared:
            continue
        compared[ids] = pair
        try:
            differing = _differing_parts(*pair)
        except Exception:  # noqa: BLE001  objects raise anything, such as arrays and tensors
            return False
        if differing is None:
            return False
        pending.extend(differing)
    return True


def _differing_parts(one: Any, other: Any) -> list[tuple[Any, Any]] | None:
    """Return the pairs of parts that have to be the same; None if the values differ anyway."""
    kind = type(one)
    if isinstance(one, bool) != isinstance(other, bool):
        return None  # True equals 1, yet choice([1, True]) means two values
    is_container = kind is type(other) and kind in {dict, list, tuple}
    if not is_container and bool(one == other):
        return []
    if kind is not type(other) or not (is_container or _has_comparable_parts(kind)):
        return None
    ones, others = _parts(one), _parts(other)
    if ones.keys() != others.keys():
        return None
    return [(part, others[name]) for name, part in ones.items()]


def _has_comparable_parts(kind: type) -> bool:
    if kind is object:
        return False
    by_identity: Any = object.__eq__
    return (
        kind.__eq__ is by_identity
        or issubclass(kind, _COMPARED_BY_PARTS)
        or _is_compared_by_fields(kind)
    )


def _is_compared_by_fields(kind: type) -> bool:
    return "__dataclass_params__" in vars(kind) and kind.__dataclass_params__.eq  # type: ignore[attr-defined]


def _parts(value: Any) -> dict[Any, Any]:
    """Return what makes a value the one that it is."""
    if isinstance(value, dict):
        return value
    if isinstance(value, list | tuple):
        return dict(enumerate(value))
    if _is_compared_by_fields(type(value)):
        return {
            field.name: getattr(value, field.name)
            for field in dataclasses.fields(value)
            if field.compare
        }
    if isinstance(value, functools.partial):
        return {"function": value.func, "arguments": value.args, "keywords": value.keywords}
    if isinstance(value, types.MethodType):
        return {"function": value.__func__, "object": value.__self__}
    if isinstance(value, types.FunctionType):
        return _parts_of_function(value)
    if isinstance(value, types.CodeType):  # without its file and lines
        return {
            "instructions": value.co_code,
            "constants": value.co_consts,
            "names": (value.co_names, value.co_varnames, value.co_freevars),
        }
    return _parts_of_object(value)


def _parts_of_function(function: types.FunctionType) -> dict[str, Any]:
    if "<" not in function.__qualname__:  # unlike a lambda, and a function within another one
        return {"module": function.__module__, "name": function.__qualname__}
    return {
        "code": function.__code__,
        "defaults": function.__defaults__,
        "keywords": function.__kwdefaults__,
        "closure": tuple(cell.cell_contents for cell in function.__closure__ or ()),
    }


def _parts_of_object(value: Any) -> dict[Any, Any]:
    """Return what pickle would store of an object."""
    reduced = value.__reduce_ex__(2)
    if isinstance(reduced, str):  # the name of a variable
        return {"module": value.__module__, "name": reduced}
    items_and_pairs = [list(one) for one in reduced[3:5] if one is not None]
    return dict(enumerate([*reduced[:3], *items_and_pairs]))
