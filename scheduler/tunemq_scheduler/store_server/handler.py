"""`Handler`: one connection's requests; see `tunemq_shared.http_wire`.

The standard library reads the head of a request. What it does not bound is bounded by
`RequestStream`, and what it would answer in HTML is answered as a `Problem`.
"""

from __future__ import annotations

import hmac
import io
import logging
import os
import re
import socket
import ssl
from collections.abc import Callable
from hashlib import sha256 as new_sha256
from http import HTTPStatus
from http.server import BaseHTTPRequestHandler
from typing import BinaryIO, Final, NamedTuple
from urllib.parse import parse_qsl, unquote_to_bytes

import msgspec

from tunemq_scheduler.store_server.guests import Guests
from tunemq_scheduler.store_server.listing import page_of
from tunemq_scheduler.store_server.refusal import Refusal, refusal_of
from tunemq_scheduler.store_server.served_folder import ServedFolder, check_key
from tunemq_scheduler.store_server.stream import (
    HEAD_S,
    IDLE_S,
    SILENCE_S,
    HeadTooLong,
    RequestStream,
)
from tunemq_scheduler.store_server.trusted_requests import TrustedRequests
from tunemq_scheduler.store_server.uploads import Uploads, damaged
from tunemq_shared.http_wire import (
    HASH_HEADER,
    SERVER_HEADER,
    VERSION,
    Begun,
    Code,
    Parts,
    Problem,
)
from tunemq_shared.http_wire import Uploads as UploadsUnderWay

#: Taken from a connection and written at once.
_BLOCK: Final = 2**18
#: Of a request that is JSON, in bytes.
_MAX_JSON: Final = 2**20
#: Seconds in which what is left of a refused request may come, so that its sender reads why.
_DRAIN_S: Final = 2.0
_RANGE: Final = re.compile(r"bytes=(\d{1,18})-(\d{0,18})")
_NUMBER: Final = re.compile(r"\d{1,18}")
_HASH: Final = re.compile(r"[0-9a-f]{64}")
#: Behind these nobody is who could be told anything.
_GONE: Final = (ConnectionError, TimeoutError, ssl.SSLError)
_JSON: Final = "application/json"
_BYTES: Final = "application/octet-stream"
#: Of each answer, should it ever be shown by a browser: it is no page, and nothing in it is run.
_FOR_BROWSERS: Final = (
    ("X-Content-Type-Options", "nosniff"),
    ("Content-Security-Policy", "default-src 'none'; sandbox"),
    ("Cache-Control", "no-store"),
)

_log = logging.getLogger(__name__)


class Service(NamedTuple):
    """What all connections share."""

    folder: ServedFolder
    uploads: Uploads
    guests: Guests
    token: str
    trusted: TrustedRequests

    def __repr__(self) -> str:
        """Without the token."""
        return f"Service({str(self.folder.root)!r})"


