"""Folders in which a store builds what is to appear by one rename, and what crashes leave of them.

    <root>/.staging/<machine>-<random>.lock     held by who fills or empties the folder
    <root>/.staging/<machine>-<random>/         made after the lock, gone before it

The kernel lets a lock go when its holder dies. That is relied upon on one machine only: whether a
lock on a network folder is seen by other machines depends on how each of them mounted it. A name
says which machine's it is; of other machines', and where nothing can be locked, only what has not
changed for a day is a leftover.
"""

from __future__ import annotations

import contextlib
import fcntl
import functools
import os
import platform
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Final, NamedTuple

from tunemq_shared.system.folder_trees import remove_tree, walk
from tunemq_shared.system.plain_files import open_plain, open_regular

STAGING: Final = ".staging"

_LOCK: Final = ".lock"
_ABANDONED_S: Final = 24 * 3600.0


class RemovedFiles(NamedTuple):
    """How many files were removed, and how many bytes they had."""

    files: int
    size: int


class StagingFolder:
    """The staging folder below ``root``; made when it is first needed."""

    def __init__(self, root: Path) -> None:
        self._folder = root / STAGING

    @contextlib.contextmanager
    def new(self) -> Iterator[Path]:
        """A new folder to fill and to rename; what is left of it is removed in the end."""
        folder = self.name()
        with _held(folder.with_name(folder.name + _LOCK)):
            folder.mkdir()
            try:
                yield folder
            finally:
                remove_tree(folder)

    def name(self) -> Path:
        """Where a folder can be moved to that is to be removed; needs no space on the disk.

        Nobody holds its lock: it may be removed by whoever finds it.
        """
        self._folder.mkdir(parents=True, exist_ok=True)
        return self._folder / f"{_machine()}-{os.urandom(8).hex()}"

    def remove_leftovers(self) -> RemovedFiles:
        """Remove what crashed writers left, while others write; what cannot be removed stays."""
        files = size = 0
        try:
            found = {name.removesuffix(_LOCK) for name in os.listdir(self._folder)}
        except OSError:  # there is none, or a trial put something else there
            return RemovedFiles(0, 0)
        for folder in (self._folder / name for name in found):
            lock = folder.with_name(folder.name + _LOCK)
            with _free(lock, folder) as is_free:
                if is_free:
                    removed = measure(folder)
                    files, size = files + removed.files, size + removed.size
                    remove_tree(folder)
                    remove_tree(lock)  # where a trial made it a folder
                    with contextlib.suppress(OSError):
                        lock.unlink()
        return RemovedFiles(files, size)


def measure(folder: Path) -> RemovedFiles:
    """What is below a folder that others may be emptying."""
    files = size = 0
    for path, _, names in walk(folder):
        for name in names:
            with contextlib.suppress(OSError):
                size += os.lstat(os.path.join(path, name)).st_size
                files += 1
    return RemovedFiles(files, size)


@contextlib.contextmanager
def _held(lock: Path) -> Iterator[None]:
    """Hold a new lock; it is removed in the end."""
    while True:
        fd = open_regular(lock, os.O_RDWR | os.O_CREAT)
        try:
            if _try_lock(fd) is False or not _is_at(fd, lock):
                continue  # somebody took it for a leftover before we held it
            try:
                yield
            finally:
                lock.unlink(missing_ok=True)
            return
        finally:
            os.close(fd)


@contextlib.contextmanager
def _free(lock: Path, folder: Path) -> Iterator[bool]:
    """Whether nobody uses the folder; its lock is held meanwhile."""
    is_ours = folder.name.startswith(f"{_machine()}-")
    try:
        fd = open_plain(lock, os.O_RDWR)
    except FileNotFoundError:
        fd = None
    except OSError:  # such as a lease: somebody uses it
        yield False
        return
    if fd is None:
        yield is_ours or _is_abandoned(folder)
        return
    try:
        locked = _try_lock(fd) if is_ours else None
        yield _is_abandoned(folder, lock) if locked is None else locked
    finally:
        os.close(fd)


def _try_lock(fd: int) -> bool | None:
    """Whether we hold the lock now; None where the file system has no locks."""
    try:
        # Of a file open for writing, because NFS wants that.
        fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    except OSError:
        return None
    return True


def _is_at(fd: int, path: Path) -> bool:
    try:
        return os.path.samestat(os.fstat(fd), path.stat())
    except FileNotFoundError:
        return False


def _is_abandoned(*paths: Path) -> bool:
    newest = 0.0
    for top in paths:
        for path, _, names in walk(top):
            for each in (path, *(os.path.join(path, name) for name in names)):
                with contextlib.suppress(OSError):
                    newest = max(newest, os.lstat(each).st_mtime)
        with contextlib.suppress(OSError):
            newest = max(newest, top.lstat().st_mtime)
    return time.time() - newest > _ABANDONED_S


@functools.cache
def _machine() -> str:
    """Names this machine until it is started anew: until then a lock's holder lives or is dead."""
    try:
        boot = Path("/proc/sys/kernel/random/boot_id").read_text(encoding="ascii")
    except OSError:
        return platform.node().replace("-", "_") or "unknown"
    return boot.replace("-", "")[:16].strip()
