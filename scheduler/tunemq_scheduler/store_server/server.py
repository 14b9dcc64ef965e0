"""`StoreServer`: takes connections, each of which has a thread; `serve` is a process of its own."""

from __future__ import annotations

import contextlib
import errno
import ipaddress
import logging
import resource
import signal
import socket
import ssl
import threading
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from types import FrameType
from typing import Final

from tunemq_scheduler.store_server.guests import Guests
from tunemq_scheduler.store_server.handler import Handler, Service
from tunemq_scheduler.store_server.served_folder import ServedFolder
from tunemq_scheduler.store_server.stream import HEAD_S
from tunemq_scheduler.store_server.trusted_requests import TrustedRequests
from tunemq_scheduler.store_server.uploads import Uploads
from tunemq_shared.errors import ConfigError
from tunemq_shared.http_address import check_token

#: So many connections there may be, where the process may have four times as many open files.
MOST: Final = 1024
#: Seconds that requests may take that are under way when the server is to end.
_GRACE_S: Final = 2.0
_BACKLOG: Final = 256

_log = logging.getLogger(__name__)


class StoreServer:
    """Serves a folder from its making on; `run` answers.

    Args:
        listen: ``HOST:PORT``; no host for all of the machine's addresses, port 0 for any free one.
        token: what clients are let in with.
        most: so many connections there may be.
        tls: with the server's certificate; by default what is said is not encrypted.
        names: of the server; see `TrustedRequests`.

    Raises:
        ConfigError: the folder or the address cannot be used.
        StoreError: this is no token.
    """

    def __init__(
        self,
        folder: Path,
        listen: str,
        token: str,
        most: int = MOST,
        *,
        tls: ssl.SSLContext | None = None,
        names: Iterable[str] = (),
    ) -> None:
        host, port = parse_listen(listen)
        self._tls = tls
        trusted = TrustedRequests([*names, *([host] if host and ":" not in host else [])])
        check_token(token, "what clients are let in with")
        self._listener = listener(host, port)
        try:
            served = ServedFolder(folder)
        except ConfigError:
            self._listener.close()
            raise
        self._service = Service(served, Uploads(served), Guests(most), token, trusted)
        shown = host or socket.gethostname()
        #: Where clients find it.
        self.port: int = self._listener.getsockname()[1]
        #: Whether no other machine reaches it.
        self.is_on_loopback = ipaddress.ip_address(
            self._listener.getsockname()[0].partition("%")[0]
        ).is_loopback
        scheme = "http" if tls is None else "https"
        self.address = f"{scheme}://{f'[{shown}]' if ':' in shown else shown}:{self.port}"

    def run(self) -> None:
        """Answer until `stop` is called."""
        while True:
            try:
                connection, address = self._listener.accept()
            except OSError as error:
                if error.errno in (errno.EMFILE, errno.ENFILE, errno.ENOBUFS, errno.ENOMEM):
                    self._service.guests.make_room()
                    continue
                if error.errno == errno.ECONNABORTED:
                    continue
                break  # it was shut down
            self._take(connection, address)
        self._listener.close()
        self._service.guests.send_away(_GRACE_S)
        self._service.folder.close()

    def stop(self) -> None:
        """Have `run` return soon; for any thread, and for signal handlers."""
        with contextlib.suppress(OSError):
            self._listener.shutdown(socket.SHUT_RDWR)

    def _take(self, connection: socket.socket, address: object) -> None:
        if self._tls is not None:
            try:
                connection = self._tls.wrap_socket(
                    connection, server_side=True, do_handshake_on_connect=False
                )
            except OSError:  # it is gone already
                connection.close()
                return
        if not self._service.guests.admit(connection):
            connection.close()
            return
        thread = threading.Thread(target=self._serve, args=(connection, address), daemon=True)
        try:
            thread.start()
        except RuntimeError:  # the machine has no thread left
            self._leave(connection)

    def _serve(self, connection: socket.socket, address: object) -> None:
        try:
            if isinstance(connection, ssl.SSLSocket):
                connection.settimeout(HEAD_S)
                connection.do_handshake()
            Handler(connection, address, self._service)
        except OSError as error:  # it is gone, whatever it wanted
            _log.debug("a connection broke: %s", error)
        except Exception:  # noqa: BLE001  the log has it; the server goes on for all others
            _log.exception("a connection is given up")
        finally:
            self._leave(connection)

    def _leave(self, connection: socket.socket) -> None:
        self._service.guests.leave(connection)
        connection.close()


