"""`ObjectClient`: the operations of an object server, without retries; see `RemoteObjects`."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import AbstractContextManager
from typing import NamedTuple, Protocol

from tunemq_shared.base.errors import StoreError
from tunemq_shared.base.retrying import StoreUnavailable
from tunemq_shared.objects.multipart import PartBody
from tunemq_shared.objects.object_store import ObjectInfo


class StoreRequestDenied(StoreError):
    """The server denies the request until a person fixes the cause, which ``code`` names."""

    def __init__(self, message: str, code: str) -> None:
        super().__init__(message)
        self.code = code


class StoreInternalError(StoreUnavailable):
    """The server answered that it failed: to an upload in parts it may answer so for ever."""


class NoSuchUpload(StoreError):
    """The server knows of no such upload: all of its parts are to be sent again."""


class IncompleteUpload(NamedTuple):
    """A multipart upload that is neither completed nor aborted: its object, its id."""

    name: str
    upload: str


class ObjectContent(Protocol):
    """The content of an object, or a part of it."""

    @property
    def total(self) -> int:
        """The object's size in bytes."""

    def blocks(self) -> Iterator[bytes]:
        """Iterate over the content in blocks; raises if it is incomplete."""


class ObjectClient(Protocol):
    """One place on a server; names are whole keys in it.

    Every method raises `StoreUnavailable` if a retry may help, else another `StoreError`;
    ``action`` is the clause of their messages that says what failed.

    **Threads.** Any thread may call any method.
    """

    def put(self, name: str, data: bytes | PartBody, action: str) -> None:
        """Write an object; a `PartBody` with a hash is sent only if the hash matches."""

    def get(
        self, name: str, action: str, *, offset: int = 0, length: int = 0
    ) -> AbstractContextManager[ObjectContent]:
        """Read ``length`` bytes of the object from ``offset``; 0 for all of the rest."""

    def remove(self, name: str, action: str) -> None:
        """Remove an object, if it exists."""

    def listed(self, prefix: str) -> Iterator[ObjectInfo]:
        """List all objects with this prefix, by their whole names, in order."""

    def create_upload(self, name: str, action: str) -> str:
        """Begin a multipart upload; returns its id."""

    def put_part(self, name: str, upload: str, number: int, body: PartBody, action: str) -> str:
        """Send a part; returns its ETag."""

    def complete_upload(self, name: str, upload: str, etags: Sequence[str], action: str) -> None:
        """Join the parts to the object."""

    def abort_upload(self, name: str, upload: str) -> None:
        """Discard the parts, if there are any."""

    def unfinished(self) -> Iterator[IncompleteUpload]:
        """List all unfinished uploads of the place, including those of dead writers."""

    def close(self) -> None:
        """Close idle connections."""
