"""Bundles: an experiment's script or folder of code as one blob, unpacked once per machine.

A bundle is a ZIP file. Equal files make equal bytes, so an unchanged project is not sent again.
Unlike a tar file, it holds only files with sizes that are known in advance. The unpacking side
trusts nothing in a bundle beyond its hash.
"""

from __future__ import annotations

import contextlib
import os
import shutil
import tempfile
import zipfile
import zlib
from collections.abc import Callable, Collection
from pathlib import Path, PurePosixPath
from typing import Final

from tunemq_shared.base.byte_sizes import show_bytes
from tunemq_shared.base.errors import BlobCorrupt, ConfigError, StoreError
from tunemq_shared.base.safe_names import is_safe_name
from tunemq_shared.code.blob_folder import (
    BlobFolder,
    check_blob,
    is_blob_name,
    place_of,
    requested_blob,
)
from tunemq_shared.code.blob_store import BlobStore, open_blobs
from tunemq_shared.code.bundle_rules import FILES, MAX_FILES, BundleFile, files_of
from tunemq_shared.code.farm_secrets import left_out, own_secrets
from tunemq_shared.protocol.node_orders import BlobRef
from tunemq_shared.system.folder_trees import remove_tree, walk

#: The default limit for a new bundle.
LIMIT_BYTES: Final = 100 * 2**20
#: Larger bundles are not unpacked.
MOST_BYTES: Final = 4 * 2**30
#: How many of the largest files the error of a bundle that is too large names.
_NAMED: Final = 5
#: The oldest time that a ZIP file can express; all files have it, so that equal files are equal.
_LONG_AGO: Final = (1980, 1, 1, 0, 0, 0)
_CHUNK: Final = 2**20
#: The folder in which Python saves the compiled modules of the folder above.
_COMPILED: Final = "__pycache__"
_METHODS: Final = frozenset({zipfile.ZIP_STORED, zipfile.ZIP_DEFLATED})
#: What `zipfile` raises for a damaged archive, or for another kind of file.
_BROKEN: Final = (
    zipfile.BadZipFile,
    zlib.error,
    EOFError,
    NotImplementedError,
    RuntimeError,
    ValueError,
)


def bundle(
    source: Path | str,
    blobs: BlobStore,
    *,
    limit_bytes: int = LIMIT_BYTES,
    own: Collection[bytes] | None = None,
    tell: Callable[[str], object] = lambda _text: None,
) -> BlobRef:
    """Store a script, or the files of a folder (`tunemq_shared.code.bundle_rules`), as a blob.

    Args:
        source: The script or folder.
        blobs: The store.
        limit_bytes: The most bytes of all files.
        own: The secrets of this process, which no file may hold; by default of its environment.
        tell: Called at most once, with a sentence about files with secrets that are left out.

    Raises:
        ConfigError: It does not exist, is empty, too large, or unreadable; says what to do.
        StoreError: It cannot be stored.
    """
    source = Path(source).absolute()
    files = _collected(source, own_secrets(os.environ) if own is None else own, tell)
    _check_size(source, files, limit_bytes)
    with tempfile.TemporaryDirectory(prefix="tunemq-") as folder:
        archive = Path(folder, "bundle")
        _write(archive, files)
        return blobs.put_file(archive)


def unpacked(
    ref: BlobRef,
    folder: Path | str,
    fetch: Callable[[BlobRef, BlobFolder], BlobRef] | None = None,
) -> Path:
    """Unpack the bundle below ``folder``, unless it is there, and return its read-only folder.

    Only the folders for compiled modules can be written to.

    Its name is the bundle's hash. Several processes may unpack at the same time.

    Args:
        ref: The bundle.
        folder: The parent folder.
        fetch: Gets the blob into a folder; by default from the reference's own place.

    Raises:
        BlobCorrupt: It is missing or damaged, or has content that no bundle of ours has.
        StoreError: It cannot be read, or the disk has no space for it.
    """
    if not is_blob_name(ref.sha256):
        raise BlobCorrupt(f"{ref.sha256!r} is not the name of a bundle.")
    target = Path(folder, ref.sha256)
    if target.is_dir():
        return target
    try:
        Path(folder).mkdir(mode=0o700, parents=True, exist_ok=True)
        with tempfile.TemporaryDirectory(prefix=".", dir=folder) as temporary:
            archive = (fetch or _fetched)(ref, BlobFolder(temporary))
            unpack(check_blob(archive), target)
    except StoreError:
        raise
    except OSError as error:
        raise StoreError(
            f"the bundle {place_of(ref)} cannot be unpacked to {target}: {error.strerror}."
        ) from error
    return target


def unpack(archive: Path, target: Path) -> None:
    """Unpack a bundle to the folder ``target``, completely or not at all; an existing one stays.

    Raises:
        BlobCorrupt: It is not a bundle, or one that no honest program makes.
        OSError: The disk has no space for it.
    """
    building = target.with_name(f".{target.name}.{os.urandom(6).hex()}")
    try:
        building.mkdir(mode=0o700)
        with zipfile.ZipFile(archive) as opened:
            for info in _checked(opened, archive):
                _extract(opened, info, building)
        _make_read_only(building)
        try:
            building.rename(target)
        except NotADirectoryError:  # a trial put a file there
            target.unlink(missing_ok=True)
            building.rename(target)
        except OSError:
            if not target.is_dir():  # else another process unpacked it first
                raise
        target.chmod(0o500)
    except _BROKEN as error:
        raise BlobCorrupt(f"{archive} is no bundle: {error}.") from error
    finally:
        remove(building)


