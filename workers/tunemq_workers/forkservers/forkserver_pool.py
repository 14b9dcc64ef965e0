"""The forkservers of a node: one for each environment, started when it is first needed."""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterable
from functools import partial
from typing import Final, NamedTuple

from tunemq_shared.protocol.messages import Environment, TrialOrder
from tunemq_shared.system.stopped_process import POLL_INTERVAL_S
from tunemq_workers.forkservers.forkserver_client import ForkserverClient, ForkserverLost
from tunemq_workers.processes.forkserver_messages import (
    ForkserverPong,
    ForkserverReady,
    ForkserverReport,
    ForkserverWarned,
    PreloadBegan,
    ProcessExited,
    ProcessForked,
    ProcessTreeGone,
)
from tunemq_workers.processes.memory_groups import MemoryCgroups
from tunemq_workers.processes.orphans import OrphanReaper
from tunemq_workers.runtime.frame_connection import FrameConnection
from tunemq_workers.runtime.reactor import Reactor, Timer
from tunemq_workers.runtime.trial_process_interfaces import TrialConnection, TrialProcessListener
from tunemq_workers.system.trial_user import UserAccount
from tunemq_workers.work_folder import forkserver_log

#: Idle forkservers end within milliseconds; this is for one that is stuck.
_CLOSE_S: Final = 2.0
#: So many different warnings of one forkserver are logged and reach people.
_WARNINGS: Final = 20

_log = logging.getLogger(__name__)

#: Bytes that may wait for a trial's process that does not read: hundreds of orders and answers.
_MOST_UNSENT: Final = 2**20


class _PooledProcess(NamedTuple):
    server: ForkserverClient
    listener: TrialProcessListener
    events_key: str


class _Warnings:
    """What a forkserver has warned of: each experiment that it hosts trials of is told it once.

    A forkserver may warn before it is used, and outlive the experiment that it was started for.
    """

    def __init__(self) -> None:
        self._texts: list[str] = []
        self._told: dict[str, int] = {}

    def add(self, text: str) -> None:
        """There is one more; another one than before is logged."""
        if text not in self._texts and len(self._texts) < _WARNINGS:
            self._texts.append(text)
            _log.warning("forkserver.warned text=%r", text)

    def notices(self, events_key: str) -> list[str]:
        """What this experiment was not told yet."""
        told = self._told.get(events_key, 0)
        if told < len(self._texts):
            self._told[events_key] = len(self._texts)
        return self._texts[told:]


