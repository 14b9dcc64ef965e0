"""What the cache of checkpoints does on the disk, which may take its time: a thread does it.

Files that several checkpoints share are hard links to one inode, so what a checkpoint takes is told
by inode, and is counted once however many checkpoints have it.
"""

from __future__ import annotations

import errno
import hashlib
import logging
import os
import queue
import re
import shutil
import threading
from collections.abc import Callable, Mapping
from functools import partial
from pathlib import Path
from typing import Final, NamedTuple, TypeVar

from tunemq_shared.base.errors import StoreError
from tunemq_shared.base.safe_text import encodable
from tunemq_shared.checkpoints.local_store import LocalCheckpointStore
from tunemq_shared.checkpoints.manifest import COMMITTED, FILES, MAX_MANIFEST
from tunemq_shared.checkpoints.staging import STAGING, StagingFolder
from tunemq_shared.system.folder_trees import remove_tree, walk
from tunemq_shared.system.plain_files import open_to_read
from tunemq_workers.runtime.reactor import Reactor

#: What the names of folders begin with that are being removed.
TRASH: Final = ".tunemq-trash-"

_NAME: Final = re.compile(r"checkpoint_(\d+)-(\d+)")
_T = TypeVar("_T")

_log = logging.getLogger(__name__)

#: Bytes on the disk, by (device, inode).
Inodes = Mapping[tuple[int, int], int]


class LeftoverCheckpoint(NamedTuple):
    """A committed checkpoint that a node before this one has left in its cache."""

    key: str
    sha256: str
    used_at: float
    inodes: Inodes


class CacheContents(NamedTuple):
    """What is in a cache when a node opens it, and how large the disk is that it is on."""

    checkpoints: list[LeftoverCheckpoint]
    disk_bytes: int


class CacheDisk:
    """Does jobs one after another in a thread of its own; the reactor hears of their ends.

    The thread begins with the first job.
    """

    def __init__(self, reactor: Reactor) -> None:
        self._reactor = reactor
        self._jobs: queue.SimpleQueue[Callable[[], None]] = queue.SimpleQueue()
        self._thread = threading.Thread(target=self._work, name="cache disk", daemon=True)

    def run(
        self,
        job: Callable[[], _T],
        then: Callable[[_T], None],
        failed: Callable[[OSError], None] | None = None,
    ) -> None:
        """Have ``job`` done, then call ``then`` with what it returns, or ``failed``."""
        if not self._thread.is_alive():
            self._thread.start()
        self._jobs.put(partial(self._do, job, then, failed or _log_failure))

    def _work(self) -> None:
        while True:
            self._jobs.get()()

    def _do(
        self,
        job: Callable[[], _T],
        then: Callable[[_T], None],
        failed: Callable[[OSError], None],
    ) -> None:
        try:
            result = job()
        except OSError as problem:
            self._reactor.post(partial(failed, problem))
        else:
            self._reactor.post(partial(then, result))


def take_over(root: str) -> CacheContents:
    """Make ``root`` a cache: remove what is of no use, and say what is; the longest unused first.

    Checkpoints that were never committed belonged to a node that is no more: the scheduler has
    forgotten them with it.

    Raises:
        OSError: the folder cannot be made or read.
    """
    os.makedirs(root, mode=0o700, exist_ok=True)
    StagingFolder(Path(root)).remove_leftovers()
    found = []
    for folder in _folders(root):
        if folder.name == STAGING:
            continue
        for entry in _folders(folder.path):
            key = f"{folder.name}/{entry.name}"
            if encodable(key) != key:  # a trial made it: no checkpoint has such a name
                _remove_if_possible(root, key)
                continue
            committed = os.path.join(entry.path, COMMITTED)
            try:
                with open_to_read(committed) as file:
                    if os.fstat(file.fileno()).st_size > MAX_MANIFEST:
                        raise FileNotFoundError(errno.ENOENT, "it is no manifest", committed)
                    sha256 = hashlib.file_digest(file, "sha256").hexdigest()
                    used_at = os.fstat(file.fileno()).st_mtime
            except OSError:  # there is none, or a trial keeps others from reading it
                _remove_if_possible(root, key)
                continue
            if os.path.isdir(os.path.join(entry.path, FILES)):
                found.append(LeftoverCheckpoint(key, sha256, used_at, measure(root, key)))
            else:
                _remove_if_possible(root, key)
    found.sort(key=lambda one: one.used_at)
    return CacheContents(found, shutil.disk_usage(root).total)


def _remove_if_possible(root: str, key: str) -> None:
    """Remove a checkpoint, or leave it: a trial may keep others from removing what it made."""
    try:
        remove(root, key)
    except StoreError as error:
        _log.warning("cache.not_removed folder=%s problem=%r", root, str(error))


def measure(root: str, key: str) -> Inodes:
    """What a checkpoint takes; what somebody removes or hides meanwhile does not count."""
    inodes: dict[tuple[int, int], int] = {}
    for path, _, names in walk(os.path.join(root, key)):
        for name in ("", *names):
            try:
                status = os.lstat(os.path.join(path, name))
            except OSError:
                continue
            inodes[status.st_dev, status.st_ino] = max(status.st_size, status.st_blocks * 512)
    return inodes


def remove(root: str, key: str) -> None:
    """Remove a checkpoint; one that is not there is no error.

    Raises:
        StoreError: it cannot be removed.
    """
    LocalCheckpointStore(root, durable=False).delete_checkpoint(key)


def remove_strays(root: str, folder: str, attempt: int, last: int) -> None:
    """Remove what a dead host has left: files half written, checkpoints nobody was told of.

    ``folder`` is its trial's, ``last`` the number of the last checkpoint that it told of.
    """
    StagingFolder(Path(root)).remove_leftovers()
    for entry in _folders(os.path.join(root, folder)):
        of_attempt, number = age_of(entry.name)
        if of_attempt == attempt and number > last:
            remove(root, f"{folder}/{entry.name}")


def age_of(key: str) -> tuple[int, int]:
    """The epoch and the number of a checkpoint, by its key."""
    named = _NAME.fullmatch(key.rpartition("/")[2])
    return (int(named[1]), int(named[2])) if named else (0, 0)


def remove_folder(path: str) -> None:
    """Remove a whole cache: at once from where it is looked for, then from the disk.

    Raises:
        OSError: it cannot be moved away.
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


def _log_failure(problem: OSError) -> None:
    _log.error("cache.disk_failed problem=%r", str(problem))
