"""`Connections`: kept connections to one HTTP server. The only module that imports ``http.client``.

The standard library's client does: one server of ours, requests of known length, no redirects, no
proxies, no cookies. What it lacks, connections that are kept for the next request, is here.
"""

from __future__ import annotations

import contextlib
import http.client
import queue
import select
import ssl
import weakref
from collections.abc import Iterator, Mapping
from hashlib import sha256 as new_sha256
from typing import Final
from urllib.parse import urlsplit

from tunemq_shared.http_address import HttpAddress
from tunemq_shared.parts import Body

#: Handed to a connection at once, and taken from it; in between a transfer can be called off.
BLOCK: Final = 2**18

#: What these raise where a server does not speak HTTP.
NoHttp = http.client.HTTPException
Response = http.client.HTTPResponse


class Exchange:
    """A request that was sent, and its answer; `close` it when that is read, or not wanted."""

    def __init__(
        self,
        connections: Connections,
        connection: http.client.HTTPConnection,
        response: Response,
        *,
        is_sent: bool,
    ) -> None:
        self.response = response
        self._connections = connections
        self._connection = connection
        self._is_sent = is_sent

    def close(self) -> None:
        """Keep the connection for the next request, if it can be."""
        if self._is_sent and self.response.isclosed() and not self.response.will_close:
            self._connections.keep(self._connection)
        else:
            self._connection.close()


class Connections:
    """Connections to one server.

    **Threads.** Any may call anything.

    Args:
        connect_s: Seconds to connect.
        read_s: Seconds to send one block, and until the next bytes of an answer.
        at_once: So many connections are kept.

    Raises:
        ssl.SSLError, OSError: the certificates cannot be read.
    """

    def __init__(
        self, address: HttpAddress, *, connect_s: float, read_s: float, at_once: int
    ) -> None:
        parts = urlsplit(address.endpoint)
        self._host, self._port = parts.hostname or "", parts.port
        self._connect_s, self._read_s = connect_s, read_s
        self._kept: queue.LifoQueue[http.client.HTTPConnection] = queue.LifoQueue(at_once)
        # Who forgets to close this leaves nothing open, either.
        weakref.finalize(self, _close_all, self._kept).atexit = False
        self._trust = None
        if parts.scheme == "https":
            self._trust = ssl.create_default_context(cafile=address.ca_file or None)

    def ask(
        self, method: str, target: str, headers: Mapping[str, str], body: bytes | Body | None
    ) -> Exchange:
        """Send a request and wait for the beginning of its answer.

        Raises:
            OSError: the server cannot be reached, or does not answer.
            NoHttp: what it answers is no HTTP.
        """
        while (kept := self._take()) is not None:
            try:
                return self._ask(kept, method, target, headers, body)
            except ConnectionError:
                kept.close()  # the server had closed it; all that is asked may be asked twice
            except BaseException:
                kept.close()
                raise
        connection = self._new()
        try:
            return self._ask(connection, method, target, headers, body)
        except BaseException:
            connection.close()
            raise

    def keep(self, connection: http.client.HTTPConnection) -> None:
        """Keep a connection for the next request."""
        try:
            self._kept.put_nowait(connection)
        except queue.Full:
            connection.close()

    def close(self) -> None:
        """Close what is not in use."""
        _close_all(self._kept)

    def _take(self) -> http.client.HTTPConnection | None:
        """A kept connection that the server has not closed yet, as far as one can see."""
        while True:
            try:
                kept = self._kept.get_nowait()
            except queue.Empty:
                return None
            if kept.sock is not None and not _is_readable(kept.sock.fileno()):
                return kept
            kept.close()

    def _new(self) -> http.client.HTTPConnection:
        if self._trust is None:
            return http.client.HTTPConnection(self._host, self._port, timeout=self._connect_s)
        return http.client.HTTPSConnection(
            self._host, self._port, timeout=self._connect_s, context=self._trust
        )

    def _ask(
        self,
        connection: http.client.HTTPConnection,
        method: str,
        target: str,
        headers: Mapping[str, str],
        body: bytes | Body | None,
    ) -> Exchange:
        if connection.sock is None:
            connection.connect()
        connection.sock.settimeout(self._read_s)
        connection.putrequest(method, target, skip_accept_encoding=True)
        for name, value in headers.items():
            connection.putheader(name, value)
        if body is not None:
            connection.putheader("Content-Length", str(len(body)))
        try:
            connection.endheaders()
            for block in _blocks(body):
                connection.send(block)
            is_sent = True
        except (BrokenPipeError, ConnectionResetError):
            # A server that refuses a request does not wait for its end: it may have said why.
            is_sent = False
        return Exchange(self, connection, connection.getresponse(), is_sent=is_sent)


def _close_all(kept: queue.LifoQueue[http.client.HTTPConnection]) -> None:
    with contextlib.suppress(queue.Empty):
        while True:
            kept.get_nowait().close()


def hash_of(body: bytes | Body) -> str:
    """The SHA-256 of what is to be sent, which is first held against the one that it must have."""
    found = new_sha256(body).hexdigest()
    if isinstance(body, Body):
        body.check(found)
    return found


def _blocks(body: bytes | Body | None) -> Iterator[bytes | memoryview]:
    if isinstance(body, Body):
        body.rewound()
        while piece := body.read(BLOCK):
            yield piece
    elif body:
        for start in range(0, len(body), BLOCK):
            yield body[start : start + BLOCK]


def _is_readable(fd: int) -> bool:
    """Whether the other side has closed the connection, or says what nobody asked for."""
    poll = select.poll()
    poll.register(fd, select.POLLIN)
    return bool(poll.poll(0))
