"""`MetricsServer`: a farm's metrics over HTTP, for Prometheus.

Threads of their own answer from the newest `FarmSnapshot`: whatever a client does, the scheduler's
loop does not notice, nor do other clients. Pages of browsers are refused, as those are whose name
was made to lead here (DNS rebinding): see `TrustedRequests`.
"""

from __future__ import annotations

import contextlib
import importlib.util
import socket
import socketserver
import threading
from collections.abc import Iterable, Iterator
from http import HTTPStatus
from typing import TYPE_CHECKING, Any, Final
from wsgiref.simple_server import WSGIRequestHandler, WSGIServer

from tunemq_scheduler.farm.monitoring.farm_snapshot import FarmSnapshot
from tunemq_scheduler.farm.monitoring.listen_address import listener, parse_listen
from tunemq_scheduler.farm.monitoring.trusted_requests import TrustedRequests, UntrustedRequest
from tunemq_shared.base.errors import ConfigError

if TYPE_CHECKING:
    from prometheus_client.core import Metric

#: So long a client may take over its request and the answer together.
_TIMEOUT_S: Final = 5.0
#: So many clients are answered at once; who comes beyond that is hung up on.
_MOST_CLIENTS: Final = 64
_LIBRARY: Final = "prometheus_client"


class MetricsServer:
    """Serves metrics from its making on, until `close`.

    Args:
        listen: ``HOST:PORT``; no host for all of the machine's addresses, port 0 for any free one.
        names: of this server, beside those that `TrustedRequests` knows.

    Raises:
        ConfigError: the address cannot be used, or ``prometheus-client`` is not installed.
    """

    def __init__(self, listen: str, names: Iterable[str] = ()) -> None:
        if importlib.util.find_spec(_LIBRARY) is None:
            raise ConfigError(
                "--metrics needs prometheus-client, which is not installed:"
                " pip install 'prometheus-client>=0.22'"
            )
        from prometheus_client import CollectorRegistry, ProcessCollector, make_wsgi_app

        from tunemq_scheduler.farm.monitoring.prometheus_metrics import metrics_of

        self._metrics_of = metrics_of
        host, port = parse_listen(listen, "--metrics")
        trusted = TrustedRequests([*names, *([host] if host and ":" not in host else [])])
        self._server = server = _Server(listener(host, port, "--metrics"), trusted)
        self._newest: FarmSnapshot | None = None
        registry = CollectorRegistry()
        registry.register(self)
        ProcessCollector(registry=registry)
        server.set_app(make_wsgi_app(registry))
        shown = host or socket.gethostname()
        shown = f"[{shown}]" if ":" in shown else shown
        #: Where it is found.
        self.address = f"http://{shown}:{server.server_port}/metrics"
        self._thread = threading.Thread(target=server.serve_forever, name="metrics", daemon=True)
        self._thread.start()

    def close(self) -> None:
        """Serve no more."""
        self._server.shutdown()
        self._thread.join()
        self._server.server_close()

    def publish(self, newest: FarmSnapshot) -> None:
        """From now on this is how the farm is."""
        self._newest = newest

    def collect(self) -> Iterator[Metric]:
        """All metrics, for whoever asks."""
        newest = self._newest
        if newest is not None:
            yield from self._metrics_of(newest)


class _Handler(WSGIRequestHandler):
    timeout = _TIMEOUT_S
    server: _Server

    def handle(self) -> None:
        """Answer, and hang up on who drips: the base waits anew for each of its bytes."""
        deadline = threading.Timer(self.timeout, self._hang_up)
        deadline.daemon = True
        deadline.start()
        try:
            super().handle()
        finally:
            deadline.cancel()

    def parse_request(self) -> bool:
        """Whether it may be answered; if not, it was told so."""
        if not super().parse_request():
            return False
        try:
            self.server.trusted.check(self.command, self.headers)
        except UntrustedRequest as rejection:
            self.send_error(HTTPStatus.FORBIDDEN, explain=str(rejection))
            return False
        return True

    def _hang_up(self) -> None:
        with contextlib.suppress(OSError):
            self.connection.shutdown(socket.SHUT_RDWR)

    def log_message(self, *_: Any) -> None:
        """Nobody reads that."""


class _Server(socketserver.ThreadingMixIn, WSGIServer):
    """On a socket that listens already: binding one, the base would ask for the host's name."""

    daemon_threads = True

    def __init__(self, listening: socket.socket, trusted: TrustedRequests) -> None:
        self.trusted = trusted
        socketserver.BaseServer.__init__(self, listening.getsockname(), _Handler)
        self.socket = listening
        self.server_name, self.server_port = "", listening.getsockname()[1]
        self.setup_environ()
        self._places = threading.BoundedSemaphore(_MOST_CLIENTS)

    def process_request(self, request: Any, client_address: Any) -> None:
        """Answer it in a thread of its own, where there is a place for one more."""
        if self._places.acquire(blocking=False):
            super().process_request(request, client_address)
        else:
            self.shutdown_request(request)

    def process_request_thread(self, request: Any, client_address: Any) -> None:
        """Answer it."""
        try:
            super().process_request_thread(request, client_address)
        finally:
            self._places.release()

    def handle_error(self, *_: Any) -> None:
        """A client that is gone before it was answered is nobody's trouble."""
