"""Lists the objects of a served folder in the order of their keys, a page at a time."""

from __future__ import annotations

import itertools
import os
import stat
from collections.abc import Iterator
from typing import Final

from tunemq_scheduler.store_server.served_folder import OWN
from tunemq_shared.http_wire import Listed, Page

#: So many objects are in an answer.
PAGE: Final = 1000
_AS_FOLDER: Final = os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC


def page_of(folder: int, prefix: str, after: str) -> Page:
    """The first objects of the open folder whose keys begin with a prefix and are behind a key."""
    found = tuple(itertools.islice(_walk(folder, "", prefix, after), PAGE + 1))
    return Page(found[:PAGE], is_last=len(found) <= PAGE)


def _walk(folder: int, path: str, prefix: str, after: str) -> Iterator[Listed]:
    """The objects below an open folder, whose own key, with a slash, is ``path``."""
    with os.scandir(folder) as entries:
        # "a/" comes behind "a-": what is below a folder is sorted by the slash in its keys.
        found = sorted(
            (f"{path}{entry.name}/" if entry.is_dir(follow_symlinks=False) else path + entry.name)
            for entry in entries
            if (path or entry.name != OWN) and _is_text(entry.name)
        )
    for key in found:
        name = key[len(path) :]
        if not key.endswith("/"):
            if key.startswith(prefix) and key > after:
                yield from _listed(folder, name, key)
        elif _may_hold(key, prefix, after):
            try:
                below = os.open(name[:-1], _AS_FOLDER, dir_fd=folder)
            except (FileNotFoundError, NotADirectoryError):  # it has just been removed
                continue
            try:
                yield from _walk(below, key, prefix, after)
            finally:
                os.close(below)


def _listed(folder: int, name: str, key: str) -> Iterator[Listed]:
    try:
        status = os.lstat(name, dir_fd=folder)
    except FileNotFoundError:
        return
    if stat.S_ISREG(status.st_mode):
        yield Listed(key, status.st_size, status.st_mtime)


def _may_hold(folder: str, prefix: str, after: str) -> bool:
    """Whether a key below the folder may begin with the prefix and be behind the other key."""
    is_on_the_way = folder.startswith(prefix) or prefix.startswith(folder)
    return is_on_the_way and (folder > after or after.startswith(folder))


def _is_text(name: str) -> bool:
    return name.isascii() or not any("\ud800" <= letter <= "\udfff" for letter in name)
