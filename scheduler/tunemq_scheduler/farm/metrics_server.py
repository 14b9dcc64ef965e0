"""`MetricsServer`: a farm's metrics over HTTP, for Prometheus.

A thread of its own answers, one client after the other, from the newest `FarmSnapshot`: whatever a
client does, the scheduler's loop does not notice.
"""

from __future__ import annotations

import importlib.util
import socket
import socketserver
import threading
from collections.abc import Iterator
from typing import TYPE_CHECKING, Any, Final
from wsgiref.simple_server import WSGIRequestHandler, WSGIServer

from tunemq_scheduler.farm.snapshot import FarmSnapshot
from tunemq_scheduler.store_server.server import listener, parse_listen
from tunemq_shared.errors import ConfigError

if TYPE_CHECKING:
    from prometheus_client.core import Metric

#: So long a client may take over its request, and over each piece of the answer.
_PATIENCE_S: Final = 5.0
_LIBRARY: Final = "prometheus_client"


class MetricsServer:
    """Serves metrics from its making on, until `close`.

    Args:
        listen: ``HOST:PORT``; no host for all of the machine's addresses, port 0 for any free one.

    Raises:
        ConfigError: the address cannot be used, or ``prometheus-client`` is not installed.
    """

    def __init__(self, listen: str) -> None:
        if importlib.util.find_spec(_LIBRARY) is None:
            raise ConfigError(
                "--metrics needs prometheus-client, which is not installed:"
                " pip install 'prometheus-client>=0.22'"
            )
        from prometheus_client import CollectorRegistry, ProcessCollector, make_wsgi_app

        from tunemq_scheduler.farm.metrics import metrics_of

        self._metrics_of = metrics_of
        host, port = parse_listen(listen, "--metrics")
        self._server = server = _Server(listener(host, port, "--metrics"))
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
    timeout = _PATIENCE_S

    def log_message(self, *_: Any) -> None:
        """Nobody reads that."""


class _Server(WSGIServer):
    """On a socket that listens already: binding one, the base would ask for the host's name."""

    def __init__(self, listening: socket.socket) -> None:
        socketserver.BaseServer.__init__(self, listening.getsockname(), _Handler)
        self.socket = listening
        self.server_name, self.server_port = "", listening.getsockname()[1]
        self.setup_environ()

    def handle_error(self, *_: Any) -> None:
        """A client that is gone before it was answered is nobody's trouble."""
