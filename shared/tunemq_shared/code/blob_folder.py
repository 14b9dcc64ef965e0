"""`BlobFolder`: content-addressed blobs in a local folder: pickled code and mapped parameters.

A blob's file is named by the SHA-256 of its content, written once through a temporary file and a
rename, and never changed. So equal content is stored once, and a name that exists is complete.
"""

from __future__ import annotations

import contextlib
import hashlib
import os
import re
import shutil
import stat
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from typing import Final

from tunemq_shared.base.errors import BlobCorrupt, StoreError
from tunemq_shared.checkpoints.hashed_copy import write_all
from tunemq_shared.objects.store_address import join, without_settings
from tunemq_shared.protocol.messages import BlobRef
from tunemq_shared.system.folder_trees import remove_tree
from tunemq_shared.system.plain_files import open_to_read, sha256_of

#: The folder of blobs in a store; an experiment cannot have this name.
BLOBS: Final = "blobs"

_CHUNK: Final = 2**20
_NAME: Final = re.compile(r"[0-9a-f]{64}")


class BlobFolder:
    """Blobs below one folder, which is made on first use, readable by its owner alone.

    Args:
        root: The folder.
        is_shared: The group that may write to the folder above, if there is one, may read and
            write blobs, too.
    """

    def __init__(self, root: Path | str, *, is_shared: bool = False) -> None:
        self.root = Path(root).absolute()
        self._is_shared = is_shared

    def put(self, data: bytes | Iterable[bytes | memoryview]) -> BlobRef:
        """Store the content, given in one piece or as successive buffers, without copying it.

        Raises:
            StoreError: It cannot be written; nothing of it is left behind.
        """
        buffers = [data] if isinstance(data, bytes) else data
        with self._temporary() as temporary:
            digest = hashlib.sha256()
            size = 0
            with open(temporary, "xb", buffering=0) as file:
                for buffer in buffers:
                    view = memoryview(buffer).cast("B")
                    for start in range(0, len(view), _CHUNK):
                        # In chunks: hashed bytes are in the cache when they are written.
                        piece = view[start : start + _CHUNK]
                        digest.update(piece)
                        write_all(file.fileno(), piece)
                    size += len(view)
            return self._keep(temporary, digest.hexdigest(), size)

    def adopt(self, ref: BlobRef) -> BlobRef:
        """Store another folder's blob here: as a hard link if possible, else as a copy."""
        target = self.root / ref.sha256
        if ref.path == str(target) and target.exists():
            return ref
        with self._temporary() as temporary:
            try:
                os.link(ref.path, temporary)
            except OSError:  # another file system, or one without links
                shutil.copyfile(ref.path, temporary)
            return self._keep(temporary, ref.sha256, ref.size)

    def take_in(self, ref: BlobRef, write: Callable[[Path], None]) -> BlobRef:
        """Let ``write`` fill a new file, and store it if it is this blob.

        If the blob is here already, nothing is written.

        Raises:
            BlobCorrupt: The file has other content.
            StoreError: It cannot be written; nothing of it is left behind.
        """
        if not is_blob_name(ref.sha256):
            raise BlobCorrupt(f"{ref.sha256!r} is not the name of a blob.")
        path = self.root / ref.sha256
        with self._temporary() as temporary:
            if not _is_whole(path, ref.size):
                write(temporary)
                verify(temporary, ref)
                return self._keep(temporary, ref.sha256, ref.size)
        return BlobRef(sha256=ref.sha256, size=ref.size, path=str(path))

    def remove_leftovers(self) -> None:
        """Remove the files of killed writers; no process may write meanwhile."""
        for path in self.root.glob(".*"):
            path.unlink(missing_ok=True)

    def _keep(self, temporary: Path, sha256: str, size: int) -> BlobRef:
        path = self.root / sha256
        # An existing file stays: processes that mapped it share its pages with later ones.
        if not _is_whole(path, size):
            temporary.chmod(0o440 if self._is_shared and self._has_group() else 0o400)
            if path.is_dir() and not path.is_symlink():  # a trial made it
                remove_tree(path)
            temporary.replace(path)
        return BlobRef(sha256=sha256, size=size, path=str(path))

    @contextlib.contextmanager
    def _temporary(self) -> Iterator[Path]:
        temporary = self.root / f".{os.getpid()}-{os.urandom(6).hex()}"
        try:
            self._make()
            yield temporary
        except OSError as error:
            if isinstance(error, StoreError):
                raise
            raise StoreError(
                f"a blob cannot be written to {self.root}: {error.strerror}.{self._advice(error)}"
            ) from error
        finally:
            with contextlib.suppress(OSError):  # it was renamed, or the folder was never made
                temporary.unlink()

    def _make(self) -> None:
        if self.root.is_dir():
            return
        self.root.mkdir(mode=0o700, parents=True, exist_ok=True)
        above = self.root.parent.stat()
        if self._is_shared and above.st_mode & stat.S_IWGRP:
            with contextlib.suppress(PermissionError):  # a member of the group may
                os.chown(self.root, -1, above.st_gid)
            self.root.chmod(0o2770)

    def _has_group(self) -> bool:
        return bool(self.root.stat().st_mode & stat.S_IWGRP)

    def _advice(self, error: OSError) -> str:
        if not (self._is_shared and isinstance(error, PermissionError)):
            return ""
        return (
            f" Submit as the user who owns {self.root.parent}, or share it with a group: see"
            " 'A folder as the store' in docs/farm.md."
        )


