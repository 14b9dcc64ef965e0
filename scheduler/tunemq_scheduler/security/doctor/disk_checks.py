"""Check whether a disk has space, and whether a folder on it is writable."""

from __future__ import annotations

import errno
import os
from typing import Final

from tunemq_scheduler.security.findings import Finding, FindingLevel, ok, problem, warning
from tunemq_shared.base.byte_sizes import show_bytes
from tunemq_shared.code.blob_folder import BLOBS
from tunemq_shared.health.node_metrics import FEW_INODES, FULL_BYTES
from tunemq_shared.system.write_probe import write_probe

#: Less than both means nearly full.
_SCARCE_BYTES: Final = 10 * 2**30
_SCARCE_SHARE: Final = 0.05
MAKE_ROOM: Final = (
    "remove files there (du -xh --max-depth=2 shows the large ones), for instance of ended"
    " searches: tunemq rm --files NAME; or use another disk: tunemq scheduler --results DIR, tunemq"
    " worker --workdir DIR"
)


def check_folder(check: str, what: str, folder: str, *, is_in_use: bool = False) -> Finding:
    """Check the disk of a folder of this machine, and whether this user can write to the folder.

    If the folder does not exist, its first existing parent is checked.

    Args:
        check: The name of the check.
        what: The folder's use, for people.
        folder: Its path.
        is_in_use: A running scheduler uses the folder, so that it is a problem if it is missing.
    """
    given = os.path.abspath(folder)
    if is_in_use and not os.path.exists(given):
        return problem(
            check,
            f"{what} {folder} does not exist on this machine, and the running scheduler uses it",
            "mount it here, or move it back to this path if it was moved: checkpoints and code of"
            " searches are in there; ls -ld shows which folder above it exists",
        )
    place = given
    while not os.path.exists(place) and place != "/":
        place = os.path.dirname(place)
    try:
        disk = os.statvfs(place)
        owner = os.stat(place).st_uid
    except OSError as error:
        return problem(
            check, f"{what} {place} cannot be looked at: {error.strerror}", f"ls -ld {place}"
        )
    named = f"{what} {folder}"
    if disk.f_flag & os.ST_RDONLY:
        return problem(
            check,
            f"{named}: the file system is read-only",
            f"see why (findmnt -T {place}; dmesg: the kernel makes a file system read-only after"
            " an error of its disk), repair it, and mount it for writing",
        )
    free, size = disk.f_bavail * disk.f_frsize, disk.f_blocks * disk.f_frsize
    found = judge_disk(check, named, free, size)
    if found.level is FindingLevel.PROBLEM:
        return found
    if disk.f_files and disk.f_favail < FEW_INODES:
        return problem(
            check,
            f"{named}: the file system has inodes for {disk.f_favail} more files only",
            f"df -i {place}; du --inodes -xh --max-depth=2 says where the files are. {MAKE_ROOM}",
        )
    try:
        write_probe(place)
    except OSError as error:
        me = os.geteuid()
        if error.errno in {errno.EACCES, errno.EPERM} and place == given and owner != me:
            return warning(
                check,
                f"{named}: whether it can be written was not checked: it belongs to user {owner},"
                f" and user {me} may not write there",
                f"run this as the user of the scheduler: sudo -u '#{owner}' tunemq doctor",
            )
        missing = "" if place == given else f" does not exist, and {place}"
        return problem(
            check,
            f"{named}{missing} cannot be written: {error.strerror}",
            f"ls -ld {place}; give the scheduler's user the right to write there, or name another"
            " folder: tunemq scheduler --results DIR (or --store DIR)",
        )
    if place != given:
        return warning(
            check,
            f"{named} does not exist",
            "tunemq scheduler makes it at its start; if that runs already, give this command its"
            " --results, or find out who removed the folder",
        )
    if found.level is FindingLevel.OK:
        return ok(check, f"{found.what}; a test file was written there and removed")
    return found


def check_blobs(store: str) -> list[Finding]:
    """Check that this user can use the code that submitters write into a folder as the store."""
    blobs = os.path.join(store, BLOBS)
    if not os.path.lexists(blobs) or os.access(blobs, os.R_OK | os.W_OK | os.X_OK):
        return []
    owner = os.stat(blobs).st_uid
    return [
        problem(
            "store",
            f"the code of searches in {blobs} belongs to user {owner}, and user {os.geteuid()}"
            " cannot read and write it",
            f"chgrp and chmod 2770 {blobs} for a group of the scheduler's user and of all who"
            " submit: see 'A folder as the store' in docs/farm.md",
        )
    ]


def judge_disk(check: str, what: str, free: float, size: float | None) -> Finding:
    """Judge the free space of a disk.

    Args:
        check: The name of the check.
        what: The disk's use, for people.
        free: Free bytes.
        size: The disk's size in bytes, if known.
    """
    of = f" of {show_bytes(int(size))}" if size else ""
    room = f"{what}: {show_bytes(int(free))}{of} are free"
    if free < FULL_BYTES:
        return problem(check, f"{room}: the disk is full", MAKE_ROOM)
    if size and free < min(_SCARCE_BYTES, _SCARCE_SHARE * size):
        return warning(check, f"{room}: the disk is nearly full", MAKE_ROOM)
    return ok(check, room)
