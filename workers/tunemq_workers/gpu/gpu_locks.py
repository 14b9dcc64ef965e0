"""GPU lock files: each GPU belongs to one node, until that node's process ends.

All nodes of a machine look in the same folder, so the locks work across users, and across
containers that share the folder. A farm's worker locks the GPUs that it offers at its start
(`take_gpus`); an embedded node locks a GPU only while its trials use it (`GpuLocks`).

Any user may lock those files, so a trial could keep a worker from its GPU. A node of root therefore
also locks a file that only root can reach, and root's worker ignores who else locks the other one.
"""

from __future__ import annotations

import errno
import fcntl
import logging
import os
import re
import stat
import time
from collections.abc import Iterable
from contextlib import suppress
from typing import Final

from tunemq_shared.base.errors import ConfigError
from tunemq_shared.protocol.messages import Gpu
from tunemq_shared.system.plain_files import TRIES, move_aside, open_plain

_log = logging.getLogger(__name__)

#: Candidate folders for lock files: the first that all users may use, else the last.
FOLDERS: Final = ("/dev/shm", "/run/lock", "/tmp")  # noqa: S108  not $TMPDIR, which differs by user
#: The folder, in that folder, of the lock files that only root can reach.
ROOT_FOLDER: Final = "tunemq-gpu-root"
#: The mode of a folder in which all users may create files but not delete others' files.
_FOR_ALL: Final = stat.S_ISVTX | stat.S_IWOTH | stat.S_IXOTH
_UNSAFE: Final = re.compile(r"[^\w.-]+")
#: Other users' workers must be able to lock the file, too.
_MODE: Final = 0o666
#: A node that only tests a lock holds it for a moment: number of tries, seconds between them.
_TRIES: Final = (10, 0.005)


class GpuLocks:
    """The GPUs that a node locks and releases one by one. Not thread-safe.

    Args:
        me: describes this node to others, in addition to the pid.
        folder: the folder of the lock files; see `take_gpus`.
    """

    def __init__(self, me: str, folder: str | None = None) -> None:
        self._me, self._folder = me, folder or _folder()
        self._held: dict[str, list[int]] = {}

    def has(self, uuid: str) -> bool:
        """Return whether this node holds the lock."""
        return uuid in self._held

    def take(self, uuid: str, *, takes_over: bool = False) -> str:
        """Lock a GPU; return "" on success, else the holder or the problem, for people.

        Args:
            uuid: the GPU.
            takes_over: whether a node of root ignores locks of other users.
        """
        if uuid in self._held:
            return ""
        roots, path = _root_folder(self._folder), _path(self._folder, uuid)
        own = _lock(_path(roots, uuid), self._me) if roots else None
        if isinstance(own, str):
            return own
        shared = _lock(path, self._me)
        if isinstance(shared, str):
            if own is None or not takes_over:
                if own is not None:
                    os.close(own)
                return shared
            _log.warning(
                "Replacing the lock file of GPU %s, which another user keeps from this worker: %s.",
                uuid,
                shared,
            )
            shared = _replace(path, _path(roots, f"{uuid}.new"), self._me)
        self._held[uuid] = [lock for lock in (own, shared) if isinstance(lock, int)]
        return ""

    def give_back(self, uuid: str) -> None:
        """Release a GPU's lock if this node holds it."""
        for descriptor in self._held.pop(uuid, ()):
            os.close(descriptor)

    def give_back_all(self) -> None:
        """Release the locks that this node holds."""
        for uuid in list(self._held):
            self.give_back(uuid)

    def user(self, uuid: str) -> str:
        """Return who else holds the lock, or why that is unknown; "" if the lock is free."""
        if uuid in self._held:
            return ""
        try:
            descriptor = _open(_path(self._folder, uuid))
        except OSError as problem:
            return _unusable(problem)
        try:
            # A shared lock, so that several nodes may test at once; `take` retries meanwhile.
            fcntl.flock(descriptor, fcntl.LOCK_SH | fcntl.LOCK_NB)
        except OSError:
            return _user(descriptor)
        os.close(descriptor)
        return ""


