"""The remote side of a copy, a folder or a prefix of an object store."""

from __future__ import annotations

import contextlib
import hashlib
import logging
import os
import secrets
import stat
import tempfile
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import IO, Final, NamedTuple
from urllib.parse import quote, unquote, urlsplit

from tunemq_scheduler.output.syncing.excludes import PART_PREFIX, UNFINISHED, excluding
from tunemq_shared.base.errors import CheckpointCorrupt, ConfigError, StoreError
from tunemq_shared.base.retrying import CancelToken, retried
from tunemq_shared.objects import store_address
from tunemq_shared.objects.object_store import ObjectStore
from tunemq_shared.system.folder_trees import remove_tree

#: Size in bytes of the pieces in which files are read; smaller files are sent from memory.
_CHUNK: Final = 2**20

_log = logging.getLogger(__name__)


class FileStamp(NamedTuple):
    """Identifies a file's content: its size in bytes, and its modification time (Unix ns)."""

    size: int
    changed_ns: int


class FolderDestination:
    """A local or mounted folder with files by relative names with ``/``; one thread uses it."""

    def __init__(self, root: str) -> None:
        self.root = os.path.abspath(os.path.expanduser(root))

    def list(self, cancel: CancelToken) -> dict[str, FileStamp]:
        """Return all complete files."""
        cancel.check()
        if not os.path.isdir(self.root):
            return {}
        return list_files(self.root, excluding(UNFINISHED))

    def put(self, name: str, path: str, cancel: CancelToken) -> None:
        """Copy a file to here, atomically replacing an older one.

        The file may change during the copy, usually by growing: the copy has its content of some
        moment.
        """
        target = os.path.join(self.root, name)
        with _opened(path) as source, new_file(target) as part, open(part, "xb") as copy:
            _pour(source, copy, cancel)

    def get(self, name: str, path: str, size: int, cancel: CancelToken) -> None:
        """Copy a file from here to a new file ``path``; an error may truncate it."""
        del size
        with open(os.path.join(self.root, name), "rb") as source, open(path, "xb") as copy:
            _pour(source, copy, cancel)

    def delete(self, cancel: CancelToken) -> None:
        """Delete everything; an empty address is no error."""
        cancel.check()
        if os.path.dirname(self.root) == self.root:
            raise StoreError(f"{self.root} is the root of the file system, and is not deleted.")
        remove_tree(self.root)
        if os.path.lexists(self.root):
            raise StoreError(f"{self.root} cannot be deleted; see to its rights.")

    def close(self) -> None:
        """Close connections, of which there are none."""


class ObjectDestination:
    """A prefix of an object store, with the methods of `FolderDestination`."""

    def __init__(self, objects: ObjectStore) -> None:
        self._objects = objects
        self._said = False

    def list(self, cancel: CancelToken) -> dict[str, FileStamp]:
        """See `FolderDestination.list`."""

        def listed() -> dict[str, FileStamp]:
            return {
                one.key: FileStamp(one.size, int(one.modified * 1e9))
                for one in self._objects.list()
                if not one.key.endswith("/")  # created by bucket browsers to show a folder
            }

        return retried(listed, cancel, self._say)

    def put(self, name: str, path: str, cancel: CancelToken) -> None:
        """See `FolderDestination.put`."""
        with _opened(path) as source:
            data = source.read(_CHUNK)
            if len(data) < _CHUNK:
                return retried(lambda: self._objects.put_bytes(name, data), cancel, self._say)
            source.seek(0)
            size, sha256 = _hashed(source, cancel)
        try:
            self._put_file(name, path, size, sha256, cancel)
        except CheckpointCorrupt:  # it changed since it was hashed
            with tempfile.TemporaryDirectory(prefix=PART_PREFIX) as folder:
                still = os.path.join(folder, "copy")
                with _opened(path) as source, open(still, "xb+") as copy:
                    _pour(source, copy, cancel)
                    copy.seek(0)
                    size, sha256 = _hashed(copy, cancel)
                self._put_file(name, still, size, sha256, cancel)

    def get(self, name: str, path: str, size: int, cancel: CancelToken) -> None:
        """See `FolderDestination.get`."""
        self._objects.get_file(name, Path(path), size=size, cancel=cancel, on_trouble=self._say)

    def delete(self, cancel: CancelToken) -> None:
        """See `FolderDestination.delete`."""
        retried(
            lambda: self._objects.delete([one.key for one in self._objects.list()]),
            cancel,
            self._say,
        )

    def close(self) -> None:
        """See `FolderDestination.close`."""
        self._objects.close()

    def _put_file(self, name: str, path: str, size: int, sha256: str, cancel: CancelToken) -> None:
        self._objects.put_file(
            name, Path(path), size=size, sha256=sha256, cancel=cancel, on_trouble=self._say
        )

    def _say(self, trouble: str) -> None:
        """Log only the first problem of a transfer; later ones repeat it."""
        if not self._said:
            self._said = True
            _log.warning("A sync waits: %s", trouble)


