"""Walks and removes folders that others made, however deep: the standard library's ways recurse.

Python 3.11 gives up a thousand folders down, with a RecursionError that looks like no trouble of a
disk, and paths end at 4,096 bytes; `os.mkdir` and `os.chdir` in turn have no such end.
"""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import suppress
from typing import Final

_OPEN: Final = os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC


def walk(top: str | os.PathLike[str]) -> Iterator[tuple[str, list[str], list[str]]]:
    """As `os.walk` from the top down: each folder's path, folders and other names.

    Folders that cannot be read, or whose path is too long, are passed over; no link is followed.
    """
    waiting = [os.fspath(top)]
    while waiting:
        path = waiting.pop()
        folders: list[str] = []
        others: list[str] = []
        try:
            with os.scandir(path) as entries:
                for entry in entries:
                    is_folder = entry.is_dir(follow_symlinks=False)
                    (folders if is_folder else others).append(entry.name)
        except OSError:
            continue
        yield path, folders, others
        waiting.extend(os.path.join(path, name) for name in reversed(folders))


def remove_tree(top: str | os.PathLike[str]) -> None:
    """Remove a folder with all that is in it, whatever its rights; what cannot be removed stays.

    Deep folders are first renamed to the top, a level at a time, so that neither a path nor the
    number of open folders grows with their depth.
    """
    try:
        top_fd = os.open(top, _OPEN)
    except OSError:
        return
    try:
        _make_writable(top_fd)
        has_moved = True
        while has_moved:
            has_moved = False
            for name in _names(top_fd):
                has_moved |= _empty(name, top_fd)
    finally:
        os.close(top_fd)
    with suppress(OSError):
        os.rmdir(top)


def _empty(name: str, top_fd: int) -> bool:
    """Remove an entry of the top folder; returns whether folders in it came to the top instead."""
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
    """A folder that gets another parent is written to: its ``..`` changes."""
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
