"""`LocalStore`: checkpoints as folders of the local file system, below the experiment's folder.

    <root>/<trial>/<checkpoint>/files/...        what the trial saved
    <root>/<trial>/<checkpoint>/manifest.json    names, sizes, hashes, state
    <root>/.staging/<random>/                    being written, or being removed

A checkpoint is built in the staging folder and appears by one rename, so its key never shows a part
of it. A writer holds a lock on its staging folder, which the kernel lets go when the writer dies:
that is how `sweep` tells what was left behind from what is being written.
"""

from __future__ import annotations

import contextlib
import errno
import fcntl
import hashlib
import os
import shutil
import stat
from collections.abc import Iterator
from pathlib import Path
from typing import Final

from tunemq_shared.checkpoint import METADATA_FILE
from tunemq_shared.copying import copy_folder, list_folder
from tunemq_shared.errors import CheckpointCorrupt, StoreError
from tunemq_shared.manifest import CheckpointInfo, FileEntry, make_manifest, read_manifest
from tunemq_shared.store import Committed, Opened, Store, check_key

FILES: Final = "files"
MANIFEST: Final = "manifest.json"
STAGING: Final = ".staging"

_TAKEN: Final = (errno.EEXIST, errno.ENOTEMPTY, errno.ENOTDIR)


class LocalStore(Store):
    """Checkpoints below one local folder.

    With ``durable`` the contents of a checkpoint are on the disk before its key shows it, so that
    even a power failure leaves whole checkpoints only.
    """

    def __init__(self, root: Path | str, *, durable: bool = True) -> None:
        self.root = Path(root).absolute()
        self._durable = durable

    def put_checkpoint(self, key: str, source: Path, info: CheckpointInfo) -> Committed:
        """See `Store.put_checkpoint`."""
        final = self._path(key)
        if os.path.lexists(final):
            raise StoreError(f"checkpoint {key} is there already; a key is never written twice.")
        listing = list_folder(Path(source))
        with self._failures(f"checkpoint {key} cannot be written"), self._staging() as staging:
            files, folders = copy_folder(listing, staging / FILES, durable=self._durable)
            manifest = make_manifest(info, files, folders)
            self._write(staging / MANIFEST, manifest)
            final.parent.mkdir(parents=True, exist_ok=True)
            try:
                staging.rename(final)
            except OSError as error:
                if error.errno in _TAKEN:
                    raise StoreError(f"checkpoint {key} was written by somebody else.") from error
                raise
        size = sum(file.size for file in files)
        return Committed(key, hashlib.sha256(manifest).hexdigest(), size)

    def open_checkpoint(self, key: str, sha256: str) -> Opened:
        """See `Store.open_checkpoint`."""
        folder = self._path(key)
        with self._failures(f"checkpoint {key} cannot be read"):
            manifest = read_manifest(key, (folder / MANIFEST).read_bytes(), sha256)
            files = folder / FILES
            if not stat.S_ISDIR(files.lstat().st_mode):
                raise CheckpointCorrupt(f"checkpoint {key}: {FILES} is not a folder.")
            _refuse_links(key, files)
            for entry in manifest.files:
                # People may change a checkpoint's metadata after it was saved.
                if entry.name != METADATA_FILE:
                    _verify(key, files / entry.name, entry)
            for name in manifest.folders:
                if not (files / name).is_dir():
                    raise CheckpointCorrupt(f"checkpoint {key}: the folder {name!r} is missing.")
        return Opened(files, manifest)

    def delete_checkpoint(self, key: str) -> None:
        """See `Store.delete_checkpoint`."""
        folder = self._path(key)
        if not os.path.lexists(folder):
            return
        with self._failures(f"checkpoint {key} cannot be removed"):
            # The key is gone at once; what takes its time happens where nobody looks.
            trash = self._staging_root() / f"{os.getpid()}-{os.urandom(6).hex()}"
            try:
                folder.rename(trash)
            except FileNotFoundError:
                return  # somebody else was faster
            shutil.rmtree(trash, ignore_errors=True)
            if trash.exists():
                raise StoreError(f"checkpoint {key} was removed, but {trash} could not be.")

    def list_checkpoints(self) -> list[str]:
        """See `Store.list_checkpoints`."""
        with self._failures("checkpoints cannot be listed"):
            return sorted(
                f"{trial.name}/{folder.name}"
                for trial in _folders(self.root)
                if not trial.name.startswith(".")
                for folder in _folders(Path(trial.path))
                if not folder.name.startswith(".")
                and os.path.isfile(os.path.join(folder.path, MANIFEST))
                and os.path.isdir(os.path.join(folder.path, FILES))
            )

    def sweep(self) -> int:
        """See `Store.sweep`."""
        freed = 0
        with self._failures("leftovers cannot be removed"):
            for entry in _folders(self.root / STAGING):
                with _lock(Path(entry.path)) as is_ours:
                    if is_ours:
                        freed += _size(Path(entry.path))
                        shutil.rmtree(entry.path, ignore_errors=True)
        return freed

    def _path(self, key: str) -> Path:
        check_key(key)
        return self.root / key

    def _staging_root(self) -> Path:
        staging = self.root / STAGING
        staging.mkdir(parents=True, exist_ok=True)
        return staging

    @contextlib.contextmanager
    def _staging(self) -> Iterator[Path]:
        """A new folder, locked while it is being filled, gone afterwards unless it was renamed."""
        while True:
            folder = self._staging_root() / f"{os.getpid()}-{os.urandom(6).hex()}"
            folder.mkdir()
            with _lock(folder) as is_ours:
                # Between the two lines above a sweep may have taken the folder for a leftover.
                if not is_ours or not folder.exists():
                    continue
                try:
                    yield folder
                finally:
                    shutil.rmtree(folder, ignore_errors=True)
                return

    def _write(self, path: Path, data: bytes) -> None:
        with path.open("xb") as file:
            file.write(data)
            file.flush()
            if self._durable:
                os.fdatasync(file.fileno())

    @contextlib.contextmanager
    def _failures(self, what: str) -> Iterator[None]:
        """Failures of the file system become a StoreError that says where, and how full it is."""
        try:
            yield
        except StoreError:
            raise
        except OSError as error:
            place = error.filename or self.root
            raise StoreError(
                f"{what}: {place}: {error.strerror}{_free(self.root, error)}."
            ) from error


