"""Checkpoints in an object store: files first, the manifest last, no content sent twice.

    <checkpoint>/<SHA-256>        the content of files; equal files are one object
    <checkpoint>/manifest.json    names, sizes, hashes, state, and the object's key for each hash

A manifest may refer to objects of an older checkpoint, the ``base`` of its upload, which the
scheduler keeps as long. An upload sends an object unless the base names it and the store still has
it: the store may have lost it, or be restored from a backup. So every operation can be repeated
after a kill.
"""

from __future__ import annotations

import contextlib
import hashlib
import os
import re
import shutil
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Final, NamedTuple, TypeVar

import msgspec

from tunemq_shared.base.errors import CheckpointCorrupt, StoreError
from tunemq_shared.base.failpoints import failpoint
from tunemq_shared.base.retrying import CancelToken, ignore, in_parallel, retried
from tunemq_shared.checkpoints.manifest import (
    COMMITTED,
    FILES,
    MANIFEST,
    MAX_MANIFEST,
    FileEntry,
    Manifest,
    is_object_key,
    make_manifest,
    parse_manifest,
)
from tunemq_shared.checkpoints.manifest import (
    read_manifest as parse_verified,
)
from tunemq_shared.checkpoints.staging import StagingFolder
from tunemq_shared.checkpoints.store import CollectedGarbage, check_key
from tunemq_shared.objects.multipart import PART
from tunemq_shared.objects.object_client import StoreRequestDenied
from tunemq_shared.objects.object_store import NoSuchObject, ObjectSizeMismatch, ObjectStore
from tunemq_shared.system.plain_files import open_to_read, opened_below, read_below, sha256_of

_T = TypeVar("_T")

#: Seconds for the retries of a small request.
TIMEOUT_S: Final = 30.0
#: How many small files are transferred at once; a large one goes alone, in parts.
_AT_ONCE: Final = 4
_NAME: Final = re.compile(r"checkpoint_\d+-\d+")


class UploadedCheckpoint(NamedTuple):
    """A committed checkpoint: its manifest with its hash, and the bytes of all its files.

    ``shared`` are the objects of other checkpoints that it refers to; ``sent`` is how many bytes of
    files this upload sent.
    """

    sha256: str
    size: int
    shared: tuple[str, ...]
    sent: int
    manifest: bytes


