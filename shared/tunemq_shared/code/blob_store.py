"""`BlobStore`: content-addressed blobs below ``blobs/`` of a store, for other processes to fetch.

Existing blobs are not sent again, and fetched ones are verified before use. In a folder that both
sides can read, a blob is used in place; from an object store it is fetched first. Both
implementations pass the suite in ``tests/contracts/test_blob_store.py``.
"""

from __future__ import annotations

import hashlib
import shutil
import tempfile
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Final, Self

import msgspec

from tunemq_shared.base.errors import BlobCorrupt, CheckpointCorrupt, StoreError
from tunemq_shared.base.retrying import CancelToken, StoreUnavailable, ignore, not_mounted, retried
from tunemq_shared.checkpoints.open_store import open_objects
from tunemq_shared.code.blob_folder import BLOBS, BlobFolder
from tunemq_shared.objects.object_store import NoSuchObject, ObjectStore
from tunemq_shared.objects.store_address import canonical_address, is_remote, without_settings
from tunemq_shared.protocol.node_orders import BlobRef

#: Default seconds for retries while a store does not answer.
TIMEOUT_S: Final = 120.0


def open_blobs(address: str, on_trouble: Callable[[str], None] = ignore) -> BlobStore:
    """Open the blobs of the store at a local path, or at the address of an object store.

    Args:
        address: Of the store.
        on_trouble: Called with the problem before each retry; see
            `tunemq_shared.base.retrying.retried`.

    Raises:
        ConfigError: The address is invalid.
        StoreError: There are no credentials for it. Nothing is sent to the store yet.
    """
    if is_remote(address):
        return ObjectBlobStore(open_objects(address), address, on_trouble)
    return FolderBlobStore(canonical_address(address))


class BlobStore(ABC):
    """Stores blobs at the store's ``address`` and fetches them from there."""

    def __init__(self, address: str) -> None:
        self.address = address

    @abstractmethod
    def put(self, data: bytes | Iterable[bytes | memoryview]) -> BlobRef:
        """Store this content, given in one piece or as successive buffers.

        Raises:
            StoreError: It cannot be stored.
        """

    def put_file(self, path: Path) -> BlobRef:
        """Store the content of this file, which must not change meanwhile.

        Raises:
            StoreError: It cannot be read or stored.
        """
        return self.put_blob(ref_of(path))

    @abstractmethod
    def put_blob(self, ref: BlobRef) -> BlobRef:
        """Store a blob that has a file on this machine.

        Raises:
            StoreError: It cannot be read or stored.
        """

    @abstractmethod
    def fetch(
        self,
        ref: BlobRef,
        folder: BlobFolder,
        cancel: CancelToken | None = None,
        on_trouble: Callable[[str], None] = ignore,
    ) -> BlobRef:
        """Copy the blob to ``folder``, complete and verified; if it is there, nothing is read.

        Args:
            ref: The blob.
            folder: The local folder.
            cancel: Ends the transfer early; by default it gives up after `TIMEOUT_S`.
            on_trouble: See `tunemq_shared.base.retrying.retried`.

        Raises:
            BlobCorrupt: The blob is missing, or its content does not match its name.
            StoreError: It cannot be read now, or cannot be written.
        """

    @abstractmethod
    def close(self) -> None:
        """Close connections."""

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_exception: object) -> None:
        self.close()


class FolderBlobStore(BlobStore):
    """Blobs in a folder that all their readers can access directly."""

    def __init__(self, address: str) -> None:
        super().__init__(address)
        self._blobs = BlobFolder(Path(address, BLOBS), is_shared=True)

    def put(self, data: bytes | Iterable[bytes | memoryview]) -> BlobRef:
        """See `BlobStore.put`."""
        return self._blobs.put(data)

    def put_blob(self, ref: BlobRef) -> BlobRef:
        """See `BlobStore.put_blob`."""
        return self._blobs.take_in(ref, lambda target: copy_file(Path(ref.path), target))

    def fetch(
        self,
        ref: BlobRef,
        folder: BlobFolder,
        cancel: CancelToken | None = None,  # noqa: ARG002  a disk answers, or fails
        on_trouble: Callable[[str], None] = ignore,  # noqa: ARG002  likewise
    ) -> BlobRef:
        """See `BlobStore.fetch`."""
        source = self._blobs.root / ref.sha256
        return folder.take_in(ref, lambda target: copy_file(source, target))

    def close(self) -> None:
        """See `BlobStore.close`."""


