"""Text of values that users made: whatever their methods raise or return, there is a text."""

from __future__ import annotations

import re
from collections.abc import Callable
from typing import Any, Final

#: Control characters, and what turns the direction of text round.
STEERING: Final = re.compile(
    "[\x00-\x08\x0b-\x1f\x7f-\x9f\u061c\u200e\u200f\u2028-\u202e\u2066-\u2069\ud800-\udfff]"
)


def text_of(value: object) -> str:
    """``str(value)``; of a value that has none, its type in angle brackets."""
    if issubclass(type(value), str):
        return str.__str__(value)
    return _guarded(str, value)


def repr_of(value: object) -> str:
    """``repr(value)``; of a value that has none, its type in angle brackets."""
    if issubclass(type(value), str):
        return str.__repr__(value)
    return _guarded(repr, value)


def plain_number(value: Any) -> Any:
    """A number of a subclass of int or float as one of these; any other value as it is."""
    kind = type(value)
    if issubclass(kind, float):
        return float.__float__(value)
    if issubclass(kind, int) and kind is not bool:
        return int.__int__(value)
    return value


def encodable(text: str) -> str:
    """The text, with escapes for what no UTF-8 can say: names of files may have such parts."""
    return text.encode(errors="backslashreplace").decode()


def harmless(text: str) -> str:
    """The text, in however many lines, with escapes in the place of control characters."""
    return STEERING.sub(lambda found: found[0].encode("unicode_escape").decode(), text)


def _guarded(make: Callable[[object], str], value: object) -> str:
    try:
        return str.__str__(make(value))
    except (Exception, SystemExit):  # noqa: BLE001  a user's method may raise anything
        kind = type(value)
        return f"<{kind.__module__}.{kind.__qualname__} without a text>"
