"""Pack a trial's configuration into bytes that keep the exact type of every value.

Plain data (dicts with string keys, lists, strings, 64-bit integers, floats, booleans, None: exactly
these types) is msgpack, readable without running any code. Every other value (tuples, numpy
scalars, classes, functions, objects) is a pickle in a msgpack extension. So the journal shows the
plain part of a configuration without unpickling, and only `unpack_config` runs code.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Final, NamedTuple

import msgspec

from tunemq_shared.base.decoding_errors import UNDECODABLE
from tunemq_shared.base.depth_and_integer_limits import beyond_limits
from tunemq_shared.base.errors import ConfigError, TransportError
from tunemq_shared.base.pickling import Unpicklable, dump
from tunemq_shared.base.safe_text import repr_of
from tunemq_shared.base.unpickling import UnsafePickle, load_pickled, load_plain

#: The msgpack extension type of a pickled value.
PICKLED: Final = 1

_SCALARS: Final = frozenset({str, int, float, bool, type(None)})
_STR: Final = frozenset({str})
_MSGPACK_INT: Final = range(-(2**63), 2**64)

_encode = msgspec.msgpack.Encoder().encode


class PickledValue(NamedTuple):
    """Placeholder for a value that is not unpickled, as that could run code; its size in bytes."""

    size: int

    def __repr__(self) -> str:
        return f"<pickled, {self.size} bytes>"


def check_keys(config: dict[Any, Any]) -> None:
    """Raise ConfigError, which names the key, unless all keys are strings of valid Unicode."""
    if not _STR.issuperset(map(type, config)):
        wrong = next(key for key in config if type(key) is not str)
        raise ConfigError(f"the keys of a configuration must be strings, not {repr_of(wrong)}.")
    if not all(map(str.isascii, config)) and not all(map(_is_unicode, config)):
        wrong = next(key for key in config if not _is_unicode(key))
        raise ConfigError(
            f"the key {wrong!a} of a configuration is not valid Unicode; decode the bytes it came "
            "from with errors='replace'."
        )


def pack_config(config: dict[str, Any]) -> bytes:
    """Pack the configuration; ConfigError names a value that cannot be pickled."""
    if not isinstance(config, dict):
        raise ConfigError(f"a configuration must be a dict, not {type(config).__qualname__}.")
    check_keys(config)
    try:
        # The common case at the speed of C. Integers and strings that msgpack cannot hold are rare:
        # letting the encoder fail on them is cheaper than checking each value.
        if _SCALARS.issuperset(map(type, config.values())):
            return _encode(dict(config))
    except (OverflowError, UnicodeEncodeError):
        pass
    if problem := beyond_limits(config, "the configuration"):
        raise ConfigError(f"{problem}.")
    return _encode({key: _marked(value, key) for key, value in config.items()})


def unpack_config(packed: bytes) -> dict[str, Any]:
    """Unpack the configuration, every value with its exact type; runs code of the experiment.

    Raises:
        TrainableError: A class or function in it cannot be imported here.
        TransportError: The bytes are damaged.
    """
    return _decode(packed, _unpickled)


def repack_config(packed: bytes) -> bytes:
    """Pack a configuration of an earlier run again, with the classes that the script has now.

    Raises:
        TrainableError, TransportError: As of `unpack_config`.
    """
    config = unpack_config(packed)
    try:
        return pack_config(config)
    except ConfigError:  # a value that can be pickled only once: the trial looks for the classes
        return packed


def peek_config(packed: bytes) -> dict[str, Any]:
    """Unpack the configuration with `PickledValue` for values that are pickled; runs no code."""
    return _decode(packed, _placeholder)


def unpack_plain_config(packed: bytes) -> dict[str, Any]:
    """Unpack the configuration as far as that runs no code.

    Tuples, sets, bytes and numbers have their types; `PickledValue` stands for other values.
    """
    return _decode(packed, _plain)


def _decode(packed: bytes, extension: Callable[[int, memoryview], Any]) -> dict[str, Any]:
    try:
        config = msgspec.msgpack.decode(packed, ext_hook=extension)
    except UNDECODABLE as error:
        raise TransportError(f"a packed configuration cannot be read: {error}.") from error
    if not isinstance(config, dict):
        raise TransportError(
            f"a packed configuration holds {type(config).__qualname__}, not a dict."
        )
    return config


def _unpickled(code: int, data: memoryview) -> Any:
    if code != PICKLED:
        raise msgspec.DecodeError(f"unknown extension {code}")
    return load_pickled(data, "the configuration")


def _plain(_code: int, data: memoryview) -> Any:
    try:
        return load_plain(data)
    except UnsafePickle:
        return PickledValue(len(data))


def _placeholder(_code: int, data: memoryview) -> PickledValue:
    return PickledValue(len(data))


def _marked(value: Any, path: str) -> Any:
    """Replace every part of the value that is not plain by its pickle."""
    kind = type(value)
    if kind is list:
        return [_marked(item, f"{path}[{n}]") for n, item in enumerate(value)]
    if kind is dict and _STR.issuperset(map(type, value)) and all(map(_is_unicode, value)):
        return {key: _marked(item, f"{path}[{key!r}]") for key, item in value.items()}
    if kind is str:
        plain = _is_unicode(value)
    elif kind is int:
        plain = value in _MSGPACK_INT
    else:
        plain = kind in _SCALARS
    return value if plain else _pickled(value, path)


def _is_unicode(text: str) -> bool:
    """Whether the string can be written as UTF-8: one with lone surrogates cannot."""
    try:
        text.encode()
    except UnicodeEncodeError:
        return False
    return True


def _pickled(value: Any, path: str) -> msgspec.msgpack.Ext:
    try:
        return msgspec.msgpack.Ext(PICKLED, dump(value))
    except Unpicklable as error:
        why = error.explain(f"the value {path!r}", path)
        raise ConfigError(
            f"a configuration cannot be sent to a worker: {why}; "
            "put what describes it into the configuration and create it in the trainable."
        ) from error
