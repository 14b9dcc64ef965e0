"""Files that grow at their end, many at once, with few of them open and few system calls."""

from __future__ import annotations

import errno
import os
from collections import OrderedDict
from typing import Final

from tunemq_scheduler.output.unsynced_files import UnsyncedFiles
from tunemq_shared.base.errors import StoreError
from tunemq_shared.system.plain_files import open_to_write

#: A file's records are held back until the end of the loop's turn, or until they are so many bytes.
HELD_BYTES: Final = 64 * 1024
#: Each logger keeps so many files open; two loggers leave room below the usual limit of 1,024.
OPEN_FILES: Final = 128
_READ_BACK: Final = 1 << 20


class AppendedFile:
    """One file that grows at its end; ``held`` is what was not written yet.

    A last line without an end, which a crash in the middle of a write leaves behind, is cut off
    before the first byte is appended.
    """

    __slots__ = ("held", "is_checked", "path")

    def __init__(self, path: str) -> None:
        self.path = path
        self.held = bytearray()
        self.is_checked = False


class AppendedFiles:
    """Writes what `AppendedFile`s hold, keeping the ones used last open.

    Args:
        limit: how many are open at most.
        unsynced: told which are written.
    """

    def __init__(self, limit: int = OPEN_FILES, unsynced: UnsyncedFiles | None = None) -> None:
        self._limit = limit
        self._unsynced = UnsyncedFiles() if unsynced is None else unsynced
        self._open: OrderedDict[str, int] = OrderedDict()
        self._waiting: dict[AppendedFile, None] = {}

    @property
    def num_open(self) -> int:
        """How many files are open."""
        return len(self._open)

    def append(self, file: AppendedFile, line: bytes) -> None:
        """Add a line, given without its end.

        Raises:
            StoreError: the file cannot be written; what was not written is still held.
        """
        held = file.held
        held += line
        held += b"\n"
        self._waiting[file] = None
        if len(held) > HELD_BYTES:
            self.write(file, waits_for_disk=True)

    def flush(self) -> None:
        """Write all that is held, but for what a full disk does not take now.

        The search does not go on for long then: its journal has no room either, and waits for it.

        Raises:
            StoreError: a file cannot be written; what was not written is still held.
        """
        for file in list(self._waiting):
            self.write(file, waits_for_disk=True)

    def write(self, file: AppendedFile, *, waits_for_disk: bool = False) -> bool:
        """Write what one file holds; returns whether all of it is written.

        Args:
            is_patient: what a full disk does not take is held, and written later.

        Raises:
            StoreError: it cannot be written; what was not written is still held.
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
        """Write what the file holds and close it; later, where a full disk does not take it now.

        Raises:
            StoreError: it cannot be written.
        """
        if not file.held or self.write(file, waits_for_disk=True):
            self.release(file)

    def first_line(self, file: AppendedFile) -> bytes:
        """The first line in the file, empty if there is none; the file is created if need be.

        Raises:
            StoreError: it cannot be opened.
        """
        try:
            descriptor = self._descriptor(file)
            begin = os.pread(descriptor, _READ_BACK, 0)
        except OSError as error:
            raise StoreError(f"{file.path} cannot be opened: {error.strerror}.") from error
        return begin.partition(b"\n")[0]

    def release(self, file: AppendedFile) -> None:
        """Close the file, as before it is replaced by another of its name."""
        descriptor = self._open.pop(file.path, None)
        if descriptor is not None:
            os.close(descriptor)

    def close_all(self) -> None:
        """Write all that is held and close all files.

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
        while len(self._open) >= self._limit:
            os.close(self._open.popitem(last=False)[1])
        descriptor = self._open[file.path] = open_to_write(file.path, os.O_RDWR | os.O_APPEND)
        if not file.is_checked:
            cut_torn_line(descriptor)
            file.is_checked = True
        return descriptor


def cut_torn_line(descriptor: int) -> None:
    """Cut what stands behind the last end of a line."""
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
