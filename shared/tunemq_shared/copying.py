"""Copies a folder of files and hashes what it copies, at the speed of the slower of the two."""

from __future__ import annotations

import contextlib
import hashlib
import os
import queue
import stat
import threading
from pathlib import Path
from typing import Final, NamedTuple, Protocol

from tunemq_shared.errors import CheckpointError
from tunemq_shared.manifest import FileEntry

#: Read, hashed and written in pieces of this size: they stay in the processor's cache.
_CHUNK: Final = 2**20
#: So many pieces may wait for the hashing thread.
_AHEAD: Final = 8
#: Smaller files are hashed where they are copied: handing them over would cost more.
_SMALL: Final = 2**20
#: A large file's bytes go to the disk while what was read is still being hashed.
_SYNC_EVERY: Final = 16 * 2**20


class _Digest(Protocol):
    def update(self, data: memoryview, /) -> None: ...

    def hexdigest(self) -> str: ...


class Listing(NamedTuple):
    """Files and empty folders below a folder, by their relative names with ``/``."""

    files: dict[str, Path]
    folders: list[str]


def list_folder(source: Path) -> Listing:
    """What is to be copied: links to what is below ``source`` are followed, nothing else is.

    Raises:
        CheckpointError: it is no folder, or holds a link that leaves it, a loop, a device or the
            like.
    """
    if not source.is_dir():
        raise CheckpointError(f"a checkpoint must be a folder, and {str(source)!r} is none.")
    root = source.resolve()
    listing = Listing({}, [])
    _collect(root, root, "", (root,), listing)
    return listing


def copy_folder(
    listing: Listing, target: Path, *, durable: bool
) -> tuple[tuple[FileEntry, ...], tuple[str, ...]]:
    """Copy to the new folder ``target``; the entry of each file, with the hash of what was written.

    Args:
        durable: Whether the files' contents are on the disk when it returns.

    Raises:
        CheckpointError: a file changed while it was copied.
    """
    target.mkdir()
    made = {target}
    copied: list[tuple[str, int, _Digest]] = []
    with contextlib.closing(_Hasher()) as hasher:
        for name, path in listing.files.items():
            copy = target / name
            if copy.parent not in made:
                copy.parent.mkdir(parents=True, exist_ok=True)
                made.add(copy.parent)
            size, digest = _copy(path, copy, hasher, durable=durable)
            copied.append((name, size, digest))
    for name in listing.folders:
        (target / name).mkdir(parents=True, exist_ok=True)
    entries = tuple(FileEntry(name, size, digest.hexdigest()) for name, size, digest in copied)
    return entries, tuple(listing.folders)


def _collect(
    folder: Path, root: Path, prefix: str, ancestors: tuple[Path, ...], listing: Listing
) -> None:
    entries = sorted(os.scandir(folder), key=lambda entry: entry.name)
    if prefix and not entries:
        listing.folders.append(prefix.removesuffix("/"))
    for entry in entries:
        name = prefix + entry.name
        path = _followed(entry.path, root) if entry.is_symlink() else Path(entry.path)
        mode = path.lstat().st_mode
        if stat.S_ISREG(mode):
            listing.files[name] = path
        elif not stat.S_ISDIR(mode):
            raise CheckpointError(
                f"a checkpoint holds files and folders only, and {entry.path!r} is neither."
            )
        elif path in ancestors:
            raise CheckpointError(f"{entry.path!r} in a checkpoint is a link to a folder it is in.")
        else:
            _collect(path, root, f"{name}/", (*ancestors, path), listing)


def _followed(link: str, root: Path) -> Path:
    try:
        path = Path(link).resolve(strict=True)
    except (OSError, RuntimeError) as error:  # RuntimeError: links in a circle
        raise CheckpointError(f"{link!r} in a checkpoint is a link that leads nowhere.") from error
    if not path.is_relative_to(root):
        raise CheckpointError(
            f"{link!r} in a checkpoint is a link to {str(path)!r} outside of it; "
            "put a copy of the file there."
        )
    return path


def _copy(source: Path, target: Path, hasher: _Hasher, *, durable: bool) -> tuple[int, _Digest]:
    """Copy one file; its size, and what will be the hash of what was written."""
    try:
        fd = os.open(source, os.O_RDONLY | os.O_NOFOLLOW | os.O_CLOEXEC)
    except OSError as error:
        raise CheckpointError(f"{str(source)!r} cannot be read: {error.strerror}.") from error
    try:
        before = os.fstat(fd)
        out = os.open(target, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o644)
        try:
            if before.st_size <= _SMALL:
                size, digest = _copy_small(fd, out)
            else:
                size, digest = _copy_large(fd, out, before.st_size, hasher, durable=durable)
            if durable:
                os.fdatasync(out)
        finally:
            os.close(out)
        after = os.fstat(fd)
    finally:
        os.close(fd)
    if size != before.st_size or after.st_mtime_ns != before.st_mtime_ns:
        raise CheckpointError(
            f"{str(source)!r} changed while it was saved; report a checkpoint when it is complete."
        )
    return size, digest


def _copy_small(fd: int, out: int) -> tuple[int, _Digest]:
    with open(fd, "rb", closefd=False) as file:
        content = file.read(_SMALL + 1)
    write_all(out, memoryview(content))
    return len(content), hashlib.sha256(content)


def _copy_large(
    fd: int, out: int, expected: int, hasher: _Hasher, *, durable: bool
) -> tuple[int, _Digest]:
    """Copy until the end, or until there is more than expected: somebody is writing the file."""
    digest = hashlib.sha256()
    size = synced = 0
    while size <= expected:
        buffer = hasher.buffer()
        length = os.readv(fd, [buffer])
        write_all(out, memoryview(buffer)[:length])
        hasher.update(digest, buffer, length)
        if length == 0:
            break
        size += length
        if durable and size - synced >= _SYNC_EVERY:
            os.fdatasync(out)
            synced = size
    return size, digest


class _Hasher:
    """Hashes in a thread beside the one who copies; hashing releases the interpreter's lock."""

    def __init__(self) -> None:
        self._free: queue.SimpleQueue[bytearray] = queue.SimpleQueue()
        self._full: queue.SimpleQueue[tuple[_Digest, bytearray, int] | None] = queue.SimpleQueue()
        self._thread: threading.Thread | None = None

    def buffer(self) -> bytearray:
        """A piece of memory to read into; waits until one is hashed."""
        if self._thread is None:
            for _ in range(_AHEAD):
                self._free.put(bytearray(_CHUNK))
            self._thread = threading.Thread(target=self._run, name="tunemq-hasher", daemon=True)
            self._thread.start()
        return self._free.get()

    def update(self, digest: _Digest, buffer: bytearray, length: int) -> None:
        """Add so much of the buffer to the digest some time before `close` returns."""
        self._full.put((digest, buffer, length))

    def close(self) -> None:
        """Return when everything is hashed."""
        if self._thread is not None:
            self._full.put(None)
            self._thread.join()

    def _run(self) -> None:
        while (piece := self._full.get()) is not None:
            digest, buffer, length = piece
            digest.update(memoryview(buffer)[:length])
            self._free.put(buffer)


def write_all(fd: int, data: memoryview) -> None:
    """Write every byte: a nearly full disk takes a part without an error, and refuses the next."""
    while data:
        data = data[os.write(fd, data) :]
