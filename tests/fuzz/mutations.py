"""Mutations of input: of its bytes, and of the values in msgpack or JSON."""

from __future__ import annotations

import json
import random
from collections.abc import Callable, Iterator, Sequence
from typing import Any, Final

import msgspec

#: Input that some reader somewhere has not survived; every decoder gets all of it.
NASTY: Final[tuple[bytes, ...]] = (
    b"",
    b"\0",
    b"\xff" * 64,
    b"\x91" * 100_000,  # msgpack: a list in a list in a list
    b"\x81\xa1a" * 50_000,  # likewise tables
    b"[" * 100_000,
    b'{"a":' * 50_000,
    b"[" * 900 + b"]" * 900,
    b"[" * 50_000 + b"\n",
    b"\xdd\xff\xff\xff\xff",  # msgpack: a list of four thousand million values, of which none comes
    b"\xdf\xff\xff\xff\xff",
    b"\xdb\xff\xff\xff\xffabc",
    b"\xc6\xff\xff\xff\xff",
    b"\xc9\xff\xff\xff\xff\x01",
    b"\xa4\xff\xfe\xfd\xfc",  # text that is no UTF-8
    b"\xd6\xff\xff\xff\xff\xff",  # a time stamp
    b"\xc7\x0c\xff" + b"\xff" * 12,
    b"1" * 10_000,
    b'{"version": ' + b"9" * 6_000 + b"}",
    b"1e999999999",
    b"-0",
    b"NaN",
    b'"\\ud800"',
    b'{"a": "\xff"}',
    b"\xef\xbb\xbf{}",
    b"\xff\xfe{\0}\0",
    b"null",
    b"[]",
    b"{}",
    b"0",
    b'""',
    b"\x90",
    b"\x80",
    b"\xc0",
    b"\n" * 100,
    b"$-1\r\n",
    b"*1000000000\r\n",
    b"*1\r\n" * 100_000,
    b"$99999999999999\r\n",
    b"$" + b"9" * 5_000 + b"\r\n",
    b":nine\r\n",
    b"HTTP/1.1 200 OK\r\nContent-Length: -1\r\n\r\n",
    b"HTTP/1.1 99999 \r\n\r\n",
    b"GET / HTTP/1.1\r\nContent-Length: 1e9\r\n\r\n",
    b"GET /\0 HTTP/9.9\r\n" + b"a: b\r\n" * 300 + b"\r\n",
)
#: Longer input is cut: how long messages may be is tested elsewhere.
LONGEST: Final = 200_000
_VALUES: Final = (
    *(None, True, False, 0, -1, 2**63, 2**64 - 1, -(2**63), 1.5, float("nan"), float("inf")),
    *("", "\0", "../../x", "/etc/passwd", "x" * 5_000, "\x1b]0;x\7", "é" * 40, b"", b"\xff\0"),
    *([], {}, [[]], [None] * 300, {"": None}, {"a": {"b": {"c": []}}}),
)


