"""Disk operations of the checkpoint cache.

Checkpoints share unchanged files by hard links. So a checkpoint's size is measured by inode, and a
shared inode counts once.
"""

from __future__ import annotations

import errno
import logging
import os
import re
import shutil
import stat
import time
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Final, NamedTuple

from tunemq_shared.base.errors import StoreError
from tunemq_shared.base.safe_text import encodable
from tunemq_shared.checkpoints.local_store import LocalCheckpointStore
from tunemq_shared.checkpoints.manifest import COMMITTED, FILES, MAX_MANIFEST
from tunemq_shared.checkpoints.staging import STAGING, StagingFolder
from tunemq_shared.system.folder_trees import make_private_folder, remove_tree, statuses
from tunemq_shared.system.plain_files import open_to_read, sha256_of

#: Prefix of folders that are being deleted.
TRASH: Final = ".tunemq-trash-"

#: Seconds for counting the files of one checkpoint: meanwhile its search's other disk jobs wait.
_COUNT_S: Final = 0.5
#: The most files that are counted: the node remembers the size of each.
_MAX_NAMES: Final = 100_000
#: Seconds for reading a cache that an earlier node left.
_TAKE_OVER_S: Final = 60.0
_NAME: Final = re.compile(r"checkpoint_(\d+)-(\d+)")

_log = logging.getLogger(__name__)

#: Bytes on the disk, by (device, inode).
Inodes = Mapping[tuple[int, int], int]


class LeftoverCheckpoint(NamedTuple):
    """A committed checkpoint that an earlier node left in its cache."""

    key: str
    sha256: str
    used_at: float
    inodes: Inodes


class CacheContents(NamedTuple):
    """The content of a cache when a node opens it, and the size of its disk in bytes."""

    checkpoints: list[LeftoverCheckpoint]
    disk_bytes: int


def take_over(root: str) -> CacheContents:
    """Make ``root`` a cache, remove leftovers and return its checkpoints.

    The least recently used one comes first.
    Checkpoints that were never committed belonged to an earlier node; the scheduler forgot them
    with that node. A trial can make others, whose reading takes long: after a while the remaining
    ones are removed unread, because the store has them.

    Raises:
        OSError: the folder cannot be created or read.
    """
    make_private_folder(root)
    StagingFolder(Path(root)).remove_leftovers()
    found: list[LeftoverCheckpoint] = []
    deadline = time.monotonic() + _TAKE_OVER_S
    for folder in _folders(root):
        if folder.name == STAGING:
            continue
        try:
            entries = _folders(folder.path)
        except OSError as problem:  # a trial made it, or changed its mode
            _log.warning("cache.not_listed folder=%s problem=%r", folder.path, str(problem))
            remove_tree(folder.path)
            continue
        for entry in entries:
            key = f"{folder.name}/{entry.name}"
            # A trial made it: no checkpoint has such a name.
            if encodable(key) != key or time.monotonic() > deadline:
                _remove_if_possible(root, key)
                continue
            committed = os.path.join(entry.path, COMMITTED)
            try:
                with open_to_read(committed) as file:
                    if os.fstat(file.fileno()).st_size > MAX_MANIFEST:
                        raise FileNotFoundError(errno.ENOENT, "it is no manifest", committed)
                    sha256, _ = sha256_of(file, MAX_MANIFEST)
                    used_at = os.fstat(file.fileno()).st_mtime
            except OSError:  # it does not exist, or a trial has made it unreadable
                _remove_if_possible(root, key)
                continue
            if os.path.isdir(os.path.join(entry.path, FILES)):
                found.append(LeftoverCheckpoint(key, sha256, used_at, measure(root, key)))
            else:
                _remove_if_possible(root, key)
    found.sort(key=lambda one: one.used_at)
    return CacheContents(found, shutil.disk_usage(root).total)


def _remove_if_possible(root: str, key: str) -> None:
    """Remove a checkpoint; log a failure, since a trial can make its files undeletable."""
    try:
        remove(root, key)
    except StoreError as error:
        _log.warning("cache.not_removed folder=%s problem=%r", root, str(error))


def measure(root: str, key: str) -> Inodes:
    """Return the bytes that a checkpoint takes, by inode; skip files that cannot be accessed.

    It ends early, with what it has found, at a checkpoint that takes too long.
    """
    inodes: dict[tuple[int, int], int] = {}
    try:
        for status in _statuses(root, key):
            inodes[status.st_dev, status.st_ino] = max(status.st_size, status.st_blocks * 512)
    except TimeoutError:
        _log.warning("cache.not_measured root=%s key=%s bytes=%d", root, key, sum(inodes.values()))
    return inodes


class CountedBytes(NamedTuple):
    """The size of a checkpoint's files together, of which some may be one file."""

    size: int
    #: Whether all files are counted: a trial can make more than can be counted in time.
    is_complete: bool


def count_bytes(root: str, key: str) -> CountedBytes:
    """Count the bytes of a checkpoint's files."""
    size = 0
    try:
        for status in _statuses(root, key, FILES):
            if not stat.S_ISDIR(status.st_mode):
                size += status.st_size
    except TimeoutError:
        return CountedBytes(size, False)
    return CountedBytes(size, True)


def _statuses(*path: str) -> Iterator[os.stat_result]:
    return statuses(os.path.join(*path), time.monotonic() + _COUNT_S, _MAX_NAMES)


def remove(root: str, key: str) -> None:
    """Remove a checkpoint, if it exists.

    Raises:
        StoreError: it cannot be removed.
    """
    LocalCheckpointStore(root, durable=False).delete_checkpoint(key)


def remove_strays(root: str, folder: str, attempt: int, last: int) -> None:
    """Remove partly written and unreported checkpoints of a dead trial process.

    Args:
        root: the cache.
        folder: name of the trial's folder in it.
        attempt: the attempt that the process ran.
        last: number of the last checkpoint that the process reported.
    """
    StagingFolder(Path(root)).remove_leftovers()
    for entry in _folders(os.path.join(root, folder)):
        of_attempt, number = age_of(entry.name)
        if of_attempt == attempt and number > last:
            remove(root, f"{folder}/{entry.name}")


def age_of(key: str) -> tuple[int, int]:
    """Return the (attempt, number) of a checkpoint, parsed from its key; (0, 0) if it has none."""
    named = _NAME.fullmatch(key.rpartition("/")[2])
    return (int(named[1]), int(named[2])) if named else (0, 0)


def remove_folder(path: str) -> None:
    """Remove a whole cache: first rename it out of the way, then delete it.

    Raises:
        OSError: it cannot be renamed.
    """
    parent, name = os.path.split(path)
    trash = name
    if not name.startswith(TRASH):
        trash = f"{TRASH}{os.urandom(6).hex()}"
        try:
            os.rename(path, os.path.join(parent, trash))
        except FileNotFoundError:
            return
    remove_tree(os.path.join(parent, trash))


def _folders(path: str | Path) -> list[os.DirEntry[str]]:
    try:
        return [entry for entry in os.scandir(path) if entry.is_dir(follow_symlinks=False)]
    except FileNotFoundError:
        return []
