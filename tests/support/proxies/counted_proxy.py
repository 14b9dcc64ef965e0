"""A TCP proxy that counts the bytes that a program exchanges with a server."""

from __future__ import annotations

import re
import socket
import socketserver
import threading
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from typing import Final

#: The name of the keys in a request to S3.
_SIGNER: Final = re.compile(rb"Credential=([^/, ]+)/")


class CountedProxy(socketserver.ThreadingTCPServer):
    """Passes everything on to a port of this machine; counts the bytes of both directions."""

    daemon_threads = True
    request_queue_size = 128  # a busy machine accepts late, and whom it turns away waits a second

    def __init__(self, port: int) -> None:
        self.target = port
        #: Ids of the keys that have signed requests, if one piece of data shows the whole id.
        self.signers: set[str] = set()
        self._moved = 0
        self._counting = threading.Lock()
        super().__init__(("127.0.0.1", 0), _Connection)

    @property
    def moved(self) -> int:
        """How many bytes have passed since this was set to 0."""
        return self._moved

    @moved.setter
    def moved(self, number: int) -> None:
        with self._counting:
            self._moved = number

    def count(self, data: bytes) -> None:
        """Count a piece of data; the two threads of each connection call it."""
        with self._counting:
            self._moved += len(data)
            self.signers.update(one.decode() for one in _SIGNER.findall(data))

    @property
    def port(self) -> int:
        """Where it listens."""
        return int(self.server_address[1])


class _Connection(socketserver.BaseRequestHandler):
    server: CountedProxy

    def handle(self) -> None:
        with socket.create_connection(("127.0.0.1", self.server.target)) as there:
            back = threading.Thread(target=self._pass_on, args=(there, self.request), daemon=True)
            back.start()
            self._pass_on(self.request, there)
            back.join()

    def _pass_on(self, source: socket.socket, target: socket.socket) -> None:
        with suppress(OSError):  # either end may have gone
            while data := source.recv(65536):
                self.server.count(data)
                target.sendall(data)
        for end in (source, target):
            with suppress(OSError):
                end.shutdown(socket.SHUT_RDWR)


@contextmanager
def counted(port: int) -> Iterator[CountedProxy]:
    """A proxy to this port, while the context lasts."""
    with CountedProxy(port) as proxy:
        thread = threading.Thread(target=proxy.serve_forever, daemon=True)
        thread.start()
        try:
            yield proxy
        finally:
            proxy.shutdown()
            thread.join()
