"""`ObjectStore`: what TuneMQ asks of an object server, the few verbs that all of them have.

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
    """One object: its key below the store's prefix, its bytes, when it was written (Unix time)."""

    key: str
    size: int
    modified: float


class NoSuchObject(StoreError):
    """There is no such object."""


class InvalidObjectName(StoreError):
    """No store, or not this one, takes an object of this name: it is too long, for instance."""


class ObjectSizeMismatch(CheckpointCorrupt):
    """An object is longer or shorter than it was written; ``found`` says what it is."""

    def __init__(self, message: str, found: str) -> None:
        super().__init__(message)
        self.found = found


class ObjectStore(ABC):
    """Objects below one prefix of one bucket; keys are relative to that prefix.

    An object appears whole or not at all. What the server cannot do now, or does not answer to,
    raises `StoreUnavailable`, and may be tried again with `retried`; `put_file` and `get_file` do
    that themselves, for each part of a file. Any other `StoreError` would be the same next time.

    **Threads.** Any may call anything. **Processes.** Each needs a store of its own.
    """

    #: How messages name it; holds no secret.
    address: str

    @abstractmethod
    def probe(self, *, is_read_only: bool = False) -> None:
        """Return, within seconds, if objects can be written, read, listed and removed there.

        A missing bucket is made if the address says so.

        Args:
            is_read_only: listing is all that is tried, for whoever has no more rights.

        Raises:
            StoreError: they cannot; says why, and what to do about it.
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
        """Write a file of any size, with memory that does not grow with it.

        Args:
            size: The file's, in bytes.
            sha256: The file's, in hexadecimal; an object with another is never made.
            is_unchanged: Nobody has written to the file since that hash was taken, so that it need
                not be taken once more where that costs something: for large files.
            on_trouble: Told what was wrong, before each try after the first; see `retried`.

        Raises:
            InvalidObjectName: the store takes no object of this name.
            CheckpointCorrupt: the file has another size or hash.
            Cancelled, TimedOut: see `CancelToken`.
        """

    @abstractmethod
    def get_bytes(self, key: str, *, limit: int) -> bytes:
        """The content of a small object.

        Raises:
            MissingObject: there is none.
            WrongSize: it has more than ``limit`` bytes.
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
        """Read an object of any size into a new file, with memory that does not grow with it.

        Raises:
            MissingObject: there is none.
            WrongSize: it has another size.
            Cancelled, TimedOut: see `CancelToken`.
        """

    @abstractmethod
    def delete(self, keys: Iterable[str]) -> None:
        """Remove objects; to remove one that is not there is no error."""

    @abstractmethod
    def list(self, prefix: str = "") -> Iterator[ObjectInfo]:
        """All objects whose keys begin with ``prefix``, in the order of their keys."""

    @abstractmethod
    def abort_uploads(self, is_over: Callable[[str], bool]) -> int:
        """Throw away parts of files that were sent by writers that are dead; returns how many.

        Args:
            is_over: Whether nobody is writing the object with this key.
        """

    @abstractmethod
    def close(self) -> None:
        """Let go of connections."""

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_exception: object) -> None:
        self.close()
