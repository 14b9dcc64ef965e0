"""A trial's standard output and error: two append-only files in its folder, with a size limit.

The trial process writes them directly, so its death loses nothing and no pipe can block it. No
limit of the operating system fits (RLIMIT_FSIZE would also affect checkpoints), so the node calls
`cap` every few seconds; between two calls a file may be larger.
"""

from __future__ import annotations

import os
import sys
from contextlib import suppress
from io import FileIO
from typing import Any, Final, TextIO, cast

from tunemq_shared.system.plain_files import open_regular, open_to_read, open_to_write

STDOUT: Final = "stdout"
STDERR: Final = "stderr"

#: The size above which `cap` shortens a file.
LIMIT_BYTES: Final = 64 * 2**20


def sizes(folder: str) -> tuple[int, int]:
    """Return the sizes in bytes of the two files in ``folder``; 0 for a missing one."""
    found = [0, 0]
    for place, name in enumerate((STDOUT, STDERR)):
        with suppress(OSError):
            found[place] = os.lstat(os.path.join(folder, name)).st_size
    return found[0], found[1]


def redirect(folder: str) -> None:
    """Append the output of this process and its children to the two files in ``folder``.

    Output is line buffered and UTF-8.

    Raises:
        OSError: one of the files cannot be opened.
    """
    flush()
    for name, descriptor in ((STDOUT, 1), (STDERR, 2)):
        file = open_to_write(os.path.join(folder, name), os.O_WRONLY | os.O_APPEND)
        os.dup2(file, descriptor)
        os.close(file)
    # The output must be in the file when a segmentation fault ends the process, in any locale.
    sys.stdout, sys.stderr = _line_buffered(sys.__stdout__), _line_buffered(sys.__stderr__)


def _line_buffered(stream: Any) -> TextIO:
    stream.reconfigure(encoding="utf-8", errors="backslashreplace", line_buffering=True)
    return cast(TextIO, stream)


def flush() -> None:
    """Flush Python's buffers; a full disk or a broken stream loses their content."""
    for stream in (sys.stdout, sys.stderr):
        with suppress(Exception):  # a trial's code may have replaced the streams
            stream.flush()


def settle(folder: str) -> None:
    """Flush Python's buffers and shorten the files in ``folder`` that are too long."""
    flush()
    for name in (STDOUT, STDERR):
        with suppress(OSError):  # removed, or the disk is full: the trial ends all the same
            cap(os.path.join(folder, name), LIMIT_BYTES)


def cap(path: str, limit: int = LIMIT_BYTES) -> None:
    """Cut a file above ``limit`` bytes to its newest half; its first line says so.

    Other processes may keep appending. Output that they write during the cut may be lost.

    Raises:
        OSError: the file does not exist, or cannot be read or written.
    """
    if os.lstat(path).st_size <= limit:
        return
    # Open it first, and read to the end once more just before the cut, so that output printed while
    # the old part is read is kept.
    with (
        open_to_read(path) as file,
        FileIO(open_regular(path, os.O_WRONLY | os.O_APPEND), "ab") as out,
    ):
        dropped = file.seek(-limit // 2, os.SEEK_END)
        dropped += len(file.readline(limit))  # the rest of a cut line
        newest = file.read(limit)  # limited, as the trial may lengthen it meanwhile
        newest += file.read(limit)
        out.truncate(0)
        # One write, so that a reader finds the file either empty or whole.
        first = b"[%d bytes of older output dropped]\n" % dropped
        rest = memoryview(newest)[os.writev(out.fileno(), [first, newest]) - len(first) :]
        while rest:
            rest = rest[out.write(rest) :]
