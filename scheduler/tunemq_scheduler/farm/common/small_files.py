"""Writes the farm's own files durably, and reports errors of the disk."""

from __future__ import annotations

import contextlib
import errno
import os
from pathlib import Path

from tunemq_scheduler.journal.journal_files import is_full
from tunemq_shared.base.errors import JournalError, JournalFull


def make_folder(folder: Path) -> None:
    """Create a folder that only its user can enter, if needed.

    Raises:
        JournalError: the disk rejects it.
    """
    try:
        folder.mkdir(mode=0o700, parents=True, exist_ok=True)
    except OSError as error:
        raise rejected(folder, "made", error) from error


def replace_file(path: Path, data: bytes) -> None:
    """Replace a file's content with ``data``; after a crash it has the new or the old content.

    Raises:
        JournalError: the disk rejects the write; the old content is unchanged.
    """
    try:
        write_beside(path, data).replace(path)
    except OSError as error:
        raise rejected(path, "written", error) from error


def write_beside(path: Path, data: bytes) -> Path:
    """Write the future content of ``path`` durably under another name; return that path.

    Raises:
        OSError: it cannot be written; the partial file is deleted.
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
    """Return the error for a failed disk operation; a `JournalFull` if it may succeed later."""
    told = f"{path} cannot be {what}: {error.strerror}."
    if is_full(error):
        return JournalFull(f"{told} Free space there, for example with `tunemq rm --files NAME`.")
    if error.errno == errno.EROFS:
        return JournalFull(
            f"{told} Find out why it is read-only (`dmesg`), and mount it for writing."
        )
    return JournalError(told)
