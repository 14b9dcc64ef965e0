"""Random values of types that msgspec can decode: seeds of the fuzzer."""

from __future__ import annotations

import random
from collections.abc import Callable
from typing import Any, Final

import msgspec
from msgspec import inspect

#: Values deeper than this end with the least that their type allows.
_DEEPEST: Final = 6
_WORDS: Final = (
    *("", "a", "search", "0a1b2_00003", "node-7", "../../etc/passwd", "/", "\0", "é\u202e𝄞"),
    *("tunemq:events:1", "training_iteration", "redis://h", "x" * 300, "-1", "NaN", "\x1b[2J"),
)
_NUMBERS: Final = (0, 1, -1, 2, 7, 255, 256, 2**31, 2**53, 2**63 - 1, -(2**63))
_FLOATS: Final = (0.0, -0.0, 1.5, -1e308, 1e-320, float("inf"), float("-inf"), float("nan"))


class Samples:
    """Draws values of types.

    Args:
        seed: the same one draws the same.
    """

    def __init__(self, seed: int) -> None:
        self._draw = random.Random(seed)

    def of(self, kind: Any) -> Any:
        """One value of a type, as an instance where that is a struct."""
        return self._value(inspect.type_info(kind), 0)

    def _value(self, kind: inspect.Type, depth: int) -> Any:
        for known, make in self._makers():
            if isinstance(kind, known):
                return make(kind, depth)
        raise TypeError(f"no sample can be drawn of {kind}")

    def _makers(self) -> tuple[tuple[Any, Callable[[Any, int], Any]], ...]:
        pick = self._draw.choice
        return (
            (inspect.NoneType, lambda _k, _d: None),
            (inspect.BoolType, lambda _k, _d: pick((True, False))),
            (inspect.IntType, lambda _k, _d: pick(_NUMBERS)),
            (inspect.FloatType, lambda _k, _d: pick(_FLOATS)),
            (inspect.StrType, lambda _k, _d: pick(_WORDS)),
            (inspect.BytesType, lambda _k, _d: self._draw.randbytes(pick((0, 1, 40)))),
            (inspect.EnumType, lambda kind, _d: pick(list(kind.cls))),
            (inspect.LiteralType, lambda kind, _d: pick(list(kind.values))),
            (inspect.AnyType, lambda _k, depth: self._anything(depth)),
            (inspect.RawType, lambda _k, _d: msgspec.Raw(msgspec.msgpack.encode({}))),
            (inspect.UnionType, lambda kind, depth: self._value(pick(kind.types), depth + 1)),
            (inspect.DictType, self._table),
            (inspect.TupleType, self._tuple),
            ((inspect.VarTupleType, inspect.ListType, inspect.CollectionType), self._row),
            ((inspect.SetType, inspect.FrozenSetType), self._row),
            ((inspect.StructType, inspect.NamedTupleType), self._struct),
        )

    def _anything(self, depth: int) -> Any:
        if depth > _DEEPEST:
            return None
        return self._draw.choice((
            *(None, True, self._draw.choice(_NUMBERS), 0.25, "text", [1, [2, {"a": 3}]]),
            {"training_iteration": 1, "loss": self._draw.choice(_FLOATS)},
        ))  # fmt: skip

    def _many(self, depth: int) -> range:
        return range(0 if depth > _DEEPEST else self._draw.choice((0, 1, 1, 2, 3)))

    def _table(self, kind: inspect.DictType, depth: int) -> dict[Any, Any]:
        return {
            self._value(kind.key_type, depth + 1): self._value(kind.value_type, depth + 1)
            for _ in self._many(depth)
        }

    def _tuple(self, kind: inspect.TupleType, depth: int) -> tuple[Any, ...]:
        return tuple(self._value(one, depth + 1) for one in kind.item_types)

    def _row(self, kind: Any, depth: int) -> list[Any]:
        return [self._value(kind.item_type, depth + 1) for _ in self._many(depth)]

    def _struct(self, kind: inspect.StructType | inspect.NamedTupleType, depth: int) -> Any:
        fields = {
            field.name: self._value(field.type, depth + 1)
            for field in kind.fields
            if field.required or (depth < _DEEPEST and self._draw.random() < 0.7)
        }
        return kind.cls(**fields)
