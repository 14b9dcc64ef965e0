"""Walk and remove folders of any depth that trials made: the standard library's ways recurse.

Python 3.11 fails a thousand folders down, with a RecursionError that does not look like a disk
problem, and paths end at 4,096 bytes; but `os.mkdir` and `os.chdir` have no such limit.
"""

from __future__ import annotations

import errno
import math
import os
import time
from collections.abc import Iterator
from contextlib import suppress
from typing import Final

#: `remove_tree` removes this many levels, twice as many as a path can have. A live trial could add
#: levels as fast as it removes them.
MAX_DEPTH: Final = 4_000

_OPEN: Final = os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC


def walk(top: str | os.PathLike[str]) -> Iterator[tuple[str, list[str], list[str]]]:
    """Walk top down like `os.walk`: yields each folder's path, folders and other names.

    Unreadable folders, and those with paths that are too long, are skipped; links are not followed.
    """
    waiting = [os.fspath(top)]
    while waiting:
        path = waiting.pop()
        folders: list[str] = []
        others: list[str] = []
        try:
            for entry in _scan(path):
                is_folder = entry.is_dir(follow_symlinks=False)
                (folders if is_folder else others).append(entry.name)
        except OSError:
            continue
        yield path, folders, others
        waiting.extend(os.path.join(path, name) for name in reversed(folders))


def statuses(
    top: str | os.PathLike[str], until: float = math.inf, most: float = math.inf
) -> Iterator[os.stat_result]:
    """Yield the status of a file or folder, and of all below it that can be read, as `walk` does.

    A live trial could add files as fast as they are counted.

    Raises:
        TimeoutError: `time.monotonic` reached ``until``, or there are more than ``most``.
    """
    with suppress(OSError):
        yield os.lstat(top)
    waiting = [os.fspath(top)]
    names = 0
    while waiting:
        path = waiting.pop()
        try:
            for entry in _scan(path):
                names += 1
                if names > most or time.monotonic() >= until:
                    raise TimeoutError(errno.ETIMEDOUT, "it has too many files", os.fspath(top))
                with suppress(OSError):
                    yield entry.stat(follow_symlinks=False)
                if entry.is_dir(follow_symlinks=False):
                    waiting.append(os.path.join(path, entry.name))
        except TimeoutError:
            raise
        except OSError:
            continue


def _scan(path: str) -> Iterator[os.DirEntry[str]]:
    """Yield the entries of a folder, which must be no link."""
    fd = os.open(path, _OPEN)
    try:
        with os.scandir(fd) as entries:
            yield from entries
    finally:
        os.close(fd)


def remove_tree(top: str | os.PathLike[str]) -> None:
    """Remove a folder and its content, whatever the permissions.

    Unremovable entries stay, and those below `MAX_DEPTH` levels, which another call removes. Deep
    folders are first renamed into the top folder, level by level, so that neither paths nor the
    number of open folders grow with the depth.
    """
    try:
        top_fd = os.open(top, _OPEN)
    except OSError:
        return
    try:
        _make_writable(top_fd)
        for _ in range(MAX_DEPTH):
            # A list, because each entry has to be removed, not only those up to a deep folder.
            if not any([_empty(name, top_fd) for name in _names(top_fd)]):  # noqa: C419
                break
    finally:
        os.close(top_fd)
    with suppress(OSError):
        os.rmdir(top)


def _empty(name: str, top_fd: int) -> bool:
    """Remove an entry of the top folder; returns whether it moved inner folders to the top."""
    try:
        fd = os.open(name, _OPEN, dir_fd=top_fd)
    except OSError:
        with suppress(OSError):
            os.unlink(name, dir_fd=top_fd)
        return False
    has_moved = False
    try:
        _make_writable(fd)
        for inner in _names(fd):
            try:
                os.unlink(inner, dir_fd=fd)
            except OSError:
                with suppress(OSError):
                    _allow_moving(inner, fd)
                    to = f".removed-{os.urandom(8).hex()}"
                    os.rename(inner, to, src_dir_fd=fd, dst_dir_fd=top_fd)
                    has_moved = True
    finally:
        os.close(fd)
    with suppress(OSError):
        os.rmdir(name, dir_fd=top_fd)
    return has_moved


def _allow_moving(name: str, folder_fd: int) -> None:
    """Make a folder writable: moving it to another parent changes its ``..`` entry."""
    fd = os.open(name, _OPEN, dir_fd=folder_fd)
    try:
        _make_writable(fd)
    finally:
        os.close(fd)


def _make_writable(fd: int) -> None:
    with suppress(OSError):
        os.fchmod(fd, 0o700)


def _names(fd: int) -> list[str]:
    try:
        return os.listdir(fd)
    except OSError:
        return []