class Mutator:
    """Makes new input of old.

    Args:
        seed: the same one makes the same of the same.
    """

    def __init__(self, seed: int) -> None:
        self._draw = random.Random(seed)
        self._of_bytes: tuple[Callable[[bytes], bytes], ...] = (
            self._flip,
            self._flip,
            self._put,
            self._cut,
            self._double,
            self._number,
            self._shorten,
        )

    def mutated(self, data: bytes, others: Sequence[bytes]) -> bytes:
        """Something like ``data``; ``others`` may lend parts."""
        choice = self._draw.random()
        if choice < 0.35:
            changed = self._of_values(data)
            if changed is not None:
                return changed
        if choice > 0.95 and others:
            return self._spliced(data, self._draw.choice(others))
        for _ in range(self._draw.choice((1, 1, 1, 2, 4, 16))):
            data = self._draw.choice(self._of_bytes)(data)[:LONGEST]
        return data

    # --- bytes ------------------------------------------------------------------------------------

    def _at(self, data: bytes) -> int:
        return self._draw.randrange(len(data) + 1)

    def _flip(self, data: bytes) -> bytes:
        if not data:
            return b"\1"
        at = self._draw.randrange(len(data))
        changed = self._draw.choice((data[at] ^ (1 << self._draw.randrange(8)), 0, 255, 127))
        return data[:at] + bytes([changed]) + data[at + 1 :]

    def _put(self, data: bytes) -> bytes:
        at = self._at(data)
        piece = self._draw.randbytes(self._draw.choice((1, 2, 8)))
        return data[:at] + piece + data[at:]

    def _cut(self, data: bytes) -> bytes:
        at = self._at(data)
        return data[:at] + data[at + self._draw.choice((1, 2, 9)) :]

    def _double(self, data: bytes) -> bytes:
        at, to = sorted((self._at(data), self._at(data)))
        return data[:to] + data[at:to] * self._draw.choice((1, 2, 30)) + data[to:]

    def _number(self, data: bytes) -> bytes:
        """Replace a length, or bytes that could be one, by an extreme number."""
        at = self._at(data)
        size = self._draw.choice((1, 2, 4, 8))
        number = self._draw.choice((0, 1, 2**31 - 1, 2**31, 2**32 - 1, 2**63)) % 256**size
        return data[:at] + number.to_bytes(size, "big") + data[at + size :]

    def _shorten(self, data: bytes) -> bytes:
        return data[: self._at(data)]

    def _spliced(self, data: bytes, other: bytes) -> bytes:
        return data[: self._at(data)] + other[self._at(other) :]

    # --- values -----------------------------------------------------------------------------------

    def _of_values(self, data: bytes) -> bytes | None:
        """With a value in it replaced, removed, doubled or buried; None where it holds none."""
        for read, write in _FORMS:
            try:
                value = read(data)
            except Exception:  # noqa: BLE001  whatever it is, it is not of this form
                continue
            try:
                return write(self._changed(value))
            except Exception:  # noqa: BLE001  the form cannot hold what it would be
                return None
        return None

    def _changed(self, value: Any) -> Any:
        places = list(_places(value, ()))
        path = self._draw.choice(places)
        return self._replaced(value, path)

    def _replaced(self, value: Any, path: tuple[Any, ...]) -> Any:
        if path:
            first, rest = path[0], path[1:]
            if isinstance(value, dict):
                if not rest and self._draw.random() < 0.2:
                    return {name: one for name, one in value.items() if name != first}
                return {
                    name: self._replaced(one, rest) if name == first else one
                    for name, one in value.items()
                }
            changed = list(value)
            if not rest and self._draw.random() < 0.2:
                del changed[first]
            else:
                changed[first] = self._replaced(value[first], rest)
            return changed
        choice = self._draw.random()
        if choice < 0.1:
            return self._buried(value)
        if choice < 0.2 and isinstance(value, list):
            return [*value, *value]
        if choice < 0.3 and isinstance(value, int) and abs(value) < 2**62:
            return value + self._draw.choice((-1, 1))
        return self._draw.choice(_VALUES)

    def _buried(self, value: Any) -> Any:
        for _ in range(self._draw.choice((1, 10, 150))):
            value = [value] if self._draw.random() < 0.5 else {"a": value}
        return value


def _places(value: Any, path: tuple[Any, ...]) -> Iterator[tuple[Any, ...]]:
    yield path
    if len(path) > 12:
        return
    if isinstance(value, dict):
        for name, one in value.items():
            yield from _places(one, (*path, name))
    elif isinstance(value, list):
        for number, one in enumerate(value[:50]):
            yield from _places(one, (*path, number))


def _read_msgpack(data: bytes) -> Any:
    found = msgspec.msgpack.decode(data)
    if not isinstance(found, list | dict):
        raise TypeError("a lone value")
    return found


_FORMS: Final[tuple[tuple[Callable[[bytes], Any], Callable[[Any], bytes]], ...]] = (
    (_read_msgpack, msgspec.msgpack.encode),
    (json.loads, lambda value: json.dumps(value).encode()),
)
