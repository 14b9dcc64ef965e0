"""Whether a disk has room."""

from __future__ import annotations

import os
from typing import Final

from tunemq_scheduler.security.findings import Finding, ok, problem, warning
from tunemq_shared.byte_sizes import show_bytes

#: With less nobody can work: a checkpoint and a journal want room at the same time.
_FULL_BYTES: Final = 256 * 2**20
#: Below both it will soon be full.
_SCARCE_BYTES: Final = 10 * 2**30
_SCARCE_SHARE: Final = 0.05
_FIX: Final = (
    "remove what is not needed there (du -xh --max-depth=2 says what it is), such as searches that"
    " are over: tunemq rm --files NAME; or use another disk: tunemq scheduler --results DIR, tunemq"
    " worker --workdir DIR"
)


def check_folder(check: str, what: str, folder: str) -> Finding:
    """The disk of a folder of this machine, or of the first one above it that is there.

    Args:
        what: the folder is, for people.
    """
    place = os.path.abspath(folder)
    while not os.path.isdir(place) and place != "/":
        place = os.path.dirname(place)
    try:
        disk = os.statvfs(place)
    except OSError as error:
        return problem(
            check, f"{what} {place} cannot be looked at: {error.strerror}", f"ls -ld {place}"
        )
    free, size = disk.f_bavail * disk.f_frsize, disk.f_blocks * disk.f_frsize
    return judge_disk(check, f"{what} {folder}", free, size)


def judge_disk(check: str, what: str, free: float, size: float | None) -> Finding:
    """What so many free bytes mean.

    Args:
        what: is on the disk.
        size: of the disk, where it is known.
    """
    of = f" of {show_bytes(int(size))}" if size else ""
    room = f"{what}: {show_bytes(int(free))}{of} are free"
    if free < _FULL_BYTES:
        return problem(check, f"{room}: the disk is full", _FIX)
    if size and free < min(_SCARCE_BYTES, _SCARCE_SHARE * size):
        return warning(check, f"{room}: the disk is nearly full", _FIX)
    return ok(check, room)
