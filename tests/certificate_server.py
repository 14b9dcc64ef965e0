"""A server that shows a certificate and says nothing more."""

from __future__ import annotations

import socket
import ssl
import threading
from collections.abc import Iterator
from contextlib import contextmanager, suppress

from tests.support.stores.object_servers import Certificate


@contextmanager
def showing(certificate: Certificate) -> Iterator[int]:
    """Show it to all who connect; gives the port."""
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    context.load_cert_chain(certificate.file, certificate.folder / "private.key")
    with socket.create_server(("127.0.0.1", 0)) as listening:

        def serve() -> None:
            with suppress(OSError):
                while True:
                    guest, _ = listening.accept()
                    with (
                        suppress(OSError),
                        guest,
                        context.wrap_socket(guest, server_side=True) as it,
                    ):
                        it.recv(1)

        thread = threading.Thread(target=serve)
        thread.start()
        yield listening.getsockname()[1]
        listening.shutdown(socket.SHUT_RDWR)
        thread.join()