def upload(
    objects: ObjectStore,
    key: str,
    folder: Path,
    base: Path | None,
    cancel: CancelToken,
    on_trouble: Callable[[str], None] = ignore,
) -> UploadedCheckpoint:
    """Commit the checkpoint in ``folder`` (``files``, ``manifest.json``).

    Afterwards ``folder`` also has ``committed.json``, the manifest as it is in the store. If it is
    there before, an earlier process committed the checkpoint and died before it reported that;
    nothing is sent if the store still has all of it.

    Args:
        objects: The experiment's store.
        key: The checkpoint's key.
        folder: Its folder on this machine; must not change meanwhile.
        base: The ``committed.json`` of an older checkpoint in the same store, which is kept at
            least until this one is committed; contents in its objects are not sent if the store
            still has these.
        cancel: Ends the upload early.
        on_trouble: Called with the problem before each retry; see `retried`.

    Raises:
        CheckpointCorrupt: A file differs from ``manifest.json``.
        TransferCancelled, TransferTimedOut, StoreError: See `ObjectStore`.
    """
    check_key(key)
    with _local(f"checkpoint {key} cannot be read from {folder}"):
        manifest = parse_manifest(key, read_below(folder, MANIFEST, MAX_MANIFEST))
        with opened_below(folder, MANIFEST) as file:
            written_at = file.stat().st_mtime_ns
        disk = shutil.disk_usage(folder).total  # 0 if the file system does not report it
        if 0 < disk < manifest.size:
            raise CheckpointCorrupt(f"checkpoint {key}: its files are larger than the disk.")

    sizes = {entry.sha256: entry.size for entry in manifest.files}

    def is_there(found: tuple[str, int], cancel: CancelToken) -> bool:
        try:
            return retried(lambda: objects.has(*found), cancel, on_trouble)
        except StoreRequestDenied as rejection:
            # Amazon's S3 answers so about a missing object to a role that may not list.
            if rejection.code != "AccessDenied":
                raise
            return False

    def still_there(held: Mapping[str, str]) -> dict[str, str]:
        wanted = {sha256: at for sha256, at in held.items() if sha256 in sizes}
        places = [(at, sizes[sha256]) for sha256, at in wanted.items()]
        found = in_parallel(is_there, places, cancel, at_once=_AT_ONCE)
        return {each: wanted[each] for each, has in zip(wanted, found, strict=True) if has}

    held, done = _committed_before(key, folder, manifest)
    if done and still_there(held) == held and is_there((f"{key}/{MANIFEST}", len(done)), cancel):
        return _uploaded(key, manifest.size, held, done, 0)
    known = still_there(_objects_of(base))
    own: dict[str, FileEntry] = {}
    for entry in manifest.files:
        if entry.sha256 not in known:
            own.setdefault(entry.sha256, entry)
    held = {
        entry.sha256: known.get(entry.sha256, f"{key}/{entry.sha256}") for entry in manifest.files
    }
    committed = make_manifest(manifest, manifest.files, manifest.folders, held)

    def send(entry: FileEntry, cancel: CancelToken) -> None:
        failpoint("upload.before_object")
        with opened_below(folder, f"{FILES}/{entry.name}") as file:
            objects.put_file(
                f"{key}/{entry.sha256}",
                file,
                size=entry.size,
                sha256=entry.sha256,
                # Files were hashed before the manifest was written.
                is_unchanged=file.stat().st_mtime_ns <= written_at,
                cancel=cancel,
                on_trouble=on_trouble,
            )
        failpoint("upload.after_object")

    with _local(f"checkpoint {key} cannot be sent"):
        _each(send, own.values(), cancel)
        failpoint("upload.before_manifest")
        retried(lambda: objects.put_bytes(f"{key}/{MANIFEST}", committed), cancel, on_trouble)
        failpoint("upload.after_manifest")
        _replace(folder / COMMITTED, committed)
        failpoint("upload.after_committed_file")
    return _uploaded(key, manifest.size, held, committed, sum(entry.size for entry in own.values()))


def download(
    objects: ObjectStore,
    key: str,
    sha256: str,
    folder: Path,
    cancel: CancelToken,
    on_trouble: Callable[[str], None] = ignore,
) -> Manifest:
    """Download a checkpoint to the new ``folder`` (``files``, ``committed.json``), verified.

    ``folder`` is ``<cache>/<trial>/<checkpoint>``; it is built in the cache's staging folder and
    appears by one rename. An existing folder, from an interrupted try, is reused.

    Args:
        objects: The experiment's store.
        key: The checkpoint's key.
        sha256: The hash of its manifest in the store.
        folder: The folder to make.
        cancel: Ends the download early.
        on_trouble: Called with the problem before each retry; see `retried`.

    Raises:
        CheckpointCorrupt: A file is damaged or missing; names key, file, expected and found.
        TransferCancelled, TransferTimedOut, StoreError: See `ObjectStore`; or the folder cannot be
            made.
    """
    manifest, data = _fetch_manifest(objects, key, sha256, cancel, on_trouble)
    cache = folder.parent.parent
    what = f"checkpoint {key} cannot be put into {folder}"
    with _local(what):
        cache.mkdir(parents=True, exist_ok=True)
    with _local(what), StagingFolder(cache).new() as built:
        if _is_there(folder, data):
            return manifest
        fetch_files(objects, key, manifest, built / FILES, cancel, on_trouble)
        _replace(built / COMMITTED, data)
        folder.parent.mkdir(parents=True, exist_ok=True)
        failpoint("download.before_rename")
        built.rename(folder)
        failpoint("download.after_rename")
    return manifest