def remove(folder: Path) -> None:
    """Remove a bundle's folder, or the rest of one, if it exists."""
    remove_tree(folder)


# --- packing --------------------------------------------------------------------------------------


def _collected(
    source: Path, own: Collection[bytes], tell: Callable[[str], object]
) -> list[BundleFile]:
    if source.is_file():
        return [BundleFile(source.name, source, source.stat().st_size)]
    if not source.is_dir():
        raise ConfigError(f"there is no script and no folder {source}.")
    files, secrets = files_of(source, own)
    if secrets:
        tell(left_out(secrets, source / FILES[0]))
    if not files:
        raise ConfigError(
            f"{source} has no file that could travel; see its {' and '.join(FILES)}, if any."
        )
    return files


def _check_size(source: Path, files: list[BundleFile], limit_bytes: int) -> None:
    size = sum(file.size for file in files)
    if size <= limit_bytes:
        return
    largest = sorted(files, key=lambda file: -file.size)[:_NAMED]
    named = ", ".join(f"{file.name} ({show_bytes(file.size)})" for file in largest)
    raise ConfigError(
        f"{source} has {show_bytes(size)}, and a code package may have "
        f"{show_bytes(limit_bytes)}. The largest: {named}. List files that are no code in "
        f"{(source if source.is_dir() else source.parent) / FILES[0]}, pass data with "
        "tune.with_parameters, or leave it where workers can read it."
    )


def _write(archive: Path, files: list[BundleFile]) -> None:
    try:
        with zipfile.ZipFile(archive, "w", zipfile.ZIP_DEFLATED) as writer:
            for file in files:
                info = zipfile.ZipInfo(file.name, _LONG_AGO)
                info.compress_type = zipfile.ZIP_DEFLATED
                info.create_system = 3  # Unix, on every platform, for equal bytes
                info.file_size = file.size  # decides whether sizes take 4 or 8 bytes
                is_program = os.access(file.path, os.X_OK)
                info.external_attr = (0o500 if is_program else 0o400) << 16
                with file.path.open("rb") as content, writer.open(info, "w") as copy:
                    shutil.copyfileobj(content, copy, _CHUNK)
    except OSError as error:
        raise ConfigError(
            f"{error.filename or archive} cannot be packed: {error.strerror}."
        ) from error


# --- unpacking ------------------------------------------------------------------------------------


def _checked(opened: zipfile.ZipFile, archive: Path) -> list[zipfile.ZipInfo]:
    members = opened.infolist()
    if len(members) > MAX_FILES:
        raise BlobCorrupt(f"the bundle {archive} has {len(members)} files, more than {MAX_FILES}.")
    size = sum(member.file_size for member in members)
    if size > MOST_BYTES:
        raise BlobCorrupt(
            f"the bundle {archive} has {show_bytes(size)}, more than {show_bytes(MOST_BYTES)}."
        )
    names: set[str] = set()
    end = archive.stat().st_size
    for member in members:
        if not 0 <= member.header_offset < end:
            raise BlobCorrupt(f"{archive} is no bundle: it is cut short.")
        # The name before `zipfile` cut it at a null byte.
        name = member.orig_filename
        if not is_safe_name(name):
            raise BlobCorrupt(f"the bundle {archive} has a file with the name {name!r}.")
        if name in names:
            raise BlobCorrupt(f"the bundle {archive} has {name!r} twice.")
        if member.compress_type not in _METHODS:
            raise BlobCorrupt(f"the bundle {archive} has {name!r} packed as none of ours is.")
        names.add(name)
    if inside := next((name for name in names if _is_within_file(name, names)), None):
        raise BlobCorrupt(f"the bundle {archive} has {inside!r} inside of a file.")
    return members


def _is_within_file(name: str, names: set[str]) -> bool:
    return any(str(above) in names for above in PurePosixPath(name).parents)


def _extract(opened: zipfile.ZipFile, info: zipfile.ZipInfo, folder: Path) -> None:
    """Write one file, always a regular one, and at most as long as the archive declares."""
    path = folder / info.orig_filename
    path.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
    mode = 0o500 if info.external_attr >> 16 & 0o100 else 0o400
    with opened.open(info) as content, path.open("xb") as file:
        left = info.file_size
        while piece := content.read(_CHUNK):
            left -= len(piece)
            if left < 0:
                raise BlobCorrupt(f"{info.orig_filename} is longer than the bundle says.")
            file.write(piece)
        os.fchmod(file.fileno(), mode)


def _make_read_only(folder: Path) -> None:
    """Leave room only for compiled modules: the first trial process that imports one saves it.

    Compiling here could take hours, or end this process: modules are foreign code.
    """
    for path, _, names in reversed([*walk(folder)]):
        if path.endswith(f"/{_COMPILED}"):
            continue
        if any(name.endswith(".py") for name in names):
            with contextlib.suppress(FileExistsError):
                Path(path, _COMPILED).mkdir(mode=0o700)
        if path != str(folder):
            os.chmod(path, 0o500)


def _fetched(ref: BlobRef, folder: BlobFolder) -> BlobRef:
    if not ref.store:
        requested_blob(ref)
        return ref
    with open_blobs(ref.store) as blobs:
        return blobs.fetch(ref, folder)
