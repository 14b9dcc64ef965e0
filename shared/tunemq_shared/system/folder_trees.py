"""Walk and remove folders of any depth that trials made: the standard library's ways recurse.

Python 3.11 fails a thousand folders down, with a RecursionError that does not look like a disk
problem, and paths end at 4,096 bytes; but `os.mkdir` and `os.chdir` have no such limit.
"""

from __future__ import annotations

import errno
import math
import os
import time
from collections.abc import Callable, Iterator
from contextlib import suppress
from itertools import islice
from typing import Final

#: `remove_tree` removes this many levels, twice as many as a path can have. A live trial could add
#: levels as fast as it removes them.
MAX_DEPTH: Final = 4_000
#: The most names of one folder in memory: a trial can make more than fit.
MAX_NAMES: Final = 100_000

_OPEN: Final = os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC


def walk(top: str | os.PathLike[str]) -> Iterator[tuple[str, list[str], list[str]]]:
    """Walk top down like `os.walk`: yields each folder's path, folders and other names.

    It is for folders that TuneMQ filled: a trial can put more names into one than fit in memory,
    for which there is `entries`. Unreadable folders, and those with paths that are too long, are
    skipped; links are not followed.
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


def entries(
    top: str | os.PathLike[str],
    is_left_out: Callable[[str, str], bool] = lambda _path, _name: False,
) -> Iterator[tuple[str, os.DirEntry[str]]]:
    """Yield all entries below a folder, each with its folder's path; keeps names of folders only.

    Skips what `walk` skips, and the content of folders for which ``is_left_out`` returns True: it
    gets the path of the parent folder, and the folder's name.
    """
    waiting: list[tuple[str, ...]] = [(os.fspath(top),)]
    while waiting:
        path = os.path.join(*waiting.pop())
        try:
            for entry in _scan(path):
                yield path, entry
                is_folder = entry.is_dir(follow_symlinks=False)
                if is_folder and not is_left_out(path, entry.name):
                    waiting.append((path, entry.name))
        except OSError:
            continue


def statuses(
    top: str | os.PathLike[str], until: float = math.inf, most: float = math.inf
) -> Iterator[os.stat_result]:
    """Yield the status of a file or folder, and of all `entries` below it.

    A live trial could add files as fast as they are counted.

    Raises:
        TimeoutError: `time.monotonic` reached ``until``, or there are more than ``most``.
    """
    with suppress(OSError):
        yield os.lstat(top)
    for names, (_, entry) in enumerate(entries(top), 1):
        if names > most or time.monotonic() >= until:
            raise TimeoutError(errno.ETIMEDOUT, "it has too many files", os.fspath(top))
        with suppress(OSError):
            yield entry.stat(follow_symlinks=False)


def _scan(path: str) -> Iterator[os.DirEntry[str]]:
    """Yield the entries of a folder, which must be no link."""
    fd = os.open(path, _OPEN)
    try:
        with os.scandir(fd) as entries:
            yield from entries
    finally:
        os.close(fd)


def make_private_folder(path: str) -> None:
    """Make a folder for this user alone, if needed; remove a file or link in its place.

    Raises:
        OSError: it cannot be made.
    """
    if os.path.lexists(path) and (os.path.islink(path) or not os.path.isdir(path)):
        os.unlink(path)
    os.makedirs(path, mode=0o700, exist_ok=True)


def remove_tree(top: str | os.PathLike[str]) -> None:
    """Remove a folder and its content, whatever the permissions.

    Unremovable entries stay, and those below `MAX_DEPTH` levels, which another call removes. Deep
    folders are first renamed into the top folder, level by level, so that neither paths nor the
    number of open folders grow with the depth.
    """
    try:
        top_fd = _opened(top)
    except OSError:
        return
    try:
        _make_writable(top_fd)
        for _ in range(MAX_DEPTH):
            # A list, because each entry has to be removed, not only those up to the first.
            if not any([_remove(name, top_fd) for name in names_in(top_fd)]):  # noqa: C419
                break
    finally:
        os.close(top_fd)
    with suppress(OSError):
        os.rmdir(top)


def _remove(name: str, top_fd: int) -> bool:
    """Remove an entry of the top folder, or a part of it; returns whether it removed something.

    It moves inner folders to the top.
    """
    try:
        fd = _opened(name, top_fd)
    except OSError:
        with suppress(OSError):
            os.unlink(name, dir_fd=top_fd)
            return True
        return False
    has_removed = False
    try:
        _make_writable(fd)
        for inner in names_in(fd):
            with suppress(OSError):
                _unlink_or_move(inner, fd, top_fd)
                has_removed = True
    finally:
        os.close(fd)
    with suppress(OSError):
        os.rmdir(name, dir_fd=top_fd)
        return True
    return has_removed


def _unlink_or_move(name: str, folder_fd: int, top_fd: int) -> None:
    try:
        os.unlink(name, dir_fd=folder_fd)
    except OSError:
        _allow_moving(name, folder_fd)
        to = f".removed-{os.urandom(8).hex()}"
        os.rename(name, to, src_dir_fd=folder_fd, dst_dir_fd=top_fd)


def _allow_moving(name: str, folder_fd: int) -> None:
    """Make a folder writable: moving it to another parent changes its ``..`` entry."""
    fd = _opened(name, folder_fd)
    try:
        _make_writable(fd)
    finally:
        os.close(fd)


def _opened(name: str | os.PathLike[str], folder_fd: int | None = None) -> int:
    """Open a folder, which must be no link, even if its mode forbids that to its owner.

    Raises:
        OSError: it is no folder, or one of another user.
    """
    try:
        return os.open(name, _OPEN, dir_fd=folder_fd)
    except PermissionError:
        fd = os.open(name, _OPEN | os.O_PATH, dir_fd=folder_fd)
    try:
        os.chmod(f"/proc/self/fd/{fd}", 0o700)
        return os.open(f"/proc/self/fd/{fd}", _OPEN & ~os.O_NOFOLLOW)
    finally:
        os.close(fd)


def _make_writable(fd: int) -> None:
    with suppress(OSError):
        os.fchmod(fd, 0o700)


def names_in(folder: int | str | os.PathLike[str]) -> list[str]:
    """Return the names in a folder, at most `MAX_NAMES`; none if it cannot be read."""
    try:
        with os.scandir(folder) as found:
            return [entry.name for entry in islice(found, MAX_NAMES)]
    except OSError:
        return []