class ForkserverPool:
    """Starts hosts from the forkserver of their environment, and passes on what it says of them.

    Args:
        reactor: watches the forkservers' sockets.
        children: the pids of the node's own children; the forkservers' are kept there.
        folder: for their logs.
        hostname: this machine's name, which trials report.
        node_ip: its address, likewise.
        has_gpus: whether the devices that trials are given are GPUs that this node knows; else
            trials see what there is.
        account: whom trials run as; by default the node's own user.
        groups: limit the memory of hosts; by default nothing here does.
    """

    def __init__(
        self,
        reactor: Reactor,
        children: set[int],
        *,
        folder: str,
        hostname: str,
        node_ip: str,
        has_gpus: bool = False,
        account: UserAccount | None = None,
        groups: MemoryCgroups | None = None,
    ) -> None:
        #: Takes (events stream, text).
        self.on_warning: Callable[[str, str], object] = _nobody_is_told
        self._reactor, self._children = reactor, children
        self._orphans = OrphanReaper(reactor, children)
        self._folder, self._hostname, self._node_ip = folder, hostname, node_ip
        self._has_gpus, self._account = has_gpus, account
        self._groups = groups
        self._servers: dict[ForkserverClient, _Warnings] = {}
        self._running: dict[str, _PooledProcess] = {}
        self._started = 0
        self._why = ""
        self._look: Timer | None = None

    def prewarm(self, environment: Environment) -> None:
        """Start a forkserver before it is needed.

        Raises:
            OSError: its interpreter cannot be started.
        """
        self._server_for(environment)

    def start(
        self, process: str, order: TrialOrder, listener: TrialProcessListener
    ) -> TrialConnection:
        """Begin to fork a host for ``order``; see `Forkservers.start`."""
        assert order.start is not None  # the protocol says so
        server = self._server_for(order.start.environment)
        gpus = tuple(order.start.devices) if self._has_gpus else ()
        limit, gate = order.start.limits.memory, None
        if limit and self._groups is not None:
            gate = self._groups.begin(process, limit)
        try:
            connection = server.start(process, order, gpus, gate)
        except OSError:
            self._leave_group(process)
            raise
        self._running[process] = _PooledProcess(server, listener, order.start.events_key)
        self._warn(self._servers[server], [order.start.events_key])
        return FrameConnection(
            self._reactor,
            connection,
            on_other=partial(listener.said, process),
            on_end=partial(listener.closed, process),
            most_unsent=_MOST_UNSENT,
        )

    def term(self, process: str) -> None:
        """Send SIGTERM to the host's process group; one that is gone is ignored."""
        if running := self._running.get(process):
            running.server.term(process)

    def kill(self, process: str) -> None:
        """Kill the host's family; one that is gone is ignored."""
        if running := self._running.get(process):
            running.server.kill(process)

    def dump(self, process: str) -> None:
        """Have the host write the stacks of its threads to its log; one that is gone is ignored."""
        if running := self._running.get(process):
            running.server.dump(process)

    def held_at_kill(self, process: str) -> int:
        """See `Forkservers.held_at_kill`."""
        return 0 if self._groups is None else self._groups.held_at_kill(process)

    def close(self) -> None:
        """End all forkservers, and with them all hosts."""
        for server in list(self._servers):
            self._close(server)
        if self._groups is not None:
            self._groups.close()

    def _leave_group(self, process: str) -> None:
        if self._groups is not None:
            self._groups.leave(process)

    def _server_for(self, environment: Environment) -> ForkserverClient:
        for server in self._servers:
            if server.environment == environment:
                return server
        self._close_idle()
        self._started += 1
        server = ForkserverClient(
            environment,
            log=forkserver_log(self._folder, self._started),
            hostname=self._hostname,
            node_ip=self._node_ip,
            account=self._account,
        )
        _log.info("forkserver.started pid=%d preload=%s", server.pid, ",".join(environment.preload))
        self._servers[server] = _Warnings()
        self._children.add(server.pid)
        self._reactor.watch(server, partial(self._readable, server))
        if self._look is None:
            self._look = self._reactor.after(POLL_INTERVAL_S, self._look_at_all)
        return server

    def _look_at_all(self) -> None:
        for server in list(self._servers):
            try:
                warning = server.look()
            except ForkserverLost as lost:
                self._lost(server, lost)
                continue
            if warning:
                self._pass_on(server, self._servers[server], ForkserverWarned(warning))
        self._look = (
            self._reactor.after(POLL_INTERVAL_S, self._look_at_all) if self._servers else None
        )

    def _close_idle(self) -> None:
        """Another environment is wanted now: those without hosts have had their day."""
        busy = {running.server for running in self._running.values()}
        for server in [server for server in self._servers if server not in busy]:
            self._close(server)

    def _close(self, server: ForkserverClient) -> None:
        self._reactor.unwatch(server)
        del self._servers[server]
        server.close(_CLOSE_S)
        self._children.discard(server.pid)

    def _readable(self, server: ForkserverClient, _events: int) -> None:
        # What comes of a report may close this forkserver.
        warnings = self._servers[server]
        try:
            reports = server.read()
        except ForkserverLost as lost:
            self._lost(server, lost)
            return
        for report in reports:
            self._pass_on(server, warnings, report)

    def _lost(self, server: ForkserverClient, lost: ForkserverLost) -> None:
        """A forkserver is dead: its hosts are gone when what they left is gone."""
        self._reactor.unwatch(server)
        # What is started because of its reports is started from another one.
        warnings = self._servers.pop(server)
        self._why = str(lost)
        _log.error("forkserver.lost pid=%d problem=%r", server.pid, self._why)
        for report in lost.reports:
            self._pass_on(server, warnings, report)
        for process in lost.unended:
            listener = self._running[process].listener
            if lost.is_unusable:
                listener.not_started(process, str(lost))
            else:
                listener.lost(process, str(lost))
        listeners = {process: self._running.pop(process).listener for process in lost.processes}
        self._children.discard(server.pid)
        self._orphans.sweep(partial(self._say_gone, listeners))

    def _warn(self, warnings: _Warnings, events_keys: Iterable[str]) -> None:
        for events_key in events_keys:
            for text in warnings.notices(events_key):
                self.on_warning(events_key, text)

    def _pass_on(
        self, server: ForkserverClient, warnings: _Warnings, report: ForkserverReport
    ) -> None:
        match report:
            case ProcessForked(process, pid):
                if self._groups is not None:
                    # What a dead forkserver said last moves no process.
                    is_alive = server in self._servers
                    self._groups.enter(process, server.process_of(process) if is_alive else None)
                self._running[process].listener.forked(process, pid)
            case ProcessExited(process, None):
                self._running[process].listener.not_started(process, self._why)
            case ProcessExited(process, _, signal, exit_code):
                self._running[process].listener.exited(process, signal, exit_code)
            case ProcessTreeGone(process):
                self._leave_group(process)
                self._running.pop(process).listener.gone(process)
            case ForkserverWarned(text):
                self._why = text
                warnings.add(text)
                running = self._running.values()
                self._warn(warnings, {one.events_key for one in running if one.server is server})
            case PreloadBegan(module):
                _log.info("forkserver.preloading module=%r", module)
            case ForkserverReady(preloaded):
                _log.info("forkserver.ready preloaded=%r", ",".join(preloaded))
            case ForkserverPong():
                pass

    def _say_gone(self, listeners: dict[str, TrialProcessListener]) -> None:
        for process, listener in listeners.items():
            self._leave_group(process)
            listener.gone(process)


def _nobody_is_told(_events_key: str, _text: str) -> None:
    """Until the node's loop has said whom to tell."""