def read_manifest(
    objects: ObjectStore,
    key: str,
    sha256: str,
    cancel: CancelToken | None = None,
    on_trouble: Callable[[str], None] = ignore,
) -> Manifest:
    """Fetch the manifest with this hash; without ``cancel``, retries for `TIMEOUT_S`.

    Raises:
        CheckpointCorrupt: The manifest has another hash, or is missing.
        TransferCancelled, TransferTimedOut, StoreError: See `ObjectStore`.
    """
    return _fetch_manifest(objects, key, sha256, cancel or CancelToken(TIMEOUT_S), on_trouble)[0]


def fetch_files(
    objects: ObjectStore,
    key: str,
    manifest: Manifest,
    folder: Path,
    cancel: CancelToken,
    on_trouble: Callable[[str], None] = ignore,
) -> None:
    """Fill the new ``folder`` with the files of the manifest, each verified.

    Raises:
        CheckpointCorrupt, TransferCancelled, TransferTimedOut, StoreError: See `download`.
    """
    folder.mkdir()
    first: dict[str, FileEntry] = {}
    copies: list[FileEntry] = []
    for entry in manifest.files:
        (folder / entry.name).parent.mkdir(parents=True, exist_ok=True)
        if first.setdefault(entry.sha256, entry) is not entry:
            copies.append(entry)

    def fetch(entry: FileEntry, cancel: CancelToken) -> None:
        path = folder / entry.name
        damaged = f"checkpoint {key}: the file {entry.name!r} is damaged"
        at = manifest.objects.get(entry.sha256, f"{key}/{entry.sha256}")
        try:
            objects.get_file(at, path, size=entry.size, cancel=cancel, on_trouble=on_trouble)
        except NoSuchObject as error:
            raise CheckpointCorrupt(
                f"checkpoint {key}: the file {entry.name!r} is missing: expected the object {at}, "
                "found none."
            ) from error
        except ObjectSizeMismatch as error:
            raise CheckpointCorrupt(
                f"{damaged}: expected {entry.size} bytes, got {error.found} in the object {at}."
            ) from error
        with open_to_read(path) as file:
            found, _ = sha256_of(file, entry.size)
        if found != entry.sha256:
            raise CheckpointCorrupt(
                f"{damaged}: expected SHA-256 {entry.sha256}, got {found} in the object {at}."
            )

    _each(fetch, first.values(), cancel)
    for entry in copies:
        if entry.size != first[entry.sha256].size:
            raise CheckpointCorrupt(
                f"checkpoint {key}: the file {entry.name!r} is damaged: expected {entry.size} "
                f"bytes, got {first[entry.sha256].size} with the same SHA-256."
            )
        with (
            open_to_read(folder / first[entry.sha256].name) as file,
            (folder / entry.name).open("xb") as copy,
        ):
            shutil.copyfileobj(file, copy, PART)
    for name in manifest.folders:
        (folder / name).mkdir(parents=True, exist_ok=True)


def delete_checkpoint(
    objects: ObjectStore, key: str, keep: Iterable[str] = (), cancel: CancelToken | None = None
) -> None:
    """Remove the manifest, then the checkpoint's own objects except those named in ``keep``."""
    check_key(key)
    cancel, kept = cancel or CancelToken(TIMEOUT_S), {f"{key}/{name}" for name in keep}
    failpoint("delete.before_manifest")
    own = retried(lambda: _own_objects(objects, key), cancel)
    _delete(objects, [f"{key}/{MANIFEST}"], cancel)
    failpoint("delete.after_manifest")
    failpoint("delete.before_objects")
    _delete(objects, [each for each in own if each not in kept], cancel)
    failpoint("delete.after_objects")


def delete_objects(
    objects: ObjectStore, keys: Iterable[str], cancel: CancelToken | None = None
) -> None:
    """Remove objects that no manifest refers to."""
    doomed = tuple(keys)
    for key in doomed:
        if not is_object_key(key, key.rpartition("/")[2]):
            raise StoreError(f"{key!r} is not the key of a checkpoint's object.")
    failpoint("delete.before_objects")
    _delete(objects, doomed, cancel or CancelToken(TIMEOUT_S))
    failpoint("delete.after_objects")


