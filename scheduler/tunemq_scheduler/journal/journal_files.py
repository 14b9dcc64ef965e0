"""The files of a journal's folder: their names, and crash-safe ways to create them.

000001.turns       segments: a header, then one frame per turn
000002.snapshot    the state before segment 000002, which replaces older segments
history            summaries of ended trials, to which snapshots refer
lock               held by the one process that writes
"""

from __future__ import annotations

import errno
import os
import re
from pathlib import Path
from typing import Final

#: The name of a journal in its experiment's folder.
FILE_NAME: Final = "journal"
HISTORY: Final = "history"
HISTORY_COPY: Final = "history.copy"
LOCK: Final = "lock"
TURNS_SUFFIX: Final = ".turns"
SNAPSHOT_SUFFIX: Final = ".snapshot"
#: Between the name of a journal and the time at which salvage moved it away.
DAMAGED_INFIX: Final = ".damaged-"
#: The suffix of files that are being written.
PART_SUFFIX: Final = ".part"

_NUMBERED: Final = re.compile(r"([0-9]{6,18})(\.turns|\.snapshot)")
#: The errors of a disk without space, or with an exhausted quota.
_NO_ROOM: Final = frozenset({errno.ENOSPC, errno.EDQUOT})


def turns_file(folder: Path, number: int) -> Path:
    """Return the path of the segment with this number."""
    return folder / f"{number:06d}{TURNS_SUFFIX}"


def snapshot_file(folder: Path, number: int) -> Path:
    """Return the path of the snapshot before the segment with this number."""
    return folder / f"{number:06d}{SNAPSHOT_SUFFIX}"


def numbers(folder: Path, suffix: str) -> list[int]:
    """Return the numbers of the existing segments or snapshots, in order."""
    try:
        names = os.listdir(folder)
    except (FileNotFoundError, NotADirectoryError):
        return []
    return sorted(
        int(name.removesuffix(suffix))
        for name in names
        if name.endswith(suffix) and is_numbered(name)
    )


def is_numbered(name: str) -> bool:
    """Whether this is the exact name of a segment or a snapshot."""
    found = _NUMBERED.fullmatch(name)
    return found is not None and f"{int(found[1]):06d}" == found[1] and int(found[1]) > 0


def is_full(error: OSError) -> bool:
    """Whether the error means that there is no space, which may change."""
    return error.errno in _NO_ROOM


def free_bytes(folder: Path) -> int:
    """Return the number of bytes that may still be written there."""
    found = os.statvfs(folder)
    return found.f_bavail * found.f_frsize


def write_part(path: Path, content: bytes) -> Path:
    """Write the content for ``path`` durably to a temporary file; return that file's path.

    Raises:
        OSError: it cannot be written.
    """
    part = path.with_name(path.name + PART_SUFFIX)
    descriptor = os.open(part, os.O_CREAT | os.O_TRUNC | os.O_WRONLY | os.O_CLOEXEC, 0o644)
    try:
        write_at(descriptor, content, 0)
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
    return part


def put_in_place(part: Path, path: Path) -> None:
    """Rename a written file to its final name, atomically even in a crash."""
    os.rename(part, path)
    sync_folder(path.parent)


def write_durably(path: Path, content: bytes) -> None:
    """Write a whole file, atomically even in a crash.

    Raises:
        OSError: it cannot be written.
    """
    put_in_place(write_part(path, content), path)


def write_at(descriptor: int, content: bytes, offset: int) -> None:
    """Write all of the content at an offset."""
    view = memoryview(content)
    while view:
        written = os.pwrite(descriptor, view, offset)
        view, offset = view[written:], offset + written


def sync_folder(folder: Path) -> None:
    """Make a folder's directory entries durable."""
    descriptor = os.open(folder, os.O_RDONLY | os.O_DIRECTORY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def remove_parts(folder: Path) -> None:
    """Delete partial files that a crash left."""
    for name in os.listdir(folder):
        if name.endswith(PART_SUFFIX) and not (folder / name).is_dir():
            os.unlink(folder / name)
