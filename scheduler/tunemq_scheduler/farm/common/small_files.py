"""Writes the farm's own files durably, and says what the disk refuses."""

from __future__ import annotations

import contextlib
import errno
import os
from pathlib import Path

from tunemq_scheduler.journal.journal_layout import is_full
from tunemq_shared.base.errors import JournalError, JournalFull


def make_folder(folder: Path) -> None:
    """Make a folder that only its user enters, if need be.

    Raises:
        JournalError: the disk refuses it.
    """
    try:
        folder.mkdir(mode=0o700, parents=True, exist_ok=True)
    except OSError as error:
        raise rejected(folder, "made", error) from error


def replace_file(path: Path, data: bytes) -> None:
    """Have ``data`` in the file; after a crash there is that, or what was there before.

    Raises:
        JournalError: the disk refuses it; what was there before stands.
    """
    try:
        write_beside(path, data).replace(path)
    except OSError as error:
        raise rejected(path, "written", error) from error


def write_beside(path: Path, data: bytes) -> Path:
    """Write what will be the file at ``path``, durably, under another name; returns that.

    Raises:
        OSError: it cannot be written; nothing of it takes up room.
    """
    beside = path.with_suffix(".new")
    descriptor = os.open(beside, os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o600)
    try:
        with open(descriptor, "wb") as file:
            file.write(data)
            file.flush()
            os.fsync(descriptor)
    except OSError:
        with contextlib.suppress(OSError):
            beside.unlink()
        raise
    return beside


def rejected(path: Path, what: str, error: OSError) -> JournalError:
    """The error for what the disk refused; a `JournalFull` where it may take it later."""
    told = f"{path} cannot be {what}: {error.strerror}."
    if is_full(error):
        return JournalFull(f"{told} Make room there, for example with `tunemq rm --files NAME`.")
    if error.errno == errno.EROFS:
        return JournalFull(f"{told} Look why it is read-only (`dmesg`), and mount it for writing.")
    return JournalError(told)
