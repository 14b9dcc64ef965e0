"""A trial's standard output and error: two files in its folder, appended to and kept below a size.

The host writes them directly, so nothing is lost when it dies and no pipe can block it. No limit
of the operating system fits (RLIMIT_FSIZE would hit checkpoints too), so the node calls `cap`
every few seconds; between two calls a file may be larger.
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
    """How long the two files in ``folder`` are; 0 where there is none."""
    found = [0, 0]
    for place, name in enumerate((STDOUT, STDERR)):
        with suppress(OSError):
            found[place] = os.lstat(os.path.join(folder, name)).st_size
    return found[0], found[1]


def redirect(folder: str) -> None:
    """Append what this process and its children print to the two files in ``folder``, line by line.

    Raises:
        OSError: one of them cannot be opened.
    """
    flush()
    for name, descriptor in ((STDOUT, 1), (STDERR, 2)):
        file = open_to_write(os.path.join(folder, name), os.O_WRONLY | os.O_APPEND)
        os.dup2(file, descriptor)
        os.close(file)
    # What was printed is to be there when a segmentation fault ends the process, whatever the
    # locale.
    sys.stdout, sys.stderr = _line_buffered(sys.__stdout__), _line_buffered(sys.__stderr__)


def _line_buffered(stream: Any) -> TextIO:
    stream.reconfigure(encoding="utf-8", errors="backslashreplace", line_buffering=True)
    return cast(TextIO, stream)


def flush() -> None:
    """Write out what Python still holds; a full disk loses it, and so does a broken stream."""
    for stream in (sys.stdout, sys.stderr):
        with suppress(Exception):  # a trial's code may have put anything there
            stream.flush()


def settle(folder: str) -> None:
    """Complete the files in ``folder``: write out what Python holds, and shorten long ones."""
    flush()
    for name in (STDOUT, STDERR):
        with suppress(OSError):  # it was removed, or the disk is full: the trial ends all the same
            cap(os.path.join(folder, name), LIMIT_BYTES)


def cap(path: str, limit: int = LIMIT_BYTES) -> None:
    """Shorten a file above ``limit`` bytes to its newest half, saying so in its first line.

    Its writers may go on: they append. What they write in this very moment may be lost.

    Raises:
        OSError: the file is not there, or cannot be read or written.
    """
    if os.lstat(path).st_size <= limit:
        return
    # Opened before anything is read, and read to the end once more just before the cut: what is
    # printed while the old part is read is kept.
    with (
        open_to_read(path) as file,
        FileIO(open_regular(path, os.O_WRONLY | os.O_APPEND), "ab") as out,
    ):
        dropped = file.seek(-limit // 2, os.SEEK_END)
        dropped += len(file.readline(limit))  # half a line
        newest = file.read(limit)  # its trial may make it as long as it likes meanwhile
        newest += file.read(limit)
        out.truncate(0)
        # In one piece: who looks at the file meanwhile finds it empty or whole.
        first = b"[%d bytes of older output dropped]\n" % dropped
        rest = memoryview(newest)[os.writev(out.fileno(), [first, newest]) - len(first) :]
        while rest:
            rest = rest[out.write(rest) :]