def serve(
    folder: Path,
    listen: str,
    token: str,
    *,
    tls: ssl.SSLContext | None = None,
    names: Iterable[str] = (),
    on_ready: Callable[[StoreServer], None] = lambda _server: None,
) -> None:
    """Serve a folder until SIGINT or SIGTERM; the main thread's business.

    Raises:
        ConfigError: the folder or the address cannot be used.
        StoreError: this is no token.
    """
    server = StoreServer(folder, listen, token, _connections(), tls=tls, names=names)
    with _stopped_by_signals(server):
        on_ready(server)
        server.run()


def tls_context(certificate: Path, key: Path) -> ssl.SSLContext:
    """What a server secures connections with.

    Raises:
        ConfigError: the files cannot be read, or do not belong together.
    """
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    try:
        context.load_cert_chain(certificate, key)
    except OSError as error:  # ssl's is one
        why = error.strerror if not isinstance(error, ssl.SSLError) else "they are no such pair"
        raise ConfigError(
            f"--tls-certificate {certificate} and --tls-key {key} cannot be used: {why}; give the "
            "server's certificate, with those that it was signed with behind it, and its key, "
            "both in PEM."
        ) from None
    return context


def parse_listen(text: str, option: str = "--listen") -> tuple[str, int]:
    """The host, empty for all of the machine's addresses, and the port.

    Raises:
        ConfigError: it is not ``HOST:PORT``.
    """
    host, colon, port = text.rpartition(":")
    is_bracketed = host.startswith("[") and host.endswith("]")
    if (
        not colon
        or not (port.isascii() and port.isdecimal() and int(port) < 2**16)
        or (":" in host and not is_bracketed)
    ):
        raise ConfigError(
            f"{option} {text!r} is not usable; give HOST:PORT, :PORT for all of this machine's "
            "addresses, or [::1]:PORT."
        )
    return (host[1:-1] if is_bracketed else host), int(port)


def listener(host: str, port: int, option: str = "--listen") -> socket.socket:
    """A socket that listens there.

    Raises:
        ConfigError: it cannot be; the option is named.
    """
    try:
        if not host and socket.has_dualstack_ipv6():
            with contextlib.suppress(OSError):  # IPv6 may be switched off
                return socket.create_server(
                    ("", port), family=socket.AF_INET6, backlog=_BACKLOG, dualstack_ipv6=True
                )
        (family, *_, address), *_ = socket.getaddrinfo(
            host or None, port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE
        )
        return socket.create_server(address[:2], family=family, backlog=_BACKLOG)
    except OSError as error:
        raise ConfigError(
            f"{option} {host}:{port} cannot be used: {error.strerror or error}; choose an address "
            "of this machine, and a port that is free."
        ) from error


def _connections() -> int:
    """How many connections this process may have, once it has all the files that it may open."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    wanted = 4 * MOST
    allowed = wanted if hard == resource.RLIM_INFINITY else min(wanted, hard)
    if soft == resource.RLIM_INFINITY:
        return MOST
    if soft < allowed:
        resource.setrlimit(resource.RLIMIT_NOFILE, (allowed, hard))
        soft = allowed
    return max(1, min(MOST, soft // 4))


@contextlib.contextmanager
def _stopped_by_signals(server: StoreServer) -> Iterator[None]:
    def stop(_number: int, _frame: FrameType | None) -> None:
        server.stop()

    before = {number: signal.signal(number, stop) for number in (signal.SIGINT, signal.SIGTERM)}
    try:
        yield
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)
