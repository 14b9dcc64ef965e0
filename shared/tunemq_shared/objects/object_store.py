"""`ObjectStore`: the interface to an object server, limited to what all servers support.

Every implementation passes the suite in ``tests/contracts/test_object_store.py``.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from typing import NamedTuple, Self

from tunemq_shared.base.errors import CheckpointCorrupt, StoreError
from tunemq_shared.base.retrying import CancelToken, ignore


class ObjectInfo(NamedTuple):
    """One object: its key below the store's prefix, its size in bytes, its Unix write time."""

    key: str
    size: int
    modified: float


class NoSuchObject(StoreError):
    """There is no such object."""


class InvalidObjectName(StoreError):
    """No store, or not this one, takes an object of this name: it is too long, for instance."""


class ObjectSizeMismatch(CheckpointCorrupt):
    """An object has another size than was written; ``found`` is its actual size."""

    def __init__(self, message: str, found: str) -> None:
        super().__init__(message)
        self.found = found


class ObjectStore(ABC):
    """Objects below one prefix of one bucket; keys are relative to that prefix.

    An object appears whole or not at all. If the server fails temporarily or does not answer,
    methods raise `StoreUnavailable`; `retried` repeats such calls, and `put_file` and `get_file`
    retry each part themselves. Any other `StoreError` would be the same next time.

    **Threads.** Any thread may call any method. **Processes.** Each needs its own store.
    """

    #: The store's name in messages; contains no secret.
    address: str

    @abstractmethod
    def probe(self, *, is_read_only: bool = False) -> None:
        """Check, within seconds, that objects can be written, read, listed and removed there.

        Creates a missing bucket if the address says so.

        Args:
            is_read_only: Only list objects, for credentials without further rights.

        Raises:
            StoreError: They cannot; says why, and what to do about it.
        """

    @abstractmethod
    def put_bytes(self, key: str, data: bytes) -> None:
        """Write a small object."""

    @abstractmethod
    def put_file(
        self,
        key: str,
        path: Path,
        *,
        size: int,
        sha256: str,
        is_unchanged: bool = False,
        cancel: CancelToken,
        on_trouble: Callable[[str], None] = ignore,
    ) -> None:
        """Upload a file of any size, in constant memory.

        Args:
            key: The object's key.
            path: The file.
            size: The file's size in bytes.
            sha256: The file's hash in hexadecimal; an object with another hash is never made.
            is_unchanged: The file did not change since that hash was taken, so that large files
                need not be hashed again.
            cancel: Ends the upload early.
            on_trouble: Called with the problem before each retry; see `retried`.

        Raises:
            InvalidObjectName: The store accepts no object of this name.
            CheckpointCorrupt: The file has another size or hash.
            TransferCancelled, TransferTimedOut: See `CancelToken`.
        """

    @abstractmethod
    def has(self, key: str, size: int) -> bool:
        """Return whether there is an object of this size, in one request."""

    @abstractmethod
    def get_bytes(self, key: str, *, limit: int) -> bytes:
        """Read a small object.

        Raises:
            NoSuchObject: It does not exist.
            ObjectSizeMismatch: It has more than ``limit`` bytes.
        """

    @abstractmethod
    def get_file(
        self,
        key: str,
        path: Path,
        *,
        size: int,
        cancel: CancelToken,
        on_trouble: Callable[[str], None] = ignore,
    ) -> None:
        """Download an object of any size into a new file, in constant memory.

        Raises:
            NoSuchObject: It does not exist.
            ObjectSizeMismatch: It has another size than ``size``.
            TransferCancelled, TransferTimedOut: See `CancelToken`.
        """

    @abstractmethod
    def delete(self, keys: Iterable[str]) -> None:
        """Remove objects, if they exist."""

    @abstractmethod
    def list(self, prefix: str = "") -> Iterator[ObjectInfo]:
        """List all objects whose keys begin with ``prefix``, in the order of their keys."""

    @abstractmethod
    def abort_uploads(self, is_over: Callable[[str], bool]) -> int:
        """Abort unfinished uploads of dead writers; returns their number.

        Args:
            is_over: Whether no process is writing the object with this key.
        """

    @abstractmethod
    def close(self) -> None:
        """Close connections."""

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_exception: object) -> None:
        self.close()