class ObjectBlobStore(BlobStore):
    """Blobs in an object store.

    Args:
        objects: The objects below the store's address; closed with this store.
        address: That address, which references contain.
        on_trouble: See `open_blobs`.
    """

    def __init__(
        self, objects: ObjectStore, address: str, on_trouble: Callable[[str], None] = ignore
    ) -> None:
        super().__init__(address)
        self._objects, self._on_trouble = objects, on_trouble

    def put(self, data: bytes | Iterable[bytes | memoryview]) -> BlobRef:
        """See `BlobStore.put`."""
        with tempfile.TemporaryDirectory(prefix="tunemq-") as folder:
            return self.put_blob(BlobFolder(folder).put(data))

    def put_blob(self, ref: BlobRef) -> BlobRef:
        """See `BlobStore.put_blob`."""
        cancel, key = CancelToken(TIMEOUT_S), _key(ref)
        if not retried(lambda: self._is_there(key, ref.size), cancel, self._on_trouble):
            cancel = CancelToken(_time_for(ref.size))
            self._objects.put_file(
                key,
                Path(ref.path),
                size=ref.size,
                sha256=ref.sha256,
                cancel=cancel,
                on_trouble=self._on_trouble,
            )
        return msgspec.structs.replace(ref, path="", store=self.address)

    def fetch(
        self,
        ref: BlobRef,
        folder: BlobFolder,
        cancel: CancelToken | None = None,
        on_trouble: Callable[[str], None] = ignore,
    ) -> BlobRef:
        """See `BlobStore.fetch`."""
        cancel = cancel or CancelToken(TIMEOUT_S)

        def get(target: Path) -> None:
            try:
                self._objects.get_file(
                    _key(ref), target, size=ref.size, cancel=cancel, on_trouble=on_trouble
                )
            except NoSuchObject as error:
                place = f"{without_settings(self.address)}/{_key(ref)}"
                raise BlobCorrupt(f"there is no blob {place}.") from error
            except CheckpointCorrupt as error:
                raise BlobCorrupt(str(error)) from error

        return folder.take_in(ref, get)

    def close(self) -> None:
        """See `BlobStore.close`."""
        self._objects.close()

    def _is_there(self, key: str, size: int) -> bool:
        return any(found.key == key and found.size == size for found in self._objects.list(key))


def ref_of(path: Path) -> BlobRef:
    """Make the reference of a file as a blob.

    Raises:
        StoreError: It cannot be read.
    """
    try:
        with path.open("rb") as file:
            sha256 = hashlib.file_digest(file, "sha256").hexdigest()
            return BlobRef(sha256, file.tell(), str(path))
    except OSError as error:
        raise StoreError(f"{path} cannot be read: {error.strerror}.") from error


def copy_file(source: Path, target: Path) -> None:
    """Copy a blob's file to a new one.

    Raises:
        BlobCorrupt: The folder does not have it.
        StoreUnavailable: The folder does not exist, or cannot be read now.
    """
    try:
        file = source.open("rb")
    except FileNotFoundError as error:
        if source.parent.is_dir():
            raise BlobCorrupt(f"there is no blob {source}.") from error
        raise not_mounted(source.parent) from error
    except OSError as error:
        raise StoreUnavailable(f"the blob {source} cannot be read: {error.strerror}.") from error
    with file, target.open("xb") as copy:
        shutil.copyfileobj(file, copy, 2**20)


def _key(ref: BlobRef) -> str:
    return f"{BLOBS}/{ref.sha256}"


def _time_for(size: int) -> float:
    """Seconds allowed for sending ``size`` bytes: a line slower than 1 MB/s counts as broken."""
    return TIMEOUT_S + size / 10**6
