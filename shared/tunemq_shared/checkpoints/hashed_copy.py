"""Copy a folder and hash the copied bytes, at the speed of the slower of the two.

Each byte is read once, then hashed and written: a concurrent writer cannot make a copy and its hash
differ. A file that equals the one in an older copy becomes a hard link to it. The comparison ends
at the first difference, so that files that change each time cost almost nothing more.
"""

from __future__ import annotations

import contextlib
import fcntl
import hashlib
import os
import queue
import stat
import threading
from collections import deque
from collections.abc import Callable, Mapping
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Final, NamedTuple, Protocol

from tunemq_shared.base.errors import CheckpointError
from tunemq_shared.checkpoints.checkpoint import METADATA_FILE
from tunemq_shared.checkpoints.folder_listing import FolderListing
from tunemq_shared.checkpoints.manifest import FileEntry
from tunemq_shared.system.plain_files import LEASE_S, open_regular

#: Unit of reading, comparing, hashing and writing: it fits the processor's cache.
_CHUNK: Final = 2**20
#: How many chunks may wait for the hashing thread.
_AHEAD: Final = 8
#: Smaller files are hashed in the copying thread: a hand-over would cost more.
_SMALL: Final = 2**20
#: Sync a large file each time this many bytes were written, while the hashing thread is busy.
_SYNC_EVERY: Final = 16 * 2**20
#: The permissions allowed on a file with several names.
_READ_ONLY: Final = 0o555
#: The request that lets a file share the blocks of another until either changes (ioctl_ficlone(2)).
_FICLONE: Final = 0x40049409
#: The most large files that are copied at once, given as many processors.
_AT_ONCE: Final = 4


class _Digest(Protocol):
    def update(self, data: memoryview, /) -> None: ...

    def hexdigest(self) -> str: ...


class BaseCopy(NamedTuple):
    """An older, immutable copy: its folder, and its manifest's entries by name."""

    folder: Path
    entries: Mapping[str, FileEntry]


class _Copy(NamedTuple):
    """A copied file; ``sha256`` may be called once the hasher is closed."""

    name: str
    size: int
    sha256: Callable[[], str]

    def entry(self) -> FileEntry:
        return FileEntry(self.name, self.size, self.sha256())


def copy_folder(
    listing: FolderListing,
    target: Path,
    *,
    durable: bool,
    mode: int = 0o644,
    base: BaseCopy | None = None,
    sharing: bool = False,
) -> tuple[tuple[FileEntry, ...], tuple[str, ...]]:
    """Copy the listed files to the new folder ``target`` and hash what was written.

    Args:
        listing: The files and empty folders.
        target: The new folder.
        durable: Sync the files' contents to the disk before returning.
        mode: The permissions of each copy.
        base: A file that equals the one of the same name and size there becomes a link to it.
        sharing: Let large copies share the originals' blocks where the file system can. It would
            have to write new originals to the disk first.

    Returns:
        The entry of each file, and the names of the empty folders.

    Raises:
        CheckpointError: A file cannot be read, or changed during the copy.
    """
    target.mkdir()
    for folder in {name.rpartition("/")[0] for name in listing.files}.union(listing.folders):
        (target / folder).mkdir(parents=True, exist_ok=True)
    copier = _Copier(listing.files, target, durable=durable, mode=mode, base=base, sharing=sharing)
    entries = copier.run()
    return tuple(entries[name] for name in listing.files), tuple(listing.folders)


