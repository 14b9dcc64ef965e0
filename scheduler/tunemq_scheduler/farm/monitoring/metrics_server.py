"""`MetricsServer`: serves a farm's metrics over HTTP, for Prometheus.

Separate threads answer from the newest `FarmSnapshot`, so no client can affect the scheduler's loop
or other clients. Requests of web pages are rejected, including pages whose name was made to resolve
to this server (DNS rebinding): see `TrustedRequests`.
"""

from __future__ import annotations

import contextlib
import importlib.util
import socket
import socketserver
import threading
from collections.abc import Iterable, Iterator
from http import HTTPStatus
from operator import itemgetter
from typing import TYPE_CHECKING, Any, Final
from wsgiref.simple_server import WSGIRequestHandler, WSGIServer

from tunemq_scheduler.farm.monitoring.listen_address import listener, parse_listen
from tunemq_scheduler.farm.monitoring.metrics_snapshot import FarmSnapshot
from tunemq_scheduler.farm.monitoring.trusted_requests import TrustedRequests, UntrustedRequest
from tunemq_shared.base.errors import ConfigError

if TYPE_CHECKING:
    from prometheus_client.core import Metric

#: The limit for a client's request and the answer together.
_TIMEOUT_S: Final = 5.0
#: The most clients to answer at once; a further one replaces another.
_MOST_CLIENTS: Final = 64
#: Threads of disconnected clients end within milliseconds.
_ENDS_WITHIN_S: Final = 1.0
_LIBRARY: Final = "prometheus_client"


class MetricsServer:
    """Serves metrics from its creation until `close`.

    Args:
        listen: ``HOST:PORT``; no host for all of the machine's addresses, port 0 for any free one.
        names: further names of this server; see `TrustedRequests`.

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
        #: The URL of the metrics.
        self.address = f"http://{shown}:{server.server_port}/metrics"
        self._thread = threading.Thread(target=server.serve_forever, name="metrics", daemon=True)
        self._thread.start()

    def close(self) -> None:
        """Stop serving."""
        self._server.shutdown()
        self._thread.join()
        self._server.server_close()

    def publish(self, newest: FarmSnapshot) -> None:
        """Set the snapshot to serve; before the first one, requests are answered by 503."""
        self._newest = newest
        self._server.has_metrics = True

    def collect(self) -> Iterator[Metric]:
        """Yield all metrics; called by the Prometheus client."""
        newest = self._newest
        if newest is not None:
            yield from self._metrics_of(newest)


class _Handler(WSGIRequestHandler):
    timeout = _TIMEOUT_S
    server: _Server

    def handle(self) -> None:
        """Answer, and disconnect slow clients: the base class restarts its timeout per byte."""
        deadline = threading.Timer(self.timeout, self._hang_up)
        deadline.daemon = True
        deadline.start()
        try:
            super().handle()
        finally:
            deadline.cancel()

    def parse_request(self) -> bool:
        """Return whether the request may be answered; if not, send the reason."""
        if not super().parse_request():
            return False
        try:
            self.server.trusted.check(self.command, self.headers)
        except UntrustedRequest as rejection:
            self.send_error(HTTPStatus.FORBIDDEN, explain=str(rejection))
            return False
        if not self.server.has_metrics:
            self.send_error(HTTPStatus.SERVICE_UNAVAILABLE, explain="the scheduler begins")
            return False
        self.server.has_asked[self.connection] = True
        return True

    def _hang_up(self) -> None:
        _disconnect(self.connection)

    def log_message(self, *_: Any) -> None:
        """Log nothing."""


class _Server(socketserver.ThreadingMixIn, WSGIServer):
    """A server on an open socket; the base class would resolve the host's name to bind one."""

    daemon_threads = True

    def __init__(self, listening: socket.socket, trusted: TrustedRequests) -> None:
        self.trusted = trusted
        #: Whether there is something to serve. Prometheus takes an answer without it for health.
        self.has_metrics = False
        socketserver.BaseServer.__init__(self, listening.getsockname(), _Handler)
        self.socket = listening
        self.server_name, self.server_port = "", listening.getsockname()[1]
        self.setup_environ()
        self._places = threading.BoundedSemaphore(_MOST_CLIENTS)
        #: Whether a client has sent its request, for each connection, the oldest first.
        self.has_asked: dict[socket.socket, bool] = {}

    def process_request(self, request: Any, client_address: Any) -> None:
        """Answer in a new thread; if there are too many, first disconnect an older client."""
        if not self._places.acquire(blocking=False):
            # A copy: threads that end remove theirs. A false value precedes a true one, and of
            # equal ones `min` takes the oldest.
            clients = list(self.has_asked.items())
            if clients:
                _disconnect(min(clients, key=itemgetter(1))[0])
            if not self._places.acquire(timeout=_ENDS_WITHIN_S):
                self.shutdown_request(request)
                return
        self.has_asked[request] = False
        super().process_request(request, client_address)

    def process_request_thread(self, request: Any, client_address: Any) -> None:
        """Answer the request."""
        try:
            super().process_request_thread(request, client_address)
        finally:
            del self.has_asked[request]
            self._places.release()

    def handle_error(self, *_: Any) -> None:
        """Ignore a client that disconnects before its answer."""


def _disconnect(client: socket.socket) -> None:
    with contextlib.suppress(OSError):
        client.shutdown(socket.SHUT_RDWR)
