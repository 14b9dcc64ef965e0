"""Copies changed files between a folder and a `SyncDestination`."""

from __future__ import annotations

import contextlib
import os
import time
from collections.abc import Iterator, Sequence
from typing import Final
from urllib.parse import unquote

from tunemq_scheduler.output.syncing.destinations import (
    FileStamp,
    FolderDestination,
    SyncDestination,
    list_files,
    new_file,
    open_destination,
)
from tunemq_scheduler.output.syncing.excludes import UNFINISHED, excluding
from tunemq_shared.base.errors import StoreError, TuneError
from tunemq_shared.base.retrying import CancelToken
from tunemq_shared.base.safe_names import is_safe_name
from tunemq_shared.objects.object_store import InvalidObjectName

#: A file that changed less than this before its copy is copied again: it may have changed after
#: that without a newer stamp, because some file systems and stores have coarse time stamps.
_SETTLED_NS: Final = 2 * 10**9

#: The stamps of copied files: at the source, and for downloads also at the target.
_Stamps = dict[str, tuple[FileStamp, ...]]


class FilesLeftOut(StoreError):
    """Some files were not copied; all others were."""


class MirroredFiles:
    """Remembers copied files, so that unchanged ones are not copied again.

    A process remembers only its own copies, and does not query the destination.
    """

    def __init__(self) -> None:
        self._stamps: dict[tuple[str, str], _Stamps] = {}

    def between(self, source: str, target: str) -> _Stamps:
        """Return the stamps of files copied from one place to the other; the caller fills it."""
        return self._stamps.setdefault((source, target), {})

    def forget(self, address: str) -> None:
        """Forget the address and everything below it, which no longer exists."""
        gone = _place_of(address)
        for ends, stamps in list(self._stamps.items()):
            places = [_place_of(end) for end in ends]
            if any(_is_below(place, gone) for place in places):
                del self._stamps[ends]
                continue
            for place in places:
                for name in [one for one in stamps if _is_below(f"{place}/{one}", gone)]:
                    del stamps[name]


def upload_folder(
    local_path: str, uri: str, exclude: Sequence[str], copied: MirroredFiles, *, cancel: CancelToken
) -> int:
    """Copy changed files below a folder to an address; return how many.

    A file that cannot be read, or whose name the store rejects, does not prevent the copying of
    others.

    Raises:
        FilesLeftOut: such files exist; the message names the first. All others are copied.
        StoreError: a file could not be copied; the message names it. Copied files stay.
        Cancelled, TimedOut: see `CancelToken`.
    """
    known = copied.between(local_path, uri)
    files = list_files(local_path, excluding((*exclude, *UNFINISHED)))
    changed = {name: stamp for name, stamp in files.items() if known.get(name) != (stamp,)}
    if not changed:
        return 0
    failures: list[str] = []
    sent = 0
    with _place(uri, local_path) as place:
        for name, stamp in changed.items():
            cancel.check()
            is_settled = _is_settled(stamp)
            path = os.path.join(local_path, name)
            try:
                place.put(name, path, cancel)
            except InvalidObjectName as error:
                failures.append(str(error))
                continue
            except OSError as error:
                if not os.path.lexists(path):
                    continue  # removed meanwhile, so there is nothing to copy
                if isinstance(error, TuneError) or error.filename != path:
                    raise
                failures.append(f"{path}: {error.strerror}.")
                continue
            sent += 1
            if is_settled:
                known[name] = (stamp,)
    if failures:
        raise FilesLeftOut(
            f"{len(failures)} of the files in {local_path} cannot be copied, the first: "
            f"{failures[0]}"
        )
    return sent


def download_folder(
    uri: str, local_path: str, exclude: Sequence[str], copied: MirroredFiles, *, cancel: CancelToken
) -> int:
    """Copy changed files at an address into a folder; return how many.

    Nothing is written outside of the folder, whatever names and links exist.

    Raises:
        StoreError: the address is empty, or a file could not be copied; the message names it.
        Cancelled, TimedOut: see `CancelToken`.
    """
    known = copied.between(uri, local_path)
    is_excluded = excluding((*exclude, *UNFINISHED))
    got = 0
    with _place(uri, local_path) as place:
        files = place.list(cancel)
        if not files:
            raise StoreError(f"there is nothing to copy at {uri}.")
        os.makedirs(local_path, exist_ok=True)
        for name, stamp in files.items():
            cancel.check()
            path = _target(local_path, name, uri)
            if is_excluded(name) or known.get(name) == (stamp, _stamp(path)):
                continue
            with new_file(path) as part:
                place.get(name, part, stamp.size, cancel)
            got += 1
            if _is_settled(stamp):
                known[name] = (stamp, _stamp(path))
    return got


def delete_folder(uri: str, copied: MirroredFiles, *, cancel: CancelToken) -> None:
    """Delete everything at an address.

    Raises:
        StoreError: a file could not be deleted.
        Cancelled, TimedOut: see `CancelToken`.
    """
    copied.forget(uri)
    with _place(uri, "") as place:
        place.delete(cancel)


@contextlib.contextmanager
def _place(uri: str, local: str) -> Iterator[SyncDestination]:
    """Open the destination, and convert errors of the operating system to StoreError."""
    with contextlib.closing(open_destination(uri)) as place:
        if isinstance(place, FolderDestination) and local and overlap(local, place.root):
            raise StoreError(
                f"{local} cannot be synced with {uri}: one is inside the other; choose another "
                f"upload_dir."
            )
        try:
            yield place
        except TuneError:
            raise
        except OSError as error:
            raise StoreError(f"{error.filename or uri}: {error.strerror or error}.") from error


def overlap(one: str, other: str) -> bool:
    """Return whether two folders are the same, or one is inside the other."""
    one, other = os.path.realpath(one), os.path.realpath(other)
    return _is_below(one, other) or _is_below(other, one)


def _target(folder: str, name: str, uri: str) -> str:
    """Return the path of a file below the folder.

    Raises:
        StoreError: the name, or a link, leads outside.
    """
    if not is_safe_name(name):
        raise StoreError(f"{uri}: {name!r} is not the name of a file below it.")
    path = os.path.join(folder, name)
    if not _is_below(os.path.realpath(os.path.dirname(path)), os.path.realpath(folder)):
        raise StoreError(f"{path}: a link there leads out of {folder}; the file is not written.")
    return path


def _stamp(path: str) -> FileStamp:
    """Return a file's stamp; without a file, one that no file has."""
    try:
        status = os.lstat(path)
    except FileNotFoundError:
        return FileStamp(-1, 0)
    return FileStamp(status.st_size, status.st_mtime_ns)


def _is_settled(stamp: FileStamp) -> bool:
    return time.time_ns() - stamp.changed_ns > _SETTLED_NS


def _is_below(path: str, folder: str) -> bool:
    return f"{path}/".startswith(f"{folder.rstrip('/')}/")


def _place_of(address: str) -> str:
    """Return an address in canonical spelling without its settings; a path unchanged."""
    place = unquote(address.partition("?")[0]) if "://" in address else address
    return place.rstrip("/")
