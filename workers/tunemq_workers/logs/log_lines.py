"""Reads the lines that a trial adds to a file of output: of many the newest, of each its start.

The file is the trial's, which may put anything in its place: no link is followed, and nothing that
could be waited for is opened.
"""

from __future__ import annotations

import os
import re
from typing import Final

from tunemq_shared.system.plain_files import open_to_read

#: So much of a file is read at once; of more that has come since, the newest.
LOOK_BYTES: Final = 256 * 2**10
#: So much of a line counts.
LINE_BYTES: Final = 4096

#: What `tunemq_workers.logs.output_files.cap` writes as the first line of a file that it has
#: shortened.
_DROPPED: Final = re.compile(rb"\[(\d{1,18}) bytes of older output dropped\]\n")
_FIRST_BYTES: Final = 64
#: A progress bar goes back to the start of its line.
_ENDS: Final = re.compile(rb"[\r\n]")


class LogFile:
    """A file that grows, and may be shortened.

    Args:
        path: of the file, which need not be there.
        offset: where to begin.
    """

    def __init__(self, path: str, offset: int) -> None:
        self._path, self._offset = path, offset
        #: What was read of a line that has no end yet.
        self._rest = b""

    def lines(self, *, is_last: bool = False) -> list[str]:
        """What was added since, in whole lines; with ``is_last`` what has no end, too."""
        parts = _ENDS.split(self._rest + self._read())
        self._rest = b"" if is_last else parts.pop()[:LINE_BYTES]
        return [part[:LINE_BYTES].decode(errors="replace") for part in parts if part]

    def _read(self) -> bytes:
        try:
            with open_to_read(self._path) as opened:
                file = opened.fileno()
                size = os.fstat(file).st_size
                if size < self._offset:
                    self._offset, self._rest = _offset_after_cut(file, self._offset), b""
                begin = max(self._offset, size - LOOK_BYTES)
                if begin > self._offset:
                    self._rest = b""
                data = os.pread(file, LOOK_BYTES, begin)
        except OSError:  # nothing was printed yet, or it is not what it should be
            return b""
        self._offset = begin + len(data)
        return data


def end_of(path: str, offset: int, most_bytes: int) -> bytes:
    """The end of a file, at most so much, and nothing that was there before ``offset``.

    Empty where nothing was printed, or something else has taken the file's place.
    """
    try:
        with open_to_read(path) as opened:
            file = opened.fileno()
            size = os.fstat(file).st_size
            begin = offset if offset <= size else _offset_after_cut(file, offset)
            begin = max(begin, size - most_bytes)
            return os.pread(file, most_bytes, begin)
    except OSError:
        return b""


def _offset_after_cut(file: int, offset: int) -> int:
    """Where what stood at an offset is, now that the older part of the file was dropped."""
    first = _DROPPED.match(os.pread(file, _FIRST_BYTES, 0))
    if first is None:  # its code has emptied it
        return 0
    return max(first.end(), offset - int(first[1]) + first.end())
