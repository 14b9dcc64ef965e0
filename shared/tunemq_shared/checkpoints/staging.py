"""Staging folders, in which a store builds what then appears by one rename, and their leftovers.

    <root>/.staging/<machine>-<random>.lock     held by the process that fills or empties the folder
    <root>/.staging/<machine>-<random>/         made after the lock, removed before it

The kernel releases a lock when its holder dies. Only locks of this machine are relied upon: whether
other machines see a lock on a network folder depends on their mounts. A name contains its machine;
for other machines', and where locks do not work, only folders unchanged for a day are leftovers.
"""

from __future__ import annotations

import contextlib
import errno
import fcntl
import functools
import math
import os
import platform
import stat
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Final, NamedTuple

from tunemq_shared.base.retrying import not_mounted
from tunemq_shared.system.folder_trees import names_in, remove_tree, statuses
from tunemq_shared.system.plain_files import open_plain, open_regular

STAGING: Final = ".staging"

_LOCK: Final = ".lock"
#: How many names `new` tries.
_CLAIMS: Final = 10
_ABANDONED_S: Final = 24 * 3600.0
#: How long `remove_leftovers` looks at files: trials can put many there, and other jobs wait.
_LOOK_S: Final = 1.0


def make_in_store(folder: str | Path) -> None:
    """Make a folder if it is missing, but never the one above it.

    Where a shared folder is not mounted, files would go to this machine's disk.

    Raises:
        StoreUnavailable: The folder above it is missing.
    """
    try:
        Path(folder).mkdir(exist_ok=True)
    except FileNotFoundError as error:
        raise not_mounted(os.path.dirname(folder)) from error


class RemovedFiles(NamedTuple):
    """The number of removed files, and their size in bytes."""

    files: int
    size: int


class StagingFolder:
    """The staging folder below ``root``, which exists; made on first use."""

    def __init__(self, root: Path) -> None:
        self._folder = root / STAGING

    @contextlib.contextmanager
    def new(self) -> Iterator[Path]:
        """Make a new folder to fill and rename; if it is still there at the end, it is removed."""
        folder, lock, fd = self._claim()
        try:
            folder.mkdir()
            yield folder
        finally:
            remove_tree(folder)
            try:
                lock.unlink(missing_ok=True)
            finally:
                os.close(fd)

    def _claim(self) -> tuple[Path, Path, int]:
        """Return a free path, and the path and descriptor of its lock file, which is held."""
        for _ in range(_CLAIMS):
            folder = self.name()
            lock = folder.with_name(folder.name + _LOCK)
            fd = open_regular(lock, os.O_RDWR | os.O_CREAT | os.O_EXCL)
            if _try_lock(fd) is not False and _is_at(fd, lock):
                return folder, lock, fd
            os.close(fd)  # removed as a leftover before we held it, or a trial locked it
        raise BlockingIOError(
            errno.EWOULDBLOCK, "another process locks or removes each new file", str(self._folder)
        )

    def name(self) -> Path:
        """A free path to which a doomed folder can be renamed; needs no disk space.

        It has no lock: any process that finds it may remove it.
        """
        make_in_store(self._folder)
        return self._folder / f"{_machine()}-{os.urandom(8).hex()}"

    def remove_leftovers(self) -> RemovedFiles:
        """Remove the folders of crashed writers while others write; unremovable files stay.

        Within `_LOOK_S`, it counts what it removes and finds out which folders are abandoned.
        """
        files = size = 0
        until = time.monotonic() + _LOOK_S
        found = {name.removesuffix(_LOCK) for name in names_in(self._folder)}
        for folder in (self._folder / name for name in found):
            lock = folder.with_name(folder.name + _LOCK)
            with _free(lock, folder, until) as is_free:
                if is_free:
                    removed = measure(folder, until)
                    files, size = files + removed.files, size + removed.size
                    remove_tree(folder)
                    remove_tree(lock)  # a trial may have made it a folder
                    with contextlib.suppress(OSError):
                        lock.unlink()
        return RemovedFiles(files, size)


def measure(folder: Path, until: float = math.inf) -> RemovedFiles:
    """Count the files and bytes below a folder that other processes may be emptying."""
    files = size = 0
    with contextlib.suppress(TimeoutError):
        for status in statuses(folder, until):
            if not stat.S_ISDIR(status.st_mode):
                size += status.st_size
                files += 1
    return RemovedFiles(files, size)


@contextlib.contextmanager
def _free(lock: Path, folder: Path, until: float) -> Iterator[bool]:
    """Whether no process uses the folder; holds its lock meanwhile."""
    is_ours = folder.name.startswith(f"{_machine()}-")
    if not is_ours and time.monotonic() >= until:  # trials can put as many names here
        yield False
        return
    try:
        fd = open_plain(lock, os.O_RDWR)
    except FileNotFoundError:
        fd = None
    except OSError:  # such as a lease: a process uses it
        yield False
        return
    if fd is None:
        yield is_ours or _is_abandoned(until, folder)
        return
    try:
        locked = _try_lock(fd) if is_ours else None
        yield _is_abandoned(until, folder, lock) if locked is None else locked
    finally:
        os.close(fd)


def _try_lock(fd: int) -> bool | None:
    """Try to take the lock: whether we hold it; None if the file system has no locks."""
    try:
        # NFS locks need a file that is open for writing.
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


def _is_abandoned(until: float, *paths: Path) -> bool:
    """Whether nothing there is younger than a day; False if there is too much to look at."""
    oldest = time.time() - _ABANDONED_S
    try:
        return all(one.st_mtime < oldest for path in paths for one in statuses(path, until))
    except TimeoutError:
        return False


@functools.cache
def _machine() -> str:
    """Identify this boot of the machine: a lock of an earlier boot has no holder."""
    try:
        boot = Path("/proc/sys/kernel/random/boot_id").read_text(encoding="ascii")
    except OSError:
        return platform.node().replace("-", "_") or "unknown"
    return boot.replace("-", "")[:16].strip()
