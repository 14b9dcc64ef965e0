"""Appends to many files at once, with few of them open and few system calls."""

from __future__ import annotations

import errno
import os
from collections import OrderedDict
from typing import Final

from tunemq_scheduler.output.pending_fsyncs import UnsyncedFiles
from tunemq_scheduler.output.result_file_reader import MOST_ROW_BYTES
from tunemq_shared.base.errors import StoreError
from tunemq_shared.system.plain_files import open_to_write

#: A file's records are buffered until the end of the loop's turn, or up to this many bytes.
HELD_BYTES: Final = 64 * 1024
#: The most open files of each logger; two loggers stay below the usual limit of 1,024.
OPEN_FILES: Final = 128
_READ_BACK: Final = 1 << 20


class AppendedFile:
    """One file to append to; ``held`` is the data not yet written.

    A last line without an end, left by a crash during a write, is cut off before the first append.
    """

    __slots__ = ("held", "is_checked", "path")

    def __init__(self, path: str) -> None:
        self.path = path
        self.held = bytearray()
        self.is_checked = False


class AppendedFiles:
    """Write the buffered data of `AppendedFile`s, and keep the most recently used ones open.

    Args:
        unsynced: records which files are written.
    """

    def __init__(self, unsynced: UnsyncedFiles | None = None) -> None:
        self._unsynced = UnsyncedFiles() if unsynced is None else unsynced
        self._open: OrderedDict[str, int] = OrderedDict()
        self._waiting: dict[AppendedFile, None] = {}

    def append(self, file: AppendedFile, line: bytes) -> None:
        """Add a line, given without its end.

        Raises:
            StoreError: the file cannot be written; unwritten data stays buffered.
        """
        held = file.held
        held += line
        held += b"\n"
        self._waiting[file] = None
        if len(held) > HELD_BYTES:
            self.write(file, waits_for_disk=True)

    def flush(self) -> None:
        """Write all buffered data, except what a full disk does not accept now.

        The search cannot continue for long then: its journal is on the same disk and waits, too.

        Raises:
            StoreError: a file cannot be written; unwritten data stays buffered.
        """
        for file in list(self._waiting):
            self.write(file, waits_for_disk=True)

    def write(self, file: AppendedFile, *, waits_for_disk: bool = False) -> bool:
        """Write one file's buffered data; return whether all of it is written.

        Args:
            waits_for_disk: keep data that a full disk does not accept, and write it later.

        Raises:
            StoreError: it cannot be written; unwritten data stays buffered.
        """
        held = file.held
        try:
            descriptor = self._descriptor(file)
            while held:
                del held[: os.write(descriptor, held)]
        except OSError as error:
            if waits_for_disk and error.errno in (errno.ENOSPC, errno.EDQUOT):
                self._unsynced.hold(file.path)
                return False
            raise StoreError(
                f"{file.path} cannot be written: {error.strerror}; {len(held)} bytes wait. "
                "Make room or make the folder writable, then restore the experiment."
            ) from error
        self._waiting.pop(file, None)
        self._unsynced.note(file.path)
        return True

    def close(self, file: AppendedFile) -> None:
        """Write the file's buffered data and close it; later if a full disk does not accept it now.

        Raises:
            StoreError: it cannot be written.
        """
        if not file.held or self.write(file, waits_for_disk=True):
            self.release(file)

    def first_line(self, file: AppendedFile) -> bytes:
        """Return the file's first line, empty if there is none; create the file if necessary.

        Raises:
            StoreError: it cannot be opened, or the line is longer than any that TuneMQ writes.
        """
        try:
            with open(self._descriptor(file), "rb", closefd=False) as begin:
                begin.seek(0)
                line = begin.readline(MOST_ROW_BYTES)
        except OSError as error:
            raise StoreError(f"{file.path} cannot be opened: {error.strerror}.") from error
        if len(line) == MOST_ROW_BYTES and not line.endswith(b"\n"):
            raise StoreError(
                f"The first line of {file.path} has {MOST_ROW_BYTES} bytes or more: the search did "
                "not write it. Restore the experiment; that rebuilds the file."
            )
        return line.removesuffix(b"\n")

    def release(self, file: AppendedFile) -> None:
        """Close the file, for instance before another file replaces it."""
        descriptor = self._open.pop(file.path, None)
        if descriptor is not None:
            os.close(descriptor)

    def close_all(self) -> None:
        """Write all buffered data and close all files.

        Raises:
            StoreError: a file cannot be written.
        """
        while self._waiting:
            self.write(next(iter(self._waiting)))
        while self._open:
            os.close(self._open.popitem()[1])

    def _descriptor(self, file: AppendedFile) -> int:
        descriptor = self._open.get(file.path)
        if descriptor is not None:
            self._open.move_to_end(file.path)
            return descriptor
        while len(self._open) >= OPEN_FILES:
            os.close(self._open.popitem(last=False)[1])
        descriptor = self._open[file.path] = open_to_write(file.path, os.O_RDWR | os.O_APPEND)
        if not file.is_checked:
            cut_torn_line(descriptor)
            file.is_checked = True
        return descriptor


def cut_torn_line(descriptor: int) -> None:
    """Cut off everything after the last line end."""
    size = os.fstat(descriptor).st_size
    end = size
    while end > 0:
        start = max(0, end - _READ_BACK)
        newline = os.pread(descriptor, end - start, start).rfind(b"\n")
        if newline >= 0:
            end = start + newline + 1
            break
        end = start
    if end != size:
        os.ftruncate(descriptor, end)