def place_of(ref: BlobRef) -> str:
    """The path or address of a blob, for messages."""
    if not ref.store:
        return ref.path
    return without_settings(join(ref.store, f"{BLOBS}/{ref.sha256}"))


def requested_blob(ref: BlobRef) -> Path:
    """The file of a blob that a request names by its path, verified.

    Raises:
        BlobCorrupt: It is not named like a blob, or has other content.
        StoreError: It cannot be read.
    """
    path = Path(ref.path)
    if not is_blob_name(ref.sha256) or path.name != ref.sha256 or path.parent.name != BLOBS:
        raise BlobCorrupt(f"the path {ref.path!r} is not that of a blob in a farm's store.")
    is_file = os.path.isfile(path) and os.access(path, os.R_OK)
    if not is_file and path.parent.is_dir():  # else the store may not be mounted yet
        raise BlobCorrupt(f"the blob {path} is no regular file, or may not be read.")
    verify(path, ref)
    return path


def is_blob_name(text: str) -> bool:
    """Whether the text is a SHA-256 in hex, as names of blobs are."""
    return _NAME.fullmatch(text) is not None


def _is_whole(path: Path, size: int) -> bool:
    try:
        return path.stat().st_size == size
    except PermissionError:
        raise
    except OSError:
        return False


def verify(path: Path, ref: BlobRef) -> None:
    """Check that the file holds this blob.

    Raises:
        BlobCorrupt: It has other content.
        StoreError: It cannot be read.
    """
    try:
        with open_to_read(path) as file:
            found, size = sha256_of(file, ref.size)
    except OSError as error:
        raise StoreError(f"the blob {path} cannot be read: {error.strerror}.") from error
    if (found, size) != (ref.sha256, ref.size):
        # Not the SHA-256 that was found: a request may name a file that its sender cannot read.
        problem = "its content does not match its name"
        if size > ref.size:  # it is read no further
            problem = f"it has more than {ref.size} bytes"
        elif size < ref.size:
            problem = f"it has {size} bytes, not {ref.size}"
        raise BlobCorrupt(f"the blob {ref.sha256} is damaged: {problem}.")


def read_blob(ref: BlobRef) -> bytes:
    """Read the whole content of a blob and verify it.

    Raises:
        StoreError: It cannot be read, or its content does not match its name.
    """
    content = check_blob(ref).read_bytes()
    if hashlib.sha256(content).hexdigest() != ref.sha256:
        raise StoreError(f"the blob {ref.path} is damaged: its content does not match its name.")
    return content


def check_blob(ref: BlobRef) -> Path:
    """The path of a blob, after a check of its size.

    Its content was hashed when it was written or fetched, and its file is read-only since. So each
    process that maps half a gigabyte need not read it all again.

    Raises:
        StoreError: The file is missing, or has another size.
    """
    path = Path(ref.path)
    try:
        size = path.stat().st_size
    except OSError as error:
        raise StoreError(f"the blob {path} cannot be read: {error.strerror}.") from error
    if size != ref.size:
        raise StoreError(f"the blob {path} is damaged: it has {size} bytes, not {ref.size}.")
    return path