class _Copier:
    """Copies files, several large ones at a time."""

    def __init__(
        self,
        files: Mapping[str, Path],
        target: Path,
        *,
        durable: bool,
        mode: int,
        base: BaseCopy | None,
        sharing: bool,
    ) -> None:
        self._files = files
        self._target = target
        self._durable = durable
        self._mode = mode
        self._base = base
        self._sharing = sharing
        #: The large files that no thread has begun.
        self._large = deque[str]()

    def run(self) -> dict[str, FileEntry]:
        """Copy everything; returns the entries by name."""
        small: list[str] = []
        for name, path in self._files.items():
            (self._large if path.lstat().st_size > _SMALL else small).append(name)
        at_once = min(len(self._large), len(os.sched_getaffinity(0)), _AT_ONCE)
        if at_once <= 1:
            return self._copy_small_ones(small) | self._copy_large_ones()
        with ThreadPoolExecutor(at_once, "tunemq-copier") as pool:
            try:
                running = [pool.submit(self._copy_large_ones) for _ in range(at_once)]
                # Threads do not speed up small files: the interpreter's lock is their limit.
                entries = self._copy_small_ones(small)
                for copied in running:
                    entries |= copied.result()
            except BaseException:
                self._large.clear()  # copies in progress end; no further one begins
                raise
        return entries

    def _copy_small_ones(self, names: list[str]) -> dict[str, FileEntry]:
        return {name: self._copy(name, None).entry() for name in names}

    def _copy_large_ones(self) -> dict[str, FileEntry]:
        copies: list[_Copy] = []
        with contextlib.closing(_Hasher()) as hasher:
            while (name := self._next_large()) is not None:
                copies.append(self._copy(name, hasher))
        return {copy.name: copy.entry() for copy in copies}

    def _next_large(self) -> str | None:
        try:
            return self._large.popleft()
        except IndexError:
            return None

    def _copy(self, name: str, hasher: _Hasher | None) -> _Copy:
        source = self._files[name]
        try:
            fd = open_regular(source, os.O_RDONLY, lease_s=LEASE_S)
        except OSError as error:
            raise CheckpointError(f"{str(source)!r} cannot be read: {error.strerror}.") from error
        try:
            before = os.fstat(fd)
            copy = self._linked(name, fd, before.st_size)
            if copy is None:
                copy = self._written(name, fd, before.st_size, hasher)
            after = os.fstat(fd)
        finally:
            os.close(fd)
        if copy.size != before.st_size or after.st_mtime_ns != before.st_mtime_ns:
            raise CheckpointError(
                f"{str(source)!r} changed while it was saved; "
                "report a checkpoint when it is complete."
            )
        return copy

    def _linked(self, name: str, fd: int, size: int) -> _Copy | None:
        """Link to the base's file if it equals ``fd``; else return None."""
        entry = self._base and self._base.entries.get(name)
        # People may change a checkpoint's metadata after it was saved and hashed.
        if not self._base or not entry or entry.size != size or name == METADATA_FILE:
            return None
        old = self._base.folder / name
        try:
            old_fd = open_regular(old, os.O_RDONLY)
            try:
                if not _is_equal(fd, old_fd, size):
                    return None
                old_mode = stat.S_IMODE(os.fstat(old_fd).st_mode)
                if old_mode & ~_READ_ONLY:
                    os.fchmod(old_fd, old_mode & _READ_ONLY)  # two checkpoints share it now
            finally:
                os.close(old_fd)
            os.link(old, self._target / name, follow_symlinks=False)
        except OSError:
            return None  # the base was evicted, or has the maximum number of links: copy it
        return _Copy(name, size, lambda: entry.sha256)

    def _written(self, name: str, fd: int, expected: int, hasher: _Hasher | None) -> _Copy:
        flags = os.O_RDWR | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC
        out = os.open(self._target / name, flags, self._mode)
        try:
            if hasher is None:
                size, digest = _copy_small(fd, out)
            else:
                source = out if self._sharing and _shares_blocks(fd, out) else fd
                size, digest = _copy_large(source, out, expected, hasher, durable=self._durable)
            if self._durable:
                os.fdatasync(out)
        finally:
            os.close(out)
        return _Copy(name, size, digest.hexdigest)


def _is_equal(fd: int, other: int, size: int) -> bool:
    """Whether two files have the same first ``size`` bytes."""
    for offset in range(0, size, _CHUNK):
        length = min(_CHUNK, size - offset)
        piece = os.pread(fd, length, offset)
        if len(piece) != length or piece != os.pread(other, length, offset):
            return False
    return True


def _copy_small(fd: int, out: int) -> tuple[int, _Digest]:
    with open(fd, "rb", closefd=False) as file:
        content = file.read(_SMALL + 1)  # more than expected: another process writes it
    write_all(out, memoryview(content))
    return len(content), hashlib.sha256(content)


def _shares_blocks(fd: int, out: int) -> bool:
    """Make ``out`` share the blocks of ``fd``; False where the file system cannot."""
    try:
        fcntl.ioctl(out, _FICLONE, fd)
    except OSError:
        return False
    return True


def _copy_large(
    fd: int, out: int, expected: int, hasher: _Hasher, *, durable: bool
) -> tuple[int, _Digest]:
    """Copy to the end, or until there is more than expected: another process writes the file.

    If ``out`` is ``fd``, it has the bytes already, and they are hashed.
    """
    digest = hashlib.sha256()
    size = synced = 0
    while size <= expected:
        buffer = hasher.buffer()
        length = os.readv(fd, [buffer])
        if out != fd:
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
    """Hashes in its own thread; hashing releases the interpreter's lock."""

    def __init__(self) -> None:
        self._free: queue.SimpleQueue[bytearray] = queue.SimpleQueue()
        self._full: queue.SimpleQueue[tuple[_Digest, bytearray, int] | None] = queue.SimpleQueue()
        self._thread: threading.Thread | None = None

    def buffer(self) -> bytearray:
        """Return a buffer to read into; waits until one is hashed."""
        if self._thread is None:
            for _ in range(_AHEAD):
                self._free.put(bytearray(_CHUNK))
            self._thread = threading.Thread(target=self._run, name="tunemq-hasher", daemon=True)
            self._thread.start()
        return self._free.get()

    def update(self, digest: _Digest, buffer: bytearray, length: int) -> None:
        """Add the first ``length`` bytes to the digest, at the latest when `close` returns."""
        self._full.put((digest, buffer, length))

    def close(self) -> None:
        """Wait until everything is hashed."""
        if self._thread is not None:
            self._full.put(None)
            self._thread.join()

    def _run(self) -> None:
        while (piece := self._full.get()) is not None:
            digest, buffer, length = piece
            digest.update(memoryview(buffer)[:length])
            self._free.put(buffer)


def write_all(fd: int, data: memoryview) -> None:
    """Write every byte: a nearly full disk accepts a part without an error, then fails."""
    while data:
        data = data[os.write(fd, data) :]
