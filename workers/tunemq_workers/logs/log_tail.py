"""Read the lines that a trial adds to an output file: the newest ones, shortened.

The trial owns the file and may replace it, so this module follows no links and opens only regular
files, which cannot block.
"""

from __future__ import annotations

import os
import re
from typing import Final

from tunemq_shared.system.plain_files import open_to_read

#: Bytes of a file that are read at once; older ones that came since the last read are skipped.
LOOK_BYTES: Final = 256 * 2**10
#: Bytes of a line that count.
LINE_BYTES: Final = 4096

#: The first line of a file that `tunemq_workers.logs.output_files.cap` has shortened.
_DROPPED: Final = re.compile(rb"\[(\d{1,18}) bytes of older output dropped\]\n")
_FIRST_BYTES: Final = 64
#: A progress bar ends its line with a carriage return.
_ENDS: Final = re.compile(rb"[\r\n]")


class LogFile:
    """A file that grows and may be shortened.

    Args:
        path: its path; the file need not exist.
        offset: position in bytes at which to begin.
    """

    def __init__(self, path: str, offset: int) -> None:
        self._path, self._offset = path, offset
        #: The beginning of a line whose end was not read yet.
        self._rest = b""

    def lines(self, *, is_last: bool = False) -> list[str]:
        """Return the whole lines that were added; with ``is_last`` also an incomplete one."""
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
        except OSError:  # nothing was printed yet, or it is not a regular file
            return b""
        self._offset = begin + len(data)
        return data


def end_of(path: str, offset: int, most_bytes: int) -> bytes:
    """Return the last ``most_bytes`` bytes of a file, without those before ``offset``.

    Returns b"" if nothing was printed, or if the path is not a regular file.
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
    """Return the new position of an offset after older output was dropped from the file."""
    first = _DROPPED.match(os.pread(file, _FIRST_BYTES, 0))
    if first is None:  # the trial's code has truncated it
        return 0
    return max(first.end(), offset - int(first[1]) + first.end())
