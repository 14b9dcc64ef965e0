"""The forkservers of a node: one for each environment, started when it is first needed."""

from __future__ import annotations

import logging
import os
from functools import partial
from typing import Final, NamedTuple

from tunemq_shared.messages import Environment, HostOrder
from tunemq_workers.forkserver_client import ForkserverClient, ForkserverLost
from tunemq_workers.forkserver_messages import (
    FamilyGone,
    HostExited,
    HostForked,
    Preloading,
    Ready,
    Report,
    Warned,
)
from tunemq_workers.host_contracts import Link, Listener
from tunemq_workers.host_link import HostLink
from tunemq_workers.reactor import Reactor

#: Idle forkservers end within milliseconds; this is for one that is stuck.
_CLOSE_S: Final = 2.0

_log = logging.getLogger(__name__)


class _Hosted(NamedTuple):
    server: ForkserverClient
    listener: Listener


class ForkserverPool:
    """Starts hosts from the forkserver of their environment, and passes on what it says of them.

    Args:
        reactor: watches the forkservers' sockets.
        folder: for their logs.
        hostname: this machine's name, which trials report.
        node_ip: its address, likewise.
    """

    def __init__(self, reactor: Reactor, *, folder: str, hostname: str, node_ip: str) -> None:
        self._reactor = reactor
        self._folder, self._hostname, self._node_ip = folder, hostname, node_ip
        self._servers: list[ForkserverClient] = []
        self._hosted: dict[str, _Hosted] = {}
        self._started = 0
        self._why = ""

    def prewarm(self, environment: Environment) -> None:
        """Start a forkserver before it is needed.

        Raises:
            OSError: its interpreter cannot be started.
        """
        self._server_for(environment)

    def start(self, host: str, order: HostOrder, listener: Listener) -> Link:
        """Begin to fork a host for ``order``; see `Forkservers.start`."""
        assert order.start is not None  # the protocol says so
        server = self._server_for(order.start.environment)
        self._hosted[host] = _Hosted(server, listener)
        return HostLink(
            self._reactor,
            server.start(host, order),
            on_event=_nobody_listens,
            on_other=partial(listener.said, host),
            on_end=partial(listener.closed, host),
        )

    def term(self, host: str) -> None:
        """Send SIGTERM to the host's process group; one that is gone is ignored."""
        if hosted := self._hosted.get(host):
            hosted.server.term(host)

    def kill(self, host: str) -> None:
        """Kill the host's family; one that is gone is ignored."""
        if hosted := self._hosted.get(host):
            hosted.server.kill(host)

    def close(self) -> None:
        """End all forkservers, and with them all hosts."""
        for server in self._servers:
            self._reactor.unwatch(server)
            server.close(_CLOSE_S)
        self._servers.clear()

    def _server_for(self, environment: Environment) -> ForkserverClient:
        for server in self._servers:
            if server.environment == environment:
                return server
        self._close_idle()
        self._started += 1
        server = ForkserverClient(
            environment,
            log=os.path.join(self._folder, f"forkserver-{self._started}.log"),
            hostname=self._hostname,
            node_ip=self._node_ip,
        )
        _log.info("forkserver.started pid=%d preload=%s", server.pid, ",".join(environment.preload))
        self._servers.append(server)
        self._reactor.watch(server, partial(self._readable, server))
        return server

    def _close_idle(self) -> None:
        """Another environment is wanted now: those without hosts have had their day."""
        busy = {hosted.server for hosted in self._hosted.values()}
        for server in [server for server in self._servers if server not in busy]:
            self._reactor.unwatch(server)
            self._servers.remove(server)
            server.close(_CLOSE_S)

    def _readable(self, server: ForkserverClient, _events: int) -> None:
        try:
            reports = server.read()
        except ForkserverLost as lost:
            self._reactor.unwatch(server)
            self._servers.remove(server)
            self._why = str(lost)
            _log.error("forkserver.lost pid=%d problem=%r", server.pid, self._why)
            reports = lost.reports
        for report in reports:
            self._pass_on(report)

    def _pass_on(self, report: Report) -> None:
        match report:
            case HostForked(host, pid):
                self._hosted[host].listener.forked(host, pid)
            case HostExited(host, pid, signal, exit_code):
                listener = self._hosted[host].listener
                if pid is None and not listener.is_forked(host):
                    listener.not_started(host, self._why)
                else:
                    listener.exited(host, signal, exit_code)
            case FamilyGone(host):
                self._hosted.pop(host).listener.gone(host)
            case Warned(text):
                self._why = text
                _log.warning("forkserver.warned text=%r", text)
            case Preloading(module):
                _log.info("forkserver.preloading module=%s", module)
            case Ready(preloaded):
                _log.info("forkserver.ready preloaded=%s", ",".join(preloaded))


def _nobody_listens(_event: bytes) -> None:
    """Until `Hosts` has the link; the reactor cannot call before."""