def list_checkpoints(objects: ObjectStore, cancel: CancelToken | None = None) -> list[str]:
    """List the keys of all checkpoints with a manifest, sorted."""
    found = retried(
        lambda: [found.key for found in objects.list()], cancel or CancelToken(TIMEOUT_S)
    )
    return sorted(
        checkpoint
        for key in found
        if key.endswith(f"/{MANIFEST}") and (checkpoint := _checkpoint_of(key))
    )


def collect(
    objects: ObjectStore,
    live: Mapping[str, str],
    is_busy: Callable[[str], bool],
    cancel: CancelToken | None = None,
) -> CollectedGarbage:
    """Remove the objects of checkpoints that are not in ``live``, and unfinished uploads.

    Other objects below the store's prefix are not touched. No one else may delete checkpoints
    meanwhile. Each request is retried for `TIMEOUT_S`; there is one per entry of ``live``, to read
    its manifest.

    Args:
        objects: The experiment's store.
        live: The committed checkpoints that stay, with the hashes of their manifests.
        is_busy: Whether the checkpoint with this key, which is not in ``live``, may be in an
            upload, or was committed since ``live`` was made; called after all objects were listed.
        cancel: Ends the collection early.

    Raises:
        StoreError: The store failed; some objects may be removed already.
    """
    cancel = cancel or CancelToken()

    def patiently(request: Callable[[], _T]) -> _T:
        with cancel.child(TIMEOUT_S) as timeout_s:
            return retried(request, timeout_s)

    def objects_of(one: tuple[str, str], cancel: CancelToken) -> Iterable[str] | None:
        with cancel.child(TIMEOUT_S) as timeout_s, contextlib.suppress(CheckpointCorrupt):
            return read_manifest(objects, *one, timeout_s).objects.values()
        return None

    found = [
        (checkpoint, each)
        for each in patiently(lambda: list(objects.list()))
        if (checkpoint := _checkpoint_of(each.key))
    ]
    staying = {key for key in {key for key, _ in found} - set(live) if is_busy(key)}
    referred = {f"{key}/{MANIFEST}" for key in live}
    for key, referred_to in zip(
        live, in_parallel(objects_of, live.items(), cancel, at_once=_AT_ONCE), strict=True
    ):
        if referred_to is None:
            staying.add(key)  # a person who repairs its manifest needs its objects
        else:
            referred.update(referred_to)
    doomed = [each for key, each in found if key not in staying and each.key not in referred]
    # Manifests go first, so that a checkpoint with a manifest always has its objects.
    keys = [each.key for each in doomed]
    patiently(lambda: objects.delete([key for key in keys if key.endswith(f"/{MANIFEST}")]))
    patiently(lambda: objects.delete([key for key in keys if not key.endswith(f"/{MANIFEST}")]))

    def is_over(key: str) -> bool:
        checkpoint = _checkpoint_of(key)
        return bool(checkpoint) and (checkpoint in live or not is_busy(checkpoint))

    patiently(lambda: objects.abort_uploads(is_over))
    return CollectedGarbage(len(doomed), sum(each.size for each in doomed))


def _uploaded(
    key: str, size: int, held: Mapping[str, str], committed: bytes, sent: int
) -> UploadedCheckpoint:
    shared = {at for at in held.values() if not at.startswith(f"{key}/")}
    sha256 = hashlib.sha256(committed).hexdigest()
    return UploadedCheckpoint(sha256, size, tuple(sorted(shared)), sent, committed)


def _committed_before(
    key: str, folder: Path, manifest: Manifest
) -> tuple[Mapping[str, str], bytes]:
    """Objects and manifest that an earlier `upload` committed for this; empty if none did."""
    with contextlib.suppress(OSError):  # StoreError is one
        data = read_below(folder, COMMITTED, MAX_MANIFEST)
        committed = parse_manifest(key, data)
        if msgspec.structs.replace(committed, objects=manifest.objects) == manifest:
            return committed.objects, data
    return {}, b""