def _verify(key: str, path: Path, entry: FileEntry) -> None:
    try:
        fd = os.open(path, os.O_RDONLY | os.O_NOFOLLOW | os.O_CLOEXEC)
    except FileNotFoundError as error:
        raise CheckpointCorrupt(f"checkpoint {key}: the file {entry.name!r} is missing.") from error
    with os.fdopen(fd, "rb") as file:
        size = os.fstat(fd).st_size
        if size != entry.size:
            raise CheckpointCorrupt(
                f"checkpoint {key}: the file {entry.name!r} is damaged: "
                f"expected {entry.size} bytes, got {size}."
            )
        found = hashlib.file_digest(file, "sha256").hexdigest()
    if found != entry.sha256:
        raise CheckpointCorrupt(
            f"checkpoint {key}: the file {entry.name!r} is damaged: "
            f"expected SHA-256 {entry.sha256}, got {found}."
        )


def _refuse_links(key: str, folder: Path) -> None:
    with os.scandir(folder) as entries:
        for entry in entries:
            if entry.is_dir(follow_symlinks=False):
                _refuse_links(key, Path(entry.path))
            elif not entry.is_file(follow_symlinks=False):
                raise CheckpointCorrupt(
                    f"checkpoint {key}: {entry.path} is a link or device; a checkpoint has none."
                )


@contextlib.contextmanager
def _lock(folder: Path) -> Iterator[bool]:
    """Whether we hold the folder's lock now; another holder is not waited for."""
    try:
        fd = os.open(folder, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    except FileNotFoundError:
        yield False
        return
    try:
        try:
            fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
            is_ours = True
        except BlockingIOError:
            is_ours = False
        yield is_ours
    finally:
        os.close(fd)


def _folders(folder: Path) -> list[os.DirEntry[str]]:
    try:
        return [entry for entry in os.scandir(folder) if entry.is_dir(follow_symlinks=False)]
    except FileNotFoundError:
        return []


def _size(folder: Path) -> int:
    total = 0
    for path, _, names in os.walk(folder):
        for name in names:
            with contextlib.suppress(OSError):  # somebody removes it at the same time
                total += os.lstat(os.path.join(path, name)).st_size
    return total


def _free(folder: Path, error: OSError) -> str:
    if error.errno not in (errno.ENOSPC, errno.EDQUOT):
        return ""
    return f" ({shutil.disk_usage(folder).free} bytes are free)"
