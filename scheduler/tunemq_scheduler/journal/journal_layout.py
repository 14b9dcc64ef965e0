"""The files of a journal's folder: their names, and how they are made so that a crash may come.

000001.turns       segments: a header, then one frame a turn
000002.snapshot    the state before segment 000002, so that older segments are not needed
history            summaries of trials that are over, to which snapshots refer
lock               held by the one process that writes
"""

from __future__ import annotations

import errno
import os
import re
from pathlib import Path
from typing import Final

#: Of a journal, in the folder of its experiment.
FILE_NAME: Final = "journal"
HISTORY: Final = "history"
HISTORY_COPY: Final = "history.copy"
LOCK: Final = "lock"
TURNS_SUFFIX: Final = ".turns"
SNAPSHOT_SUFFIX: Final = ".snapshot"
#: Between the name of a journal and the time at which salvage put it aside.
DAMAGED_INFIX: Final = ".damaged-"
#: Of files that are being made.
PART_SUFFIX: Final = ".part"

_NUMBERED: Final = re.compile(r"([0-9]{6,18})(\.turns|\.snapshot)")
#: What a disk says that has no room, or none for this user.
_NO_ROOM: Final = frozenset({errno.ENOSPC, errno.EDQUOT})


def turns_file(folder: Path, number: int) -> Path:
    """The segment of this number."""
    return folder / f"{number:06d}{TURNS_SUFFIX}"


def snapshot_file(folder: Path, number: int) -> Path:
    """The snapshot before the segment of this number."""
    return folder / f"{number:06d}{SNAPSHOT_SUFFIX}"


def numbers(folder: Path, suffix: str) -> list[int]:
    """The numbers of the segments, or of the snapshots, that there are, in order."""
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
    """Whether a segment or a snapshot has this name, exactly as it is written."""
    found = _NUMBERED.fullmatch(name)
    return found is not None and f"{int(found[1]):06d}" == found[1] and int(found[1]) > 0


def is_full(error: OSError) -> bool:
    """Whether it says that there is no room, which may change."""
    return error.errno in _NO_ROOM


def free_bytes(folder: Path) -> int:
    """How many bytes may still be written there."""
    found = os.statvfs(folder)
    return found.f_bavail * found.f_frsize


def write_part(path: Path, content: bytes, *, sync: bool) -> Path:
    """Write what will be the file at ``path``, durably, under another name; returns that.

    Raises:
        OSError: it cannot be written.
    """
    part = path.with_name(path.name + PART_SUFFIX)
    descriptor = os.open(part, os.O_CREAT | os.O_TRUNC | os.O_WRONLY | os.O_CLOEXEC, 0o644)
    try:
        write_at(descriptor, content, 0)
        if sync:
            os.fsync(descriptor)
    finally:
        os.close(descriptor)
    return part


def put_in_place(part: Path, path: Path, *, sync: bool) -> None:
    """Give a file that was written its name; after a crash it has that or it has not."""
    os.rename(part, path)
    if sync:
        sync_folder(path.parent)


def write_at(descriptor: int, content: bytes, offset: int) -> None:
    """Write all of it."""
    view = memoryview(content)
    while view:
        written = os.pwrite(descriptor, view, offset)
        view, offset = view[written:], offset + written


def sync_folder(folder: Path) -> None:
    """Have the disk know which files there are."""
    descriptor = os.open(folder, os.O_RDONLY | os.O_DIRECTORY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def remove_parts(folder: Path) -> None:
    """Remove what a crash left half made."""
    for name in os.listdir(folder):
        if name.endswith(PART_SUFFIX):
            os.unlink(folder / name)
