"""Readers of what `tunemq store serve` and its clients say; each input is a connection's."""

from __future__ import annotations

import contextlib
import logging
import socket
import threading
from collections.abc import Callable, Iterator

from tests.fuzz.decoder import Decoder, Desk
from tunemq_scheduler.store_server.handler import Handler
from tunemq_scheduler.store_server.server import StoreServer
from tunemq_shared import http_wire
from tunemq_shared.errors import StoreError
from tunemq_shared.http_address import parse_http_address
from tunemq_shared.http_client import HttpClient

_TOKEN = "token-of-sixteen-letters"


def of_http(desk: Desk) -> list[Decoder]:
    """The server's, and the client's."""
    return [
        Decoder(
            "request to the store",
            _Server(desk).asked,
            (),
            (
                _request("GET", "/runs/a"),
                _request("PUT", "/runs/a", b"content"),
                _request("POST", "/runs/a?upload"),
                _request("POST", "/runs/a?upload=1", b'{"hashes": []}'),
                _request("PUT", "/runs/a?upload=1&start=0", b"content"),
                _request("DELETE", "/runs/a"),
                _request("GET", "/?list=runs&after=a"),
                _request("GET", "/?uploads"),
                _request("GET", "/runs/a", "Range: bytes=0-9"),
            ),
            (
                "tunemq_scheduler.store_server.handler:Handler",
                "tunemq_scheduler.store_server.handler:Handler._begin_or_complete",
            ),
        ),
        Decoder(
            "answer of the store",
            _Client(desk).answered,
            (StoreError,),
            (
                _answer(b'{"objects": [["a", 3, 1.5]], "is_last": true}'),
                _answer(b'{"objects": [], "is_last": false}'),
                _answer(b'{"code": "NoSuchObject", "message": "m"}', status=404),
                _answer(b"content"),
                _answer(b"2\r\n{}\r\n0\r\n\r\n").replace(
                    b"Content-Length: 12", b"Transfer-Encoding: chunked"
                ),
            ),
            (
                "tunemq_shared.http_client:HttpClient._told",
                "tunemq_shared.http_client:HttpClient._check",
                "tunemq_shared.http_connections:Response",
            ),
        ),
    ]


class _Server:
    """Serves one connection after the other, each with the bytes of one input."""

    def __init__(self, desk: Desk) -> None:
        folder = desk.folder / "served"
        folder.mkdir()
        server = StoreServer(folder, "127.0.0.1:0", _TOKEN)
        server._listener.close()
        self._service = server._service
        desk.afterwards(self._service.folder.close)
        logging.getLogger("tunemq_scheduler.store_server").setLevel(logging.CRITICAL + 1)

    def asked(self, data: bytes) -> object:
        """What is answered to this."""
        said: list[bytes] = []
        ours, theirs = _connection()
        with ours, theirs, _beside(lambda: _say(theirs, data, said)):
            with contextlib.suppress(OSError):  # as who serves connections does
                Handler(ours, ("127.0.0.1", 1), self._service)
            with contextlib.suppress(OSError):
                ours.shutdown(socket.SHUT_RDWR)
        return said


class _Client:
    """Asks for a listing and for a file, and is answered with one input."""

    def __init__(self, desk: Desk) -> None:
        self._listener = socket.create_server(("127.0.0.1", 0))
        desk.afterwards(self._listener.close)
        address = parse_http_address(f"http://127.0.0.1:{self._listener.getsockname()[1]}/")
        self._client = HttpClient(address, _TOKEN, connect_s=5, read_s=5, at_once=1)

    def answered(self, data: bytes) -> object:
        """What the client makes of this answer."""
        with _beside(lambda: self._answer(data)):
            try:
                found: object = list(zip(range(3), self._client.listed("runs"), strict=False))
            finally:
                self._client.close()
        with _beside(lambda: self._answer(data)):
            try:
                with self._client.get("a", "it cannot be read") as content:
                    return found, b"".join(content.blocks())
            finally:
                self._client.close()

    def _answer(self, data: bytes) -> None:
        with self._listener.accept()[0] as guest, contextlib.suppress(OSError):
            guest.settimeout(5)
            asked = b""
            while not asked.endswith(b"\r\n\r\n"):
                if not (piece := guest.recv(65536)):  # it has hung up
                    return
                asked += piece
            guest.sendall(data)


def _connection() -> tuple[socket.socket, socket.socket]:
    with socket.create_server(("127.0.0.1", 0)) as listener:
        theirs = socket.create_connection(listener.getsockname())
        ours, _ = listener.accept()
    for one in (ours, theirs):
        one.settimeout(5)
    return ours, theirs


def _say(sock: socket.socket, data: bytes, said: list[bytes]) -> None:
    with contextlib.suppress(OSError):
        sock.sendall(data)
        sock.shutdown(socket.SHUT_WR)
    with contextlib.suppress(OSError):
        while piece := sock.recv(65536):
            said.append(piece)


@contextlib.contextmanager
def _beside(act: Callable[[], None]) -> Iterator[None]:
    thread = threading.Thread(target=act)
    thread.start()
    try:
        yield
    finally:
        thread.join()


def _request(method: str, target: str, body: bytes | str = b"", more: str = "") -> bytes:
    if isinstance(body, str):
        body, more = b"", body
    lines = [
        *(f"{method} {target} HTTP/1.1", "Host: 127.0.0.1", f"Authorization: Bearer {_TOKEN}"),
        f"Content-Length: {len(body)}",
        *filter(None, [more]),
    ]
    return "\r\n".join([*lines, "", ""]).encode() + body


def _answer(body: bytes, status: int = 200) -> bytes:
    head = f"HTTP/1.1 {status} X\r\n{http_wire.SERVER_HEADER}: {http_wire.VERSION}\r\n"
    return f"{head}Content-Length: {len(body)}\r\n\r\n".encode() + body
