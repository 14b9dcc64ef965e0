"""Connections to a served folder on which a test may say anything.

A test module imports the fixtures that it uses and names them in its ``__all__``.
"""

from __future__ import annotations

import contextlib
import hashlib
import socket
from collections.abc import Callable, Iterator

import pytest

from tests.served_folders import FolderServer


class Raw:
    """A connection on which anything can be said."""

    def __init__(self, server: FolderServer) -> None:
        self.socket = socket.create_connection((server.host, server.port), timeout=60)
        self.token = server.token

    def ask(self, text: str, body: bytes = b"", token: str | None = None) -> tuple[int, bytes]:
        """Send the head of a request, with the token, and a body; the answer."""
        given = self.token if token is None else token
        self.socket.sendall(whole(text, given).encode("latin-1") + body)
        return self.answer(has_body=not text.startswith("HEAD"))

    def answer(self, *, has_body: bool = True) -> tuple[int, bytes]:
        head = b""
        while not head.endswith(b"\r\n\r\n"):
            piece = self.socket.recv(1)
            if not piece:
                raise ConnectionError(head)
            head += piece
        lines = head.decode().splitlines()
        length = next(int(line[16:]) for line in lines if line.startswith("Content-Length: "))
        body = b""
        while has_body and len(body) < length:
            piece = self.socket.recv(length - len(body))
            if not piece:
                raise ConnectionError(body)
            body += piece
        return int(lines[0].split()[1]), body

    def is_closed(self) -> bool:
        try:
            return self.socket.recv(1) == b""
        except ConnectionError:
            return True


@pytest.fixture
def connect() -> Iterator[Callable[[FolderServer], Raw]]:
    with contextlib.ExitStack() as opened:

        def connect(server: FolderServer) -> Raw:
            raw = Raw(server)
            opened.enter_context(raw.socket)
            return raw

        yield connect


@pytest.fixture
def raw(connect, shared_served: FolderServer) -> Raw:
    return connect(shared_served)


def whole(text: str, token: str) -> str:
    """The head of a request of a client of ours, which begins with this."""
    return f"{text}\r\nHost: 127.0.0.1\r\nAuthorization: Bearer {token}\r\n\r\n"


def writing(key: str, data: bytes, sha256: str = "", length: int | None = None) -> str:
    """The head of a request to write an object."""
    return (
        f"PUT /{key} HTTP/1.1\r\nContent-Length: {len(data) if length is None else length}\r\n"
        f"X-TuneMQ-SHA256: {sha256 or hashlib.sha256(data).hexdigest()}"
    )
