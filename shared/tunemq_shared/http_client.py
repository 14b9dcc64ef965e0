"""`HttpClient`: the verbs of a served folder, each tried once; see `tunemq_shared.http_wire`."""

from __future__ import annotations

import contextlib
import ssl
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager
from functools import partial
from typing import Final, TypeVar
from urllib.parse import quote, urlencode

import msgspec

from tunemq_shared import http_errors
from tunemq_shared.errors import ConfigError, StoreError
from tunemq_shared.http_address import HttpAddress
from tunemq_shared.http_connections import BLOCK, Connections, NoHttp, Response, hash_of
from tunemq_shared.http_wire import (
    HASH_HEADER,
    MAX_ANSWER,
    SERVER_HEADER,
    VERSION,
    Begun,
    Code,
    Page,
    Parts,
    Problem,
    Uploads,
)
from tunemq_shared.object_client import Unfinished, UploadForgotten
from tunemq_shared.object_store import MissingObject, ObjectInfo
from tunemq_shared.parts import Body
from tunemq_shared.retrying import StoreUnavailable
from tunemq_shared.trusted_certificates import why_not_trusted
from tunemq_shared.undecodable import UNDECODABLE

#: What of TLS another try will not mend.
_NO_TRUST: Final = ("CERTIFICATE_VERIFY_FAILED", "WRONG_VERSION_NUMBER", "UNSUPPORTED_PROTOCOL")
#: The statuses of what stands between us and the server, and cannot reach it.
_OF_PROXIES: Final = (502, 503, 504)

_T = TypeVar("_T")
Watched = Callable[[], AbstractContextManager[None]]


class Answer:
    """See `Content`.

    Args:
        watched: What makes of a failure to read it one that says what could not be done.
    """

    def __init__(self, response: Response, watched: Watched) -> None:
        self._response = response
        self._watched = watched
        with watched():
            self._length = int(response.headers.get("Content-Length", "0"))
            of_all = response.headers.get("Content-Range", "").rpartition("/")[2]
            self.total = int(of_all) if of_all else self._length

    def blocks(self) -> Iterator[bytes]:
        """See `Content.blocks`."""
        left = self._length
        while left:
            with self._watched():
                block = self._response.read(min(BLOCK, left))
                if not block:
                    raise ConnectionError(f"it hung up {left} bytes before the end")
            left -= len(block)
            yield block
        with self._watched():
            self._response.read()  # which sees that there is nothing more


