"""Reads pages of log files, for people who follow them from another machine."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Final, NamedTuple

from tunemq_shared.base.errors import StoreError
from tunemq_shared.protocol.farm_requests import MAX_PAGE_BYTES
from tunemq_shared.system.plain_files import open_plain

#: A character in UTF-8 has at most this many bytes after its first.
_CONTINUATION: Final = 3


class FilePage(NamedTuple):
    """Bytes of a file: their offset, the offset of the next page, and the size of the file."""

    data: bytes
    offset: int
    end: int
    size: int


_NOTHING: Final = FilePage(b"", 0, 0, 0)


def read_page(path: Path | None, offset: int, limit: int = MAX_PAGE_BYTES) -> FilePage:
    """Read a page of a file; an empty page if there is no regular file yet.

    Args:
        path: the file; None if none is known.
        offset: the offset of the page. A negative one counts from the end. One beyond the end,
            after the file was truncated, means the beginning.
        limit: the most bytes.

    Raises:
        StoreError: the file cannot be read.
    """
    if path is None:
        return _NOTHING
    try:
        descriptor = open_plain(path, os.O_RDONLY)
        if descriptor is None:
            return _NOTHING
        with open(descriptor, "rb") as file:
            size = os.fstat(file.fileno()).st_size
            begin = max(0, size + offset) if offset < 0 else offset
            if begin > size:
                begin = 0
            file.seek(begin)
            data = file.read(max(1, min(limit, MAX_PAGE_BYTES)))
    except FileNotFoundError:
        return _NOTHING
    except OSError as error:
        raise StoreError(f"{path} cannot be read: {error.strerror}.") from error
    if offset < 0 and begin:  # it begins within a line, maybe within a character
        cut = data.find(b"\n") + 1
        begin, data = begin + cut, data[cut:]
    whole = _whole(data) or data
    return FilePage(whole, begin, begin + len(whole), size)


def _whole(data: bytes) -> bytes:
    """Remove an incomplete character at the end."""
    for back in range(1, min(_CONTINUATION, len(data)) + 1):
        byte = data[-back]
        if byte < 0x80:
            break
        if byte >= 0xC0:
            needed = 2 if byte < 0xE0 else 3 if byte < 0xF0 else 4
            return data[:-back] if back < needed else data
    return data