def _delete(objects: ObjectStore, keys: Sequence[str], cancel: CancelToken) -> None:
    retried(lambda: objects.delete(keys), cancel)


def _each(
    work: Callable[[FileEntry, CancelToken], None],
    entries: Iterable[FileEntry],
    cancel: CancelToken,
) -> None:
    """Apply ``work`` to small files, several at a time, and to large ones one by one."""
    small: list[FileEntry] = []
    large: list[FileEntry] = []
    for entry in entries:
        (small if entry.size <= PART else large).append(entry)
    if len(small) > 1:
        in_parallel(work, small, cancel, at_once=_AT_ONCE)
        small = []
    for entry in small + large:
        work(entry, cancel)


def _objects_of(base: Path | None) -> Mapping[str, str]:
    """Map the base's contents to their objects; empty if it is unreadable, so that all is sent."""
    if base is not None:
        with contextlib.suppress(OSError):  # StoreError is one
            data = read_below(base.parent, base.name, MAX_MANIFEST)
            return parse_manifest(str(base), data).objects
    return {}


def _fetch_manifest(
    objects: ObjectStore,
    key: str,
    sha256: str,
    cancel: CancelToken,
    on_trouble: Callable[[str], None],
) -> tuple[Manifest, bytes]:
    check_key(key)

    def get() -> bytes:
        return objects.get_bytes(f"{key}/{MANIFEST}", limit=MAX_MANIFEST)

    try:
        data = retried(get, cancel, on_trouble)
    except NoSuchObject as error:
        raise CheckpointCorrupt(
            f"checkpoint {key}: manifest.json is missing: expected one with SHA-256 {sha256}, "
            f"found none in {objects.address}."
        ) from error
    manifest = parse_verified(key, data, sha256)
    if manifest.files and not manifest.objects:
        raise CheckpointCorrupt(
            f"checkpoint {key}: manifest.json does not say where its files are."
        )
    return manifest, data


def _checkpoint_of(key: str, *, any_name: bool = False) -> str:
    """The checkpoint that this object belongs to; empty for objects that are not ours."""
    folder, _, name = key.rpartition("/")
    is_ours = name == MANIFEST or re.fullmatch(r"[0-9a-f]{64}", name)
    checkpoint = folder.rpartition("/")[2]
    if not is_ours or not is_object_key(key, name):
        return ""
    return folder if any_name or _NAME.fullmatch(checkpoint) else ""


def _own_objects(objects: ObjectStore, key: str) -> list[str]:
    """The objects in the checkpoint's own folder, besides its manifest.

    The manifest names them; only without one (its removal has begun) they are listed, which costs a
    server much more. `collect` removes what a broken upload left beside them.
    """
    try:
        manifest = parse_manifest(key, objects.get_bytes(f"{key}/{MANIFEST}", limit=MAX_MANIFEST))
    except (NoSuchObject, CheckpointCorrupt):
        found = (each.key for each in objects.list(f"{key}/"))
        return [each for each in found if _checkpoint_of(each, any_name=True)]
    own = set(manifest.objects.values())
    return sorted(each for each in own if each.rpartition("/")[0] == key)


def _is_there(folder: Path, manifest: bytes) -> bool:
    try:
        return read_below(folder, COMMITTED, MAX_MANIFEST) == manifest
    except FileNotFoundError:
        return False


def _replace(path: Path, data: bytes) -> None:
    """Write the file so that it exists whole or not at all."""
    # A trial cannot predict the name, and so cannot put a FIFO or link there.
    partial = path.with_name(f".{path.name}.{os.urandom(6).hex()}")
    try:
        with partial.open("xb") as file:
            file.write(data)
        partial.replace(path)
    except BaseException:
        partial.unlink(missing_ok=True)
        raise


@contextlib.contextmanager
def _local(what: str) -> Iterator[None]:
    """Convert errors of the local disk to a StoreError that names the operation and the file."""
    try:
        yield
    except StoreError:
        raise
    except OSError as error:
        where = f": {error.filename}" if error.filename else ""
        raise StoreError(f"{what}{where}: {error.strerror}.") from error
