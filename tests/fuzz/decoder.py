"""`Decoder`: one reader of the program, as a fuzzer knows it."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import ExitStack
from pathlib import Path
from typing import Any, NamedTuple, Self

import msgspec

from tests.fuzz.samples import Samples
from tunemq_shared.base.decoding_errors import UNDECODABLE

#: Number of random values per type to start with.
_SAMPLES = 24
#: May be raised by whatever holds that those who call it take it for what it is.
Rejects = tuple[type[BaseException], ...]


class Decoder(NamedTuple):
    """A decoder, and the errors that it may raise.

    Attributes:
        name: for people and command lines.
        read: decodes bytes; its return value does not matter.
        refuses: the only exceptions that it may raise.
        seeds: valid or nearly valid input.
        covers: which of `tests.fuzz.decoder_places` it runs.
    """

    name: str
    read: Callable[[bytes], object]
    refuses: Rejects
    seeds: tuple[bytes, ...]
    covers: tuple[str, ...]


def samples_of(*kinds: Any, as_json: bool = False, number: int = _SAMPLES) -> tuple[bytes, ...]:
    """Random values of types, encoded; the same each time."""
    encode: Callable[[Any], bytes] = msgspec.json.encode if as_json else msgspec.msgpack.encode
    draw = Samples(7)
    return tuple(encode(draw.of(kind)) for kind in kinds for _ in range(number))


def of_type(
    place: str,
    decode: Callable[[bytes], object],
    *kinds: Any,
    refuses: Rejects = UNDECODABLE,
    as_json: bool = False,
) -> Decoder:
    """A decoder for values of a type, whose callers catch `UNDECODABLE`."""
    seeds = samples_of(*kinds, as_json=as_json)
    return Decoder(place.replace("tunemq_", ""), decode, refuses, seeds, (place,))


class Bench:
    """A folder with the files that decoders read; a context manager that removes it."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self._at_the_end = ExitStack()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_exception: object) -> None:
        self._at_the_end.close()

    def afterwards(self, do: Callable[[], object]) -> None:
        """Do this when nothing is read any more."""
        self._at_the_end.callback(do)

    def written(self, name: str, data: bytes) -> Path:
        """A file with this content, in place of an earlier one."""
        path = self.folder / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(data)
        return path
