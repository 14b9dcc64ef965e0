"""Checkpoints as folders of a local file system, below the experiment's folder.

    <root>/<trial>/<checkpoint>/files/...        the files that the trial saved
    <root>/<trial>/<checkpoint>/manifest.json    names, sizes, hashes, state
    <root>/.staging/                             being written or removed; see `staging`

A node's cache of an object store has the same layout; there ``committed.json``, the manifest in the
object store, may stand beside ``manifest.json`` or replace it.

A checkpoint appears by one rename, so its key never shows a part of it. The folder may be on NFS.
"""

from __future__ import annotations

import contextlib
import errno
import hashlib
import os
import shutil
import stat
from collections.abc import Callable, Iterable, Iterator, Mapping
from pathlib import Path
from typing import Final

from tunemq_shared.base.errors import CheckpointCorrupt, StoreError
from tunemq_shared.base.failpoints import failpoint
from tunemq_shared.base.retrying import CancelToken, not_mounted
from tunemq_shared.checkpoints.checkpoint import METADATA_FILE
from tunemq_shared.checkpoints.checkpoint_sink import checkpoint_key
from tunemq_shared.checkpoints.folder_listing import FolderListing, list_folder
from tunemq_shared.checkpoints.hashed_copy import BaseCopy, copy_folder
from tunemq_shared.checkpoints.manifest import (
    COMMITTED,
    FILES,
    MANIFEST,
    CheckpointInfo,
    FileEntry,
    Manifest,
    make_manifest,
    parse_manifest,
)
from tunemq_shared.checkpoints.staging import StagingFolder, make_in_store, measure
from tunemq_shared.checkpoints.store import (
    CheckpointStore,
    CollectedGarbage,
    CommittedCheckpoint,
    OpenedCheckpoint,
    check_key,
)
from tunemq_shared.system.folder_trees import remove_tree
from tunemq_shared.system.plain_files import LEASE_S, open_regular, read_plain, sha256_of

_TAKEN: Final = (errno.EEXIST, errno.ENOTEMPTY, errno.ENOTDIR)


