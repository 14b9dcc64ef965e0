"""Text of users' values: their methods may raise or return anything, and a text results."""

from __future__ import annotations

import re
from collections.abc import Callable
from typing import Any, Final

#: Control characters, and characters that change the direction of text.
STEERING: Final = re.compile(
    "[\x00-\x08\x0b-\x1f\x7f-\x9f\u061c\u200e\u200f\u2028-\u202e\u2066-\u2069\ud800-\udfff]"
)


def text_of(value: object) -> str:
    """``str(value)``; if that fails, the type in angle brackets."""
    if issubclass(type(value), str):
        return str.__str__(value)
    return _guarded(str, value)


def repr_of(value: object) -> str:
    """``repr(value)``; if that fails, the type in angle brackets."""
    if issubclass(type(value), str):
        return str.__repr__(value)
    return _guarded(repr, value)


def plain_number(value: Any) -> Any:
    """Convert a number of a subclass of int or float to int or float; keep any other value."""
    kind = type(value)
    if issubclass(kind, float):
        return float.__float__(value)
    if issubclass(kind, int) and kind is not bool:
        return int.__int__(value)
    return value


def encodable(text: str) -> str:
    """Escape what UTF-8 cannot encode: file names may hold such characters."""
    return text.encode(errors="backslashreplace").decode()


def harmless(text: str) -> str:
    """Replace control characters by escapes; line breaks stay."""
    return STEERING.sub(lambda found: found[0].encode("unicode_escape").decode(), text)


def _guarded(make: Callable[[object], str], value: object) -> str:
    try:
        return str.__str__(make(value))
    except (Exception, SystemExit):  # noqa: BLE001  a user's method may raise anything
        kind = type(value)
        return f"<{kind.__module__}.{kind.__qualname__} without a text>"