class Handler(BaseHTTPRequestHandler):
    """Answers the requests of one connection, one after the other, until it ends."""

    protocol_version = "HTTP/1.1"
    server_version = "tunemq"
    sys_version = ""

    def __init__(self, connection: socket.socket, address: object, service: Service) -> None:
        self._service = service
        self._left = 0
        self._is_answered = False
        self._is_known = False
        self._buffer = memoryview(b"")
        # What is answered to a head that cannot be read needs these.
        self.command = self.requestline = ""
        self.request_version = self.protocol_version
        super().__init__(connection, address, None)  # type: ignore[arg-type]  # serves it all

    def setup(self) -> None:
        """See `socketserver.StreamRequestHandler.setup`."""
        super().setup()
        self.rfile.close()
        self.connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, True)
        self._stream = RequestStream(self.connection)
        self.rfile = io.BufferedReader(self._stream, 2**16)

    def handle_one_request(self) -> None:
        """See `BaseHTTPRequestHandler.handle_one_request`."""
        self.close_connection = True
        self._is_answered = False
        self._left = 0
        try:
            self._serve()
        except _GONE:
            self.close_connection = True
        except HeadTooLong:
            self._stream.expect_body(_DRAIN_S)
            self.send_error(HTTPStatus.REQUEST_HEADER_FIELDS_TOO_LARGE)

    def _serve(self) -> None:
        guests = self._service.guests
        guests.awaits(self.connection)
        self._stream.expect_head(IDLE_S if self._is_known else HEAD_S)
        self.raw_requestline = self.rfile.readline(2**16)
        if not self.raw_requestline or not self.parse_request():
            return
        self._stream.expect_body()
        if self.request_version == "HTTP/0.9":
            self.send_error(HTTPStatus.BAD_REQUEST)
            return
        try:
            self._service.trusted.check(self.command, self.headers)
            self._check_token()
            guests.is_served(self.connection)
            self._left = self._length()
            self._perform()
        except Refusal as refusal:
            self._refuse(refusal)
        except _GONE:
            raise
        except OSError as error:
            _log.warning("%s %r: %s", self.command, self.path, error)
            self._refuse(refusal_of(error, str(self._service.folder.root)))

    def _check_token(self) -> None:
        given = self.headers.get("Authorization", "")
        expected = f"Bearer {self._service.token}"
        if not hmac.compare_digest(given.encode(), expected.encode()):
            raise Refusal(Code.WRONG_TOKEN, "this is not the server's token")
        self._is_known = True

    def _length(self) -> int:
        """How many bytes follow the head."""
        given = self.headers.get_all("Content-Length", [])
        if "Transfer-Encoding" in self.headers or len(given) > 1:
            self.close_connection = True
            raise Refusal(Code.BAD_REQUEST, "the length of the request is not clear")
        if not given:
            return 0
        if not _NUMBER.fullmatch(given[0]):
            self.close_connection = True
            raise Refusal(Code.BAD_REQUEST, f"Content-Length is no number: {given[0]!r}")
        return int(given[0])

    def _perform(self) -> None:
        key, asked = _target(self.path)
        match self.command, sorted(asked):
            case "GET", ["after", "list"] if not key:
                page = page_of(self._service.folder.fd, asked["list"], asked["after"])
                self._answer(HTTPStatus.OK, msgspec.json.encode(page))
            case "GET", ["uploads"] if not key:
                under_way = UploadsUnderWay(self._service.uploads.under_way())
                self._answer(HTTPStatus.OK, msgspec.json.encode(under_way))
            case (("GET" | "HEAD"), []):
                self._send_object(key)
            case "PUT", []:
                self._take_object(key)
            case "DELETE", []:
                self._service.folder.remove(key)
                self._answer(HTTPStatus.OK)
            case "POST", ["upload"]:
                self._begin_or_complete(key, asked["upload"])
            case "PUT", ["start", "upload"] if _NUMBER.fullmatch(asked["start"]):
                self._service.uploads.take_part(
                    key,
                    asked["upload"],
                    int(asked["start"]),
                    self._left,
                    self._hash(),
                    self._receive,
                )
                self._answer(HTTPStatus.CREATED)
            case "DELETE", ["upload"]:
                self._service.uploads.abort(key, asked["upload"])
                self._answer(HTTPStatus.OK)
            case _:
                raise Refusal(Code.BAD_REQUEST, "there is no such request")

    def _send_object(self, key: str) -> None:
        with self._service.folder.open_object(key) as file:
            size = os.fstat(file.fileno()).st_size
            start, end = self._range(size)
            is_part = (start, end) != (0, size)
            self._begin_answer(
                HTTPStatus.PARTIAL_CONTENT if is_part else HTTPStatus.OK, end - start, _BYTES
            )
            if is_part:
                self.send_header("Content-Range", f"bytes {start}-{end - 1}/{size}")
            self.end_headers()
            if self.command == "GET" and end > start:
                self.connection.settimeout(SILENCE_S)
                sent = self.connection.sendfile(file, start, end - start)
                if sent < end - start:  # the file is shorter now: nothing else may follow
                    self.close_connection = True

    def _range(self, size: int) -> tuple[int, int]:
        """The first byte that is wanted, and the one behind the last."""
        given = self.headers.get("Range", "")
        if not given:
            return 0, size
        found = _RANGE.fullmatch(given)
        if not found:
            raise Refusal(Code.BAD_REQUEST, f"there is no such range: {given!r}")
        start, end = int(found[1]), min(int(found[2] or size) + 1, size)
        if start >= end:
            raise Refusal(Code.CUT_SHORT, f"the object has {size} bytes")
        return start, end

    def _take_object(self, key: str) -> None:
        check_key(key)
        expected, folder = self._hash(), self._service.folder
        with folder.new_file(self._left) as (name, file):
            found = self._receive(lambda piece: _write(file, piece))
            if found != expected:
                raise damaged(expected, found)
            os.fsync(file.fileno())
            folder.show(name, key)
        self._answer(HTTPStatus.CREATED)

    def _begin_or_complete(self, key: str, upload: str) -> None:
        if self._left > _MAX_JSON:
            raise Refusal(Code.BAD_REQUEST, f"{self._left} bytes are too many")
        data = self.rfile.read(self._left)
        self._left = 0
        if not upload:
            begun = Begun(self._service.uploads.begin(key))
            self._answer(HTTPStatus.CREATED, msgspec.json.encode(begun))
            return
        try:
            parts = msgspec.json.decode(data, type=Parts)
        except msgspec.DecodeError as error:
            raise Refusal(Code.BAD_REQUEST, str(error)) from error
        self._service.uploads.complete(key, upload, parts.hashes)
        self._answer(HTTPStatus.CREATED)

    def _hash(self) -> str:
        """The SHA-256 of what follows the head."""
        given = str(self.headers.get(HASH_HEADER, ""))
        if not _HASH.fullmatch(given) or "Content-Length" not in self.headers:
            raise Refusal(Code.BAD_REQUEST, f"{HASH_HEADER} or Content-Length is missing")
        return given

    def _receive(self, write: Callable[[memoryview], None]) -> str:
        """Hand on what follows the head, piece by piece; its hash."""
        self._buffer = self._buffer or memoryview(bytearray(_BLOCK))
        digest = new_sha256()
        while self._left:
            count = self.rfile.readinto1(self._buffer[: min(_BLOCK, self._left)])
            if not count:
                raise ConnectionError("it hung up")
            self._left -= count
            piece = self._buffer[:count]
            digest.update(piece)
            write(piece)
        return digest.hexdigest()

    def _answer(self, status: HTTPStatus, data: bytes = b"") -> None:
        self._begin_answer(status, len(data), _JSON)
        self.end_headers()
        if data and self.command != "HEAD":
            self.wfile.write(data)

    def _begin_answer(self, status: HTTPStatus, length: int, kind: str) -> None:
        self._is_answered = True
        self.connection.settimeout(SILENCE_S)
        self.send_response(status)
        self.send_header(SERVER_HEADER, VERSION)
        self.send_header("Content-Type", kind)
        self.send_header("Content-Length", str(length))
        for name, value in _FOR_BROWSERS:
            self.send_header(name, value)
        if self.close_connection:
            self.send_header("Connection", "close")

    def _refuse(self, refusal: Refusal) -> None:
        if self._is_answered:  # half of it is on its way, and nothing can be taken back
            self.close_connection = True
            return
        if self._left or not self._is_known:
            self.close_connection = True
        self._answer(refusal.status, msgspec.json.encode(Problem(refusal.code.value, str(refusal))))
        self._drain()

    def _drain(self) -> None:
        """Read what is still sent, for a while: who sends sees the answer only if nobody hangs up.

        What follows the head of a request without a token is not counted.
        """
        if not self.close_connection:
            return
        self.connection.shutdown(socket.SHUT_WR)
        self._stream.expect_body(_DRAIN_S)
        while self.rfile.read1(_BLOCK):
            pass

    def send_error(self, code: int, message: str | None = None, explain: str | None = None) -> None:
        """See `BaseHTTPRequestHandler.send_error`: of heads that cannot be read."""
        del explain
        self.close_connection = True
        self.request_version = self.protocol_version  # an answer has a head, whatever was asked
        said = message or HTTPStatus(code).phrase
        self._answer(HTTPStatus(code), msgspec.json.encode(Problem(Code.BAD_REQUEST.value, said)))
        self._drain()

    def log_message(self, format: str, *args: object) -> None:  # noqa: A002  its name there
        """See `BaseHTTPRequestHandler.log_message`."""
        _log.debug(format, *args)


def _target(path: str) -> tuple[str, dict[str, str]]:
    """The key and what stands behind the question mark."""
    place, _, query = path.partition("?")
    try:
        if not (path.isascii() and place.startswith("/")):
            raise ValueError
        key = unquote_to_bytes(place[1:]).decode()
        pairs = parse_qsl(query, keep_blank_values=True, errors="strict", max_num_fields=4)
    except ValueError:
        raise Refusal(Code.BAD_REQUEST, "this is not the address of an object") from None
    return key, dict(pairs)


def _write(file: BinaryIO, piece: memoryview) -> None:
    written = 0
    while written < len(piece):
        written += file.write(piece[written:])