class LocalCheckpointStore(CheckpointStore):
    """Checkpoints below one local folder.

    Args:
        root: The folder; it must exist.
        durable: Sync a checkpoint to the disk before its key appears, so that even a power failure
            leaves only whole checkpoints.
        linking: Let checkpoints share equal files by hard links. Those files are read-only, because
            a write would change several checkpoints.
    """

    def __init__(self, root: Path | str, *, durable: bool = True, linking: bool = False) -> None:
        self.root = Path(root).absolute()
        self._durable = durable
        self._linking = linking
        self._staging = StagingFolder(self.root)

    def put_checkpoint(
        self, key: str, source: Path, info: CheckpointInfo, base: str | None = None
    ) -> CommittedCheckpoint:
        """See `CheckpointStore.put_checkpoint`.

        Args:
            key: The checkpoint's key.
            source: The folder with its files.
            info: Its trial, step, metrics and state.
            base: The key of an older checkpoint: a file that is equal there is linked instead of
                copied. Used only if the store is ``linking``.
        """
        final = self._path(key)
        if os.path.lexists(final):
            raise StoreError(f"checkpoint {key} is there already; a key is never written twice.")
        listing = list_folder(Path(source))
        with self._failures(f"checkpoint {key} cannot be written"), self._staging.new() as staging:
            failpoint("cache.before_copy")
            files, folders = copy_folder(
                listing,
                staging / FILES,
                durable=self._durable,
                mode=0o444 if self._linking else 0o644,
                base=self._base(base) if base is not None and self._linking else None,
            )
            failpoint("cache.after_copy")
            manifest = make_manifest(info, files, folders)
            self._write(staging / MANIFEST, manifest)
            make_in_store(final.parent)
            failpoint("cache.before_rename")
            try:
                staging.rename(final)
            except OSError as error:
                if error.errno in _TAKEN:
                    raise StoreError(
                        f"another process has already written checkpoint {key}."
                    ) from error
                raise
            failpoint("cache.after_rename")
        size = sum(file.size for file in files)
        return CommittedCheckpoint(key, hashlib.sha256(manifest).hexdigest(), size)

    def open_checkpoint(self, key: str, sha256: str | tuple[str, ...]) -> OpenedCheckpoint:
        """See `CheckpointStore.open_checkpoint`; accepts several hashes, for either manifest."""
        with self._failures(f"checkpoint {key} cannot be read"):
            manifest = self._manifest(key, sha256)
            files = self._path(key) / FILES
            _check_kinds(key, files)
            for entry in manifest.files:
                if not _may_change(entry.name):
                    _verify(key, files / entry.name, entry)
            for name in manifest.folders:
                if not (files / name).is_dir():
                    raise CheckpointCorrupt(f"checkpoint {key}: the folder {name!r} is missing.")
        return OpenedCheckpoint(files, manifest)

    def get_checkpoint(self, key: str, sha256: str | tuple[str, ...], target: Path) -> Manifest:
        """See `CheckpointStore.get_checkpoint`; accepts several hashes, for either manifest."""
        partial = target.with_name(f".{target.name}.{os.urandom(6).hex()}")
        with self._failures(f"checkpoint {key} cannot be copied to {target}", target.parent):
            manifest = self._manifest(key, sha256)
            files = self._path(key) / FILES
            _check_kinds(key, files)
            listing = FolderListing({}, list(manifest.folders))
            for entry in manifest.files:
                if not _may_change(entry.name):
                    listing.files[entry.name] = files / entry.name
                    _check_size(key, files / entry.name, entry)
            if (files / METADATA_FILE).exists():
                listing.files[METADATA_FILE] = files / METADATA_FILE
            entries = {entry.name: entry for entry in manifest.files}
            try:
                copied, _ = copy_folder(listing, partial, durable=False, sharing=True)
                for copy in copied:
                    if not _may_change(copy.name):
                        _check_hash(key, copy.sha256, entries[copy.name])
                partial.rename(target)
            finally:
                remove_tree(partial)
        return manifest

    def read_manifest(self, key: str, sha256: str) -> Manifest:
        """See `CheckpointStore.read_manifest`."""
        with self._failures(f"checkpoint {key} cannot be read"):
            return self._manifest(key, sha256)

    def delete_checkpoint(self, key: str, keep: Iterable[str] = ()) -> None:  # noqa: ARG002
        """See `CheckpointStore.delete_checkpoint`; no other checkpoint depends on its files."""
        folder = self._path(key)
        if not os.path.lexists(folder):
            return
        with self._failures(f"checkpoint {key} cannot be removed"):
            # The key disappears at once; the slow removal happens under a hidden name.
            trash = self._staging.name()
            try:
                folder.rename(trash)
            except FileNotFoundError:
                return  # another process removed it first
            remove_tree(trash)
            if trash.exists():
                raise StoreError(f"checkpoint {key} was removed, but {trash} could not be.")

    def delete_objects(self, keys: Iterable[str]) -> None:
        """See `CheckpointStore.delete_objects`; here each file is removed with its checkpoint."""

    def list_checkpoints(self) -> list[str]:
        """See `CheckpointStore.list_checkpoints`."""
        with self._failures("checkpoints cannot be listed"):
            return sorted(
                f"{trial.name}/{folder.name}"
                for trial in _folders(self.root)
                if not trial.name.startswith(".")
                for folder in _folders(Path(trial.path))
                if not folder.name.startswith(".")
                and any(
                    os.path.isfile(os.path.join(folder, name)) for name in (MANIFEST, COMMITTED)
                )
                and os.path.isdir(os.path.join(folder, FILES))
            )

    def collect(
        self,
        live: Mapping[str, str],
        is_busy: Callable[[str], bool],
        cancel: CancelToken | None = None,
    ) -> CollectedGarbage:
        """See `CheckpointStore.collect`."""
        objects = size = 0
        for key in self.list_checkpoints():
            if cancel is not None:
                cancel.check()
            if key not in live and not is_busy(key) and self._is_ours(key):
                found = measure(self._path(key))
                self.delete_checkpoint(key)
                objects, size = objects + found.files, size + found.size
        with self._failures("leftovers cannot be removed"):
            left = self._staging.remove_leftovers()
        return CollectedGarbage(objects + left.files, size + left.size)

    def _is_ours(self, key: str) -> bool:
        """Return whether a folder is a checkpoint, not a person's, nor a person's copy of one."""
        found = self._unverified(key)
        if found is None:
            return False
        return key == checkpoint_key(key.rpartition("/")[0], found.attempt, found.n)

    def close(self) -> None:
        """See `CheckpointStore.close`; there is nothing to close."""

    def _path(self, key: str) -> Path:
        check_key(key)
        return self.root / key

    def _manifest(self, key: str, sha256: str | tuple[str, ...]) -> Manifest:
        """Read the manifest with that hash, or with any of several."""
        accepted = (sha256,) if isinstance(sha256, str) else sha256
        folder = self._path(key)
        wrong = []
        for name in (MANIFEST, COMMITTED):
            try:
                data = read_plain(folder / name)
            except FileNotFoundError:
                continue
            found = hashlib.sha256(data).hexdigest()
            if found in accepted:
                return parse_manifest(key, data)
            wrong.append(
                f"{name} is damaged: expected SHA-256 {' or '.join(accepted)}, got {found}"
            )
        if not wrong and not self.root.is_dir():
            raise not_mounted(self.root)
        raise CheckpointCorrupt(
            f"checkpoint {key}: {'; '.join(wrong) or f'it is not in {self.root}'}."
        )

    def _unverified(self, key: str) -> Manifest | None:
        """Read the manifest without checking its hash; None if there is none."""
        for name in (MANIFEST, COMMITTED):
            with contextlib.suppress(OSError):  # StoreError is one
                return parse_manifest(key, read_plain(self._path(key) / name))
        return None

    def _base(self, key: str) -> BaseCopy | None:
        manifest = self._unverified(key)
        if manifest is None:
            return None
        return BaseCopy(self._path(key) / FILES, {entry.name: entry for entry in manifest.files})

    def _write(self, path: Path, data: bytes) -> None:
        with path.open("xb") as file:
            file.write(data)
            file.flush()
            if self._durable:
                os.fdatasync(file.fileno())

    @contextlib.contextmanager
    def _failures(self, what: str, place: Path | None = None) -> Iterator[None]:
        """Convert errors of the file system to a StoreError with the path and the free space."""
        try:
            yield
        except StoreError:
            raise
        except OSError as error:
            folder = place or self.root
            raise StoreError(
                f"{what}: {error.filename or folder}: {error.strerror}{_free(folder, error)}."
            ) from error


