"""A proxy for an HTTP server that changes the time in ``Date``, like a wrong clock."""

from __future__ import annotations

import contextlib
import email.utils
import re
import socket
import socketserver
import threading
import time
from collections.abc import Iterator

_DATE = re.compile(rb"(?m)^Date: [^\r\n]{29}\r$")


class LateProxy(socketserver.ThreadingTCPServer):
    """Passes everything on to a port of this machine.

    Args:
        port: the server's.
        ahead_s: so far the server's clock is ahead.
    """

    daemon_threads = True

    def __init__(self, port: int, ahead_s: float) -> None:
        self.target, self.ahead_s = port, ahead_s
        super().__init__(("127.0.0.1", 0), _Connection)

    @property
    def url(self) -> str:
        """Where it listens."""
        return f"http://127.0.0.1:{self.server_address[1]}"


class _Connection(socketserver.BaseRequestHandler):
    server: LateProxy

    def handle(self) -> None:
        with socket.create_connection(("127.0.0.1", self.server.target)) as there:
            back = threading.Thread(
                target=self._pass_on, args=(there, self.request, self._shifted), daemon=True
            )
            back.start()
            self._pass_on(self.request, there, bytes)
            back.join()

    def _shifted(self, data: bytes) -> bytes:
        said = email.utils.formatdate(time.time() + self.server.ahead_s, usegmt=True)
        return _DATE.sub(f"Date: {said}\r".encode(), data)

    @staticmethod
    def _pass_on(source: socket.socket, target: socket.socket, change) -> None:
        with contextlib.suppress(OSError):  # either end may have gone
            while data := source.recv(65536):
                target.sendall(change(data))
        with contextlib.suppress(OSError):
            target.shutdown(socket.SHUT_WR)


@contextlib.contextmanager
def late_proxy(port: int, ahead_s: float) -> Iterator[LateProxy]:
    """Start a `LateProxy` in a thread; stop it at the end."""
    with LateProxy(port, ahead_s) as proxy:
        thread = threading.Thread(target=proxy.serve_forever, args=(0.05,), daemon=True)
        thread.start()
        try:
            yield proxy
        finally:
            proxy.shutdown()
            thread.join()