class HttpClient:
    """See `ObjectClient`; the place is one served folder.

    Args:
        connect_s: Seconds to connect.
        read_s: Seconds to send one block, and until the next bytes of an answer.
        at_once: So many connections are kept.

    Raises:
        ConfigError: the address's ``ca_file`` cannot be used.
    """

    def __init__(
        self, address: HttpAddress, token: str, *, connect_s: float, read_s: float, at_once: int
    ) -> None:
        self._address = address
        self._token = token
        try:
            self._connections = Connections(
                address, connect_s=connect_s, read_s=read_s, at_once=at_once
            )
        except OSError as error:  # ssl's is one
            why = why_not_trusted(address.ca_file, error)
            raise ConfigError(f"the storage {address.place}: {why}; correct ca_file.") from None

    def put(self, name: str, data: bytes | Body, doing: str) -> None:
        """See `ObjectClient.put`."""
        with self._asking("PUT", _target(name), doing, {HASH_HEADER: hash_of(data)}, data):
            pass

    @contextlib.contextmanager
    def get(self, name: str, doing: str, *, offset: int = 0, length: int = 0) -> Iterator[Answer]:
        """See `ObjectClient.get`."""
        end = str(offset + length - 1) if length else ""
        headers = {"Range": f"bytes={offset}-{end}"} if offset or length else {}
        with self._asking("GET", _target(name), doing, headers) as response:
            yield Answer(response, partial(self._watched, doing))

    def remove(self, name: str, doing: str) -> None:
        """See `ObjectClient.remove`."""
        with (
            contextlib.suppress(MissingObject),
            self._asking("DELETE", _target(name), doing),
        ):
            pass

    def listed(self, prefix: str) -> Iterator[ObjectInfo]:
        """See `ObjectClient.listed`."""
        after = ""
        while True:
            target = _target("", list=prefix, after=after)
            page = self._told("GET", target, "it cannot be listed", Page)
            for found in page.objects:
                yield ObjectInfo(found.key, found.size, found.modified)
            if page.is_last or not page.objects:
                return
            after = page.objects[-1].key

    def create_upload(self, name: str, doing: str) -> str:
        """See `ObjectClient.create_upload`."""
        return self._told("POST", _target(name, upload=""), doing, Begun).upload

    def put_part(
        self,
        name: str,
        upload: str,
        number: int,  # noqa: ARG002  here their places say the order
        body: Body,
        doing: str,
        *,
        start: int,
    ) -> str:
        """See `ObjectClient.put_part`."""
        target = _target(name, upload=upload, start=str(start))
        sha256 = hash_of(body)
        with self._asking("PUT", target, doing, {HASH_HEADER: sha256}, body):
            return sha256

    def complete_upload(self, name: str, upload: str, etags: Sequence[str], doing: str) -> None:
        """See `ObjectClient.complete_upload`."""
        data = msgspec.json.encode(Parts(tuple(etags)))
        with self._asking("POST", _target(name, upload=upload), doing, body=data):
            pass

    def abort_upload(self, name: str, upload: str) -> None:
        """See `ObjectClient.abort_upload`."""
        doing = f"parts of {name} cannot be removed"
        with (
            contextlib.suppress(UploadForgotten),
            self._asking("DELETE", _target(name, upload=upload), doing),
        ):
            pass

    def unfinished(self) -> Iterator[Unfinished]:
        """See `ObjectClient.unfinished`."""
        told = self._told(
            "GET", _target("", uploads=""), "unfinished uploads cannot be listed", Uploads
        )
        for one in told.uploads:
            yield Unfinished(one.key, one.upload)

    def close(self) -> None:
        """See `ObjectClient.close`."""
        self._connections.close()

    def _told(self, method: str, target: str, doing: str, kind: type[_T]) -> _T:
        body = b"" if method == "POST" else None
        with (
            self._asking(method, target, doing, body=body) as response,
            self._watched(doing),
        ):
            told = msgspec.json.decode(_whole(response), type=kind)
            response.read()
            return told

    @contextlib.contextmanager
    def _asking(
        self,
        method: str,
        target: str,
        doing: str,
        headers: Mapping[str, str] | None = None,
        body: bytes | Body | None = None,
    ) -> Iterator[Response]:
        """A good answer; all else becomes a StoreError that says what could not be done."""
        given = {"Authorization": f"Bearer {self._token}", **(headers or {})}
        with self._watched(doing):
            exchange = self._connections.ask(method, target, given, body)
        try:
            with self._watched(doing):
                self._check(exchange.response, doing)
            yield exchange.response
            if method != "GET":
                with self._watched(doing):
                    exchange.response.read(MAX_ANSWER)
        finally:
            exchange.close()

    @contextlib.contextmanager
    def _watched(self, doing: str) -> Iterator[None]:
        address = self._address
        try:
            yield
        except StoreError:
            raise
        except ssl.SSLError as error:
            if error.reason in _NO_TRUST:
                raise http_errors.untrusted(address, doing, str(error)) from error
            raise http_errors.unreachable(address, doing, str(error)) from error
        except OSError as error:
            raise http_errors.unreachable(address, doing, str(error)) from error
        except (NoHttp, ValueError, RecursionError) as error:
            raise http_errors.no_store(address, doing, repr(error)) from error

    def _check(self, response: Response, doing: str) -> None:
        status, version = response.status, response.headers.get(SERVER_HEADER)
        if version is None:
            if status in _OF_PROXIES:
                raise StoreUnavailable(
                    f"{self._address.place}: {doing}: what stands before the server cannot reach "
                    f"it (HTTP status {status})."
                )
            raise http_errors.no_store(self._address, doing, f"HTTP status {status}")
        if version != VERSION:
            raise http_errors.no_store(
                self._address, doing, f"it speaks version {version}, and we speak {VERSION}"
            )
        if status < 400:
            return
        try:
            problem = msgspec.json.decode(response.read(MAX_ANSWER), type=Problem)
        except UNDECODABLE:
            problem = Problem(Code.FAILED, f"HTTP status {status}")
        raise http_errors.refused(self._address, doing, status, problem)


def _whole(response: Response) -> bytes:
    """An answer's body.

    Raises:
        ConnectionResetError: the server ended in the middle of it.
    """
    data = response.read(MAX_ANSWER)
    if response.length and len(data) < MAX_ANSWER:
        raise ConnectionResetError("the connection ended in the middle of the answer")
    return data


def _target(name: str, **query: str) -> str:
    asked = f"?{urlencode(query, quote_via=quote, safe='')}" if query else ""
    return f"/{quote(name, safe='/')}{asked}"