def take_gpus(gpus: Iterable[Gpu], me: str, folder: str | None = None) -> GpuLocks:
    """Lock these GPUs for as long as this process lives; all or none.

    Args:
        gpus: the GPUs.
        me: describes this node to others, in addition to the pid.
        folder: the folder of the lock files; by default the first of `FOLDERS` that all may use.

    Raises:
        ConfigError: another process holds a lock, or a lock file cannot be opened. To a process of
            root that applies only to the lock files of root.
    """
    locks = GpuLocks(me, folder)
    for gpu in gpus:
        if problem := locks.take(gpu.uuid, takes_over=True):
            locks.give_back_all()
            raise ConfigError(
                f"GPU {gpu.uuid} cannot be offered: {problem}. Stop its user, or name the GPUs of"
                " each worker with --gpus."
            )
    return locks


def _lock(path: str, me: str) -> int | str:
    """Lock a file; return its descriptor, or the holder or the problem, for people."""
    try:
        descriptor = _open(path)
    except OSError as problem:
        return _unusable(problem)
    if not _is_locked_by_us(descriptor):
        return _user(descriptor)
    _sign(descriptor, me)
    return descriptor


def _replace(path: str, new: str, me: str) -> int | str:
    """Put a file that is already locked in place of another user's file or folder, if possible."""
    locked = _lock(new, me)
    with suppress(OSError):  # the worker has its own lock; only other users do not see that
        if os.path.isdir(path) and not os.path.islink(path):
            move_aside(path)
        os.replace(new, path)
    return locked


def _is_locked_by_us(descriptor: int) -> bool:
    tries, pause_s = _TRIES
    for n in range(tries):
        try:
            fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError:
            if n + 1 < tries:
                time.sleep(pause_s)
        else:
            return True
    return False


def _sign(descriptor: int, me: str) -> None:
    with suppress(OSError):  # a lock on a read-only file is valid without a note
        os.truncate(descriptor, 0)
        os.write(descriptor, f"process {os.getpid()} ({me})\n".encode())


def _user(descriptor: int) -> str:
    """Return the lock holder's note and close the file."""
    said = os.read(descriptor, 200).decode(errors="replace")
    os.close(descriptor)
    note = "".join(filter(str.isprintable, said.strip()))
    return f"used by {note or 'a process that is not known'}"


def _unusable(problem: OSError) -> str:
    return f"it cannot be locked: {problem.filename}: {problem.strerror}"


def _folder() -> str:
    *first, last = FOLDERS
    return next(filter(_is_for_all, first), last)


def _is_for_all(folder: str) -> bool:
    """Check the mode bits, not access rights, so that root gets the same answer as other users."""
    try:
        mode = os.stat(folder).st_mode
    except OSError:
        return False
    return stat.S_ISDIR(mode) and mode & _FOR_ALL == _FOR_ALL


def _root_folder(folder: str) -> str:
    """Make the folder of root's locks; return "" for other users, or if it cannot be made."""
    path = os.path.join(folder, ROOT_FOLDER)
    for _ in range(TRIES if os.geteuid() == 0 else 0):
        with suppress(OSError):  # another user may replace the folder until it is root's
            with suppress(FileExistsError):
                os.mkdir(path, 0o700)
            found = os.lstat(path)
            if stat.S_ISDIR(found.st_mode) and not (found.st_uid or found.st_mode & 0o077):
                return path
            move_aside(path)
    return ""


def _path(folder: str, uuid: str) -> str:
    return os.path.join(folder, f"tunemq-gpu-{_UNSAFE.sub('_', uuid)}.lock")


def _open(path: str) -> int:
    """Open the lock file, creating it if needed, without following links."""
    # Not O_CREAT on an existing file: in sticky folders the kernel denies that to other users.
    while True:
        try:
            descriptor = open_plain(path, os.O_RDWR)
        except FileNotFoundError:
            with suppress(FileExistsError):  # another process created it first
                descriptor = os.open(path, os.O_RDWR | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, _MODE)
                os.fchmod(descriptor, _MODE)
                return descriptor
            continue
        except PermissionError:
            descriptor = open_plain(path, os.O_RDONLY)
        if descriptor is None:
            raise OSError(errno.EEXIST, "it is no regular file", path)
        return descriptor
