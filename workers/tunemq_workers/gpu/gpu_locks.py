"""A GPU belongs to one node: a lock file for each, which is free when its process is gone.

Nodes of one machine find each other by it, whoever started them: all look in the same folder. Those
in containers do where they share it. A
farm's worker locks what it offers when it starts; a script's node what its trials use, while they
do (`GpuLocks`).
"""

from __future__ import annotations

import errno
import fcntl
import os
import re
import stat
import time
from collections.abc import Iterable
from contextlib import suppress
from typing import Final

from tunemq_shared.base.errors import ConfigError
from tunemq_shared.protocol.messages import Gpu
from tunemq_shared.system.plain_files import open_plain

#: Where the files may be: in the first that is for everybody, else in the last.
FOLDERS: Final = ("/dev/shm", "/run/lock", "/tmp")  # noqa: S108  not $TMPDIR, which users differ in
#: Everybody makes files there, and nobody removes another's.
_FOR_ALL: Final = stat.S_ISVTX | stat.S_IWOTH | stat.S_IXOTH
_UNSAFE: Final = re.compile(r"[^\w.-]+")
#: Workers of other users have to be able to lock it, too.
_MODE: Final = 0o666
#: Who only looks whether it is taken has the lock for a moment, too: tries, and seconds between.
_TRIES: Final = (10, 0.005)


class GpuLocks:
    """The GPUs of a node that it locks one by one, and gives back. For one thread.

    Args:
        me: what others are told of us, beside the process.
        folder: for the files; see `take_gpus`.
    """

    def __init__(self, me: str, folder: str | None = None) -> None:
        self._me, self._folder = me, folder or _folder()
        self._held: dict[str, int] = {}

    def has(self, uuid: str) -> bool:
        """Whether this node has locked it."""
        return uuid in self._held

    def take(self, uuid: str) -> str:
        """Lock it; who has it, or what else is in the way, and empty where it is ours now."""
        if uuid in self._held:
            return ""
        try:
            descriptor = _open(_path(self._folder, uuid))
        except OSError as problem:
            return _unusable(problem)
        if not _is_locked_by_us(descriptor):
            return _user(descriptor)
        self._held[uuid] = descriptor
        _sign(descriptor, self._me)
        return ""

    def give_back(self, uuid: str) -> None:
        """Others may have it, if it was ours."""
        descriptor = self._held.pop(uuid, None)
        if descriptor is not None:
            os.close(descriptor)

    def user(self, uuid: str) -> str:
        """Who else has it, or what else is in the way; empty where nobody has."""
        if uuid in self._held:
            return ""
        try:
            descriptor = _open(_path(self._folder, uuid))
        except OSError as problem:
            return _unusable(problem)
        try:
            # Several may look at the same time; who wants it waits for them.
            fcntl.flock(descriptor, fcntl.LOCK_SH | fcntl.LOCK_NB)
        except OSError:
            return _user(descriptor)
        os.close(descriptor)
        return ""


def take_gpus(gpus: Iterable[Gpu], me: str, folder: str | None = None) -> list[int]:
    """Keep other nodes away from these GPUs for as long as this process lives.

    Args:
        me: what the others are told of us, beside the process.
        folder: for the files; by default the one of `FOLDERS` that is for everybody.

    Returns:
        Descriptors, which this process and nobody else holds open; closing one gives its GPU back.

    Raises:
        ConfigError: another process has one of them, or the file cannot be made.
    """
    folder = folder or _folder()
    held: list[int] = []
    try:
        for gpu in gpus:
            held.append(_take(gpu, folder, me))  # noqa: PERF401  those before are given back
    except ConfigError:
        for descriptor in held:
            os.close(descriptor)
        raise
    return held


def _take(gpu: Gpu, folder: str, me: str) -> int:
    path = _path(folder, gpu.uuid)
    try:
        descriptor = _open(path)
    except OSError as problem:
        raise ConfigError(
            f"GPU {gpu.uuid} cannot be locked: {path}: {problem.strerror}."
        ) from problem
    if not _is_locked_by_us(descriptor):
        raise ConfigError(
            f"GPU {gpu.uuid} is taken already: {_holder(descriptor)}. Stop that one, or name"
            " the GPUs of each with --gpus."
        )
    _sign(descriptor, me)
    return descriptor


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
    with suppress(OSError):  # who may not write may lock all the same
        os.truncate(descriptor, 0)
        os.write(descriptor, f"process {os.getpid()} ({me})\n".encode())


def _user(descriptor: int) -> str:
    return f"used by {_holder(descriptor)}"


def _holder(descriptor: int) -> str:
    """Who has the lock; closes the file."""
    said = os.read(descriptor, 200).decode(errors="replace")
    os.close(descriptor)
    return "".join(filter(str.isprintable, said.strip())) or "a process that is not known"


def _unusable(problem: OSError) -> str:
    return f"it cannot be locked: {problem.filename}: {problem.strerror}"


def _folder() -> str:
    *first, last = FOLDERS
    return next(filter(_is_for_all, first), last)


def _is_for_all(folder: str) -> bool:
    """Whether it is, which must not depend on who asks: root may write anywhere."""
    try:
        mode = os.stat(folder).st_mode
    except OSError:
        return False
    return stat.S_ISDIR(mode) and mode & _FOR_ALL == _FOR_ALL


def _path(folder: str, uuid: str) -> str:
    return os.path.join(folder, f"tunemq-gpu-{_UNSAFE.sub('_', uuid)}.lock")


def _open(path: str) -> int:
    """The file, made where it is not there; no link of somebody's to elsewhere is followed."""
    # Where it is there it is not "created": in a folder for all, the kernel refuses others that.
    while True:
        try:
            descriptor = open_plain(path, os.O_RDWR)
        except FileNotFoundError:
            with suppress(FileExistsError):  # somebody was faster
                descriptor = os.open(path, os.O_RDWR | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, _MODE)
                os.fchmod(descriptor, _MODE)
                return descriptor
            continue
        except PermissionError:
            descriptor = open_plain(path, os.O_RDONLY)
        if descriptor is None:
            raise OSError(errno.EEXIST, "it is no regular file", path)
        return descriptor