def _may_change(name: str) -> bool:
    """Whether people may change or remove this file of a saved checkpoint."""
    return name == METADATA_FILE


def _verify(key: str, path: Path, entry: FileEntry) -> None:
    _check_size(key, path, entry)
    with os.fdopen(open_regular(path, os.O_RDONLY, lease_s=LEASE_S), "rb") as file:
        _check_hash(key, sha256_of(file, entry.size)[0], entry)


def _check_size(key: str, path: Path, entry: FileEntry) -> None:
    try:
        size = path.lstat().st_size
    except FileNotFoundError as error:
        raise CheckpointCorrupt(f"checkpoint {key}: the file {entry.name!r} is missing.") from error
    if size != entry.size:
        raise CheckpointCorrupt(
            f"checkpoint {key}: the file {entry.name!r} is damaged: "
            f"expected {entry.size} bytes, got {size}."
        )


def _check_hash(key: str, found: str, entry: FileEntry) -> None:
    if found != entry.sha256:
        raise CheckpointCorrupt(
            f"checkpoint {key}: the file {entry.name!r} is damaged: "
            f"expected SHA-256 {entry.sha256}, got {found}."
        )


def _check_kinds(key: str, files: Path) -> None:
    """Reject everything that no writer makes: links, devices and the like."""
    try:
        mode = files.lstat().st_mode
    except FileNotFoundError as error:
        raise CheckpointCorrupt(f"checkpoint {key}: the folder {FILES} is missing.") from error
    if not stat.S_ISDIR(mode):
        raise CheckpointCorrupt(f"checkpoint {key}: {FILES} is not a folder.")
    _refuse_links(key, files)


def _refuse_links(key: str, folder: Path) -> None:
    with os.scandir(folder) as entries:
        for entry in entries:
            if entry.is_dir(follow_symlinks=False):
                _refuse_links(key, Path(entry.path))
            elif not entry.is_file(follow_symlinks=False):
                raise CheckpointCorrupt(
                    f"checkpoint {key}: {entry.path} is a link or device; a checkpoint has none."
                )


def _folders(folder: Path) -> list[os.DirEntry[str]]:
    try:
        return [entry for entry in os.scandir(folder) if entry.is_dir(follow_symlinks=False)]
    except FileNotFoundError:
        return []


def _free(folder: Path, error: OSError) -> str:
    if error.errno not in (errno.ENOSPC, errno.EDQUOT):
        return ""
    while not folder.exists():
        folder = folder.parent
    return f" ({shutil.disk_usage(folder).free} bytes are free)"
