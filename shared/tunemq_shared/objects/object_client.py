"""`ObjectClient`: the verbs of an object server, each tried once; `RemoteObjects` does the rest."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import AbstractContextManager
from typing import NamedTuple, Protocol

from tunemq_shared.base.errors import StoreError
from tunemq_shared.base.retrying import StoreUnavailable
from tunemq_shared.objects.multipart import PartBody
from tunemq_shared.objects.object_store import ObjectInfo


class StoreRequestDenied(StoreError):
    """The server will not do it before somebody mends something; ``code`` is its word for why."""

    def __init__(self, message: str, code: str) -> None:
        super().__init__(message)
        self.code = code


class StoreInternalError(StoreUnavailable):
    """The server answered that it failed: to an upload in parts it may answer so for ever."""


class NoSuchUpload(StoreError):
    """The server knows of no such upload: all of its parts are to be sent again."""


class IncompleteUpload(NamedTuple):
    """An upload in parts that is neither completed nor thrown away: its object, its id."""

    name: str
    upload: str


class ObjectContent(Protocol):
    """The content of an object, or a part of it."""

    @property
    def total(self) -> int:
        """The object's size in bytes."""

    def blocks(self) -> Iterator[bytes]:
        """The content, a piece at a time; all of it, or an error."""


class ObjectClient(Protocol):
    """One place on a server; names are whole keys in it.

    Every method raises `StoreUnavailable` where another try may help, else another `StoreError`;
    ``action`` says in their messages what could not be done.

    **Threads.** Any may call anything.
    """

    def put(self, name: str, data: bytes | PartBody, action: str) -> None:
        """Write an object; of a `PartBody` with a hash only what has that."""

    def get(
        self, name: str, action: str, *, offset: int = 0, length: int = 0
    ) -> AbstractContextManager[ObjectContent]:
        """The object from ``offset`` on; all of the rest where ``length`` is 0."""

    def remove(self, name: str, action: str) -> None:
        """Remove an object; one that is not there is no error."""

    def listed(self, prefix: str) -> Iterator[ObjectInfo]:
        """All objects with this prefix, by their whole names, in order."""

    def create_upload(self, name: str, action: str) -> str:
        """Begin an upload in parts; its id."""

    def put_part(self, name: str, upload: str, number: int, body: PartBody, action: str) -> str:
        """Send a part; what the server calls it."""

    def complete_upload(self, name: str, upload: str, etags: Sequence[str], action: str) -> None:
        """Make the object out of its parts."""

    def abort_upload(self, name: str, upload: str) -> None:
        """Throw the parts away; where there are none that is no error."""

    def unfinished(self) -> Iterator[IncompleteUpload]:
        """All uploads of the place that are under way, or that somebody died over."""

    def close(self) -> None:
        """Close what connections are not in use."""
