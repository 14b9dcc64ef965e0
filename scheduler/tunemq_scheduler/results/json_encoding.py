"""Encodes results and configurations as JSON, quickly and without changing a value.

``msgspec`` is ten times as fast as the standard library, but writes NaN and infinities as ``null``.
So its output is used only if it contains no more ``null`` than there are None values. Otherwise the
standard library writes ``NaN``, ``Infinity`` and ``-Infinity``, which ``json.loads`` reads.
"""

from __future__ import annotations

import json
import math
from collections.abc import Mapping
from contextlib import suppress
from typing import Any, TypeGuard

import msgspec

from tunemq_shared.base.safe_text import repr_of, text_of

#: Errors of msgspec for values that JSON cannot represent: keys that are not strings, lone
#: surrogates, deep nesting.
_REJECTED = (TypeError, ValueError, OverflowError, RecursionError)


def _foreign(value: Any) -> Any:
    """Convert numpy's and torch's numbers and arrays to JSON values; other objects to repr."""
    with suppress(Exception):  # a user's method may raise anything; then use the repr
        if callable(getattr(value, "item", None)) and getattr(value, "ndim", None) == 0:
            return value.item()
        if callable(getattr(value, "tolist", None)):
            return value.tolist()
    return repr_of(value)


_encode = msgspec.json.Encoder(enc_hook=_foreign).encode


def to_plain(value: Any) -> Any:
    """Convert ``value`` to dicts with string keys, lists and JSON scalars."""
    try:
        return _to_plain(value)
    except Exception:  # noqa: BLE001  a user's container may raise anything when it is read
        return repr_of(value)


def _to_plain(value: Any) -> Any:
    if value is None or isinstance(value, bool | int | str):
        return value
    if isinstance(value, float):
        return float.__float__(value)
    if isinstance(value, Mapping):
        return {text_of(key): to_plain(item) for key, item in value.items()}
    if isinstance(value, list | tuple | set | frozenset):
        return [to_plain(item) for item in value]
    foreign = _foreign(value)
    return foreign if isinstance(foreign, str) else to_plain(foreign)


def to_json(value: Any) -> bytes:
    """Encode ``value`` as JSON in one line."""
    try:
        encoded = _encode(value)
    except _REJECTED:
        return _exactly(value)
    return encoded if b"null" not in encoded else _exactly(value)


def result_to_json(result: dict[str, Any], config: msgspec.Raw, config_nulls: int) -> bytes:
    """Encode a result as JSON in one line, with its configuration already encoded.

    Args:
        result: the complete result.
        config: the JSON of ``result["config"]``.
        config_nulls: the number of ``null`` in ``config``.
    """
    spliced = {**result, "config": config}
    try:
        encoded = _encode(spliced)
    except _REJECTED:
        return _exactly(result)
    nulls = encoded.count(b"null") - config_nulls
    if nulls and nulls != sum(one is None for key, one in result.items() if key != "config"):
        return _exactly(result)
    return encoded


def is_number(value: Any) -> TypeGuard[float]:
    """Return whether ``value`` is a number, including NaN and infinities but not booleans."""
    return isinstance(value, int | float) and not isinstance(value, bool)


def is_finite(value: Any) -> TypeGuard[float]:
    """Return whether ``value`` is a number other than NaN and the infinities."""
    return is_number(value) and math.isfinite(value)


def _exactly(value: Any) -> bytes:
    return json.dumps(to_plain(value), separators=(",", ":")).encode()