SyncDestination = FolderDestination | ObjectDestination


def open_destination(address: str) -> SyncDestination:
    """Open the destination at an ``s3://`` or ``file://`` address, or a path.

    Raises:
        ConfigError: the address has another scheme, or is incomplete.
    """
    if "://" not in address:
        return FolderDestination(address)
    if store_address.is_remote(address):
        from tunemq_shared.checkpoints.open_store import (  # loads a store's client
            check_allowed,
            open_objects,
        )

        check_allowed(address, "SyncConfig(upload_dir)")
        return ObjectDestination(open_objects(address))
    parts = urlsplit(address)
    if parts.scheme != "file" or parts.netloc not in ("", "localhost"):
        raise ConfigError(
            f"the scheme of the destination {address!r} is unknown; use s3://bucket/prefix, "
            "file:///folder or /folder, or your own syncer."
        )
    return FolderDestination(unquote(parts.path))


def join(address: str, name: str) -> str:
    """Append ``name`` to an address of any kind; keep the address's settings.

    The settings of an address follow its ``?``; a path has none.
    """
    if "://" not in address or store_address.is_remote(address):
        return store_address.join(address, name)
    place, mark, settings = address.partition("?")
    shown = quote(name) if address.startswith("file:") else name
    return f"{place.rstrip('/')}/{shown}{mark}{settings}"


def list_files(root: str, is_excluded: Callable[[str], bool]) -> dict[str, FileStamp]:
    """Return the files below a folder that are not excluded, by relative name, sorted.

    Links to files below the folder count as files. Other links, special files such as devices, and
    names that are not valid text are left out.

    Raises:
        OSError: a folder cannot be read; one that disappears meanwhile is no error.
    """
    found = dict(_walk(os.path.realpath(root), "", is_excluded))
    return dict(sorted(found.items()))


def _opened(path: str) -> IO[bytes]:
    """Open a file to read, also through a link; never block on a FIFO or a trial's file lease."""
    return open(path, "rb", opener=lambda path, flags: os.open(path, flags | os.O_NONBLOCK))


@contextlib.contextmanager
def new_file(path: str) -> Iterator[str]:
    """Yield the path of a file to write, which replaces ``path`` on success."""
    folder = os.path.dirname(path)
    os.makedirs(folder, exist_ok=True)
    part = os.path.join(folder, PART_PREFIX + secrets.token_hex(8))
    try:
        yield part
        os.replace(part, path)
    except BaseException:
        with contextlib.suppress(OSError):
            os.unlink(part)
        raise


def _walk(
    root: str, folder: str, is_excluded: Callable[[str], bool]
) -> Iterator[tuple[str, FileStamp]]:
    try:
        entries = list(os.scandir(os.path.join(root, folder)))
    except FileNotFoundError:
        if folder:
            return
        raise
    for entry in entries:
        name = f"{folder}/{entry.name}" if folder else entry.name
        if is_excluded(name) or not _is_text(name):
            continue
        if entry.is_dir(follow_symlinks=False):
            yield from _walk(root, name, is_excluded)
        else:
            status = _status(root, entry)
            if status is not None and stat.S_ISREG(status.st_mode):
                yield name, FileStamp(status.st_size, status.st_mtime_ns)


def _status(root: str, entry: os.DirEntry[str]) -> os.stat_result | None:
    """Return the status of a file, or of a link's target below the root; otherwise None."""
    try:
        return entry.stat() if not entry.is_symlink() or _leads_below(root, entry.path) else None
    except FileNotFoundError:
        return None
    except OSError:
        if entry.is_symlink():  # a link to itself
            return None
        raise


def _leads_below(root: str, link: str) -> bool:
    return os.path.realpath(link).startswith(root.rstrip("/") + "/")


def _is_text(name: str) -> bool:
    try:
        name.encode()
    except UnicodeEncodeError:
        return False
    return True


def _pour(source: IO[bytes], target: IO[bytes], cancel: CancelToken) -> None:
    while True:
        cancel.check()
        piece = source.read(_CHUNK)
        if not piece:
            return
        target.write(piece)


def _hashed(source: IO[bytes], cancel: CancelToken) -> tuple[int, str]:
    digest, size = hashlib.sha256(), 0
    while True:
        cancel.check()
        piece = source.read(_CHUNK)
        if not piece:
            return size, digest.hexdigest()
        digest.update(piece)
        size += len(piece)
