"""`ForkserverPool`: the forkservers of a node, one for each environment, started when needed."""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Collection, Iterable
from functools import partial
from signal import SIGKILL
from typing import Final, NamedTuple

from tunemq_shared.protocol.messages import Environment, TrialOrder
from tunemq_shared.system.stopped_process import POLL_INTERVAL_S
from tunemq_workers.forkservers.forkserver_client import ForkserverClient, ForkserverLost
from tunemq_workers.processes import forkserver_messages as messages
from tunemq_workers.processes.killed_trees import stuck_text
from tunemq_workers.processes.memory_groups import MemoryCgroups
from tunemq_workers.processes.orphans import OrphanReaper
from tunemq_workers.runtime.frame_connection import FrameConnection
from tunemq_workers.runtime.frames import MAX_FROM_TRIAL_BYTES
from tunemq_workers.runtime.reactor import Reactor, Timer, do_nothing
from tunemq_workers.runtime.trial_process_state import TrialProcessListener
from tunemq_workers.system.trial_user import UserAccount
from tunemq_workers.work_folder import forkserver_log

#: For a forkserver that hangs; an idle one exits within milliseconds.
_CLOSE_S: Final = 2.0
#: Between two looks whether it has exited.
_LOOK_S: Final = 0.02
#: The most different warnings of one forkserver that are logged and sent to users.
_WARNINGS: Final = 20

_log = logging.getLogger(__name__)

#: The most unsent bytes for a trial process that does not read: hundreds of orders and answers.
_MOST_UNSENT: Final = 2**20


class _PooledProcess(NamedTuple):
    server: ForkserverClient
    listener: TrialProcessListener
    events_key: str


class _Warnings:
    """The warnings of a forkserver; each experiment that uses it gets each of them once.

    A forkserver may warn before it is used, and outlive the experiment that it was started for.
    """

    def __init__(self) -> None:
        self._texts: list[str] = []
        self._told: dict[str, int] = {}

    def add(self, text: str) -> None:
        """Add and log a warning, if it is new."""
        if text not in self._texts and len(self._texts) < _WARNINGS:
            self._texts.append(text)
            _log.warning("forkserver.warned text=%r", text)

    def notices(self, events_key: str) -> list[str]:
        """Return the warnings that this experiment has not received yet."""
        told = self._told.get(events_key, 0)
        if told < len(self._texts):
            self._told[events_key] = len(self._texts)
        return self._texts[told:]


class ForkserverPool:
    """Starts trial processes in the forkserver of their environment, and passes on its reports.

    Args:
        reactor: watches the forkservers' sockets.
        children: the pids of the node's child processes; this pool adds the forkservers'.
        folder: for the forkservers' logs.
        hostname: this machine's name, which trials report.
        node_ip: this machine's address, which trials report.
        groups: the control groups that limit the memory of trials.
        has_gpus: whether trials get GPUs that this node knows by UUID; otherwise they see all.
        account: the user that trials run as; by default the node's own user.
    """

    def __init__(
        self,
        reactor: Reactor,
        children: set[int],
        *,
        folder: str,
        hostname: str,
        node_ip: str,
        groups: MemoryCgroups,
        has_gpus: bool = False,
        account: UserAccount | None = None,
    ) -> None:
        #: Called with (events stream, text).
        self.on_warning: Callable[[str, str], object] = do_nothing
        self._reactor, self._children = reactor, children
        self._orphans = OrphanReaper(reactor, children)
        self._folder, self._hostname, self._node_ip = folder, hostname, node_ip
        self._has_gpus, self._account = has_gpus, account
        self._groups = groups
        self._servers: dict[ForkserverClient, _Warnings] = {}
        #: Those that end; a preloaded module or a trial may delay that.
        self._leaving: set[ForkserverClient] = set()
        self._running: dict[str, _PooledProcess] = {}
        self._started = 0
        self._why = ""
        self._look: Timer | None = None

    def prewarm(self, environment: Environment) -> None:
        """Start a forkserver before it is needed."""
        try:
            self._server_for(environment)
        except OSError as problem:  # the first trial that needs it reports the error
            _log.error("forkserver.not_prewarmed problem=%r", str(problem))

    def start(
        self, process: str, order: TrialOrder, listener: TrialProcessListener
    ) -> FrameConnection:
        """Begin to fork a trial process for ``order``, whose ``start`` is set.

        ``listener`` is called about it, but only after this has returned.

        Raises:
            OSError: the environment has no forkserver and none can be started.
        """
        assert order.start is not None  # the protocol guarantees it
        server = self._server_for(order.start.environment)
        gpus = tuple(order.start.devices) if self._has_gpus else ()
        limit, gate = order.start.limits.memory, None
        if limit:
            gate = self._groups.begin(process, limit)
        try:
            connection = server.start(process, order, gpus, gate)
        except OSError:
            self._groups.leave(process)
            raise
        self._running[process] = _PooledProcess(server, listener, order.start.events_key)
        self._warn(self._servers[server], [order.start.events_key])
        return FrameConnection(
            self._reactor,
            connection,
            on_other=partial(listener.said, process),
            on_end=partial(listener.closed, process),
            most_unsent=_MOST_UNSENT,
            longest=MAX_FROM_TRIAL_BYTES,
        )

    def term(self, process: str) -> None:
        """Send SIGTERM to the process group of a trial process; ignore one that is gone."""
        if running := self._running.get(process):
            running.server.term(process)

    def kill(self, process: str) -> None:
        """Kill a trial's process tree; ignore one that is gone."""
        if running := self._running.get(process):
            running.server.kill(process)

    def dump(self, process: str) -> None:
        """Make a trial process write its threads' stacks to its log; ignore one that is gone."""
        if running := self._running.get(process):
            running.server.dump(process)

    def held_at_kill(self, process: str) -> int:
        """Return the peak bytes of a process tree that the kernel killed for its limit; else 0."""
        return self._groups.held_at_kill(process)

    def close(self) -> None:
        """End all forkservers and all trial processes."""
        closing = [*self._leaving, *self._servers]
        for server in list(self._servers):
            self._leave(server)
        deadline = time.monotonic() + _CLOSE_S
        for server in closing:
            server.close(max(0.0, deadline - time.monotonic()))
            self._children.discard(server.pid)
        self._orphans.kill_now(_CLOSE_S)
        self._groups.close()

    def _server_for(self, environment: Environment) -> ForkserverClient:
        for server in self._servers:
            if server.environment == environment and not self._is_limited(server):
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

    @staticmethod
    def _is_limited(server: ForkserverClient) -> bool:
        """Whether new trials would inherit lowered limits; those that run are kept."""
        if names := server.lowered_limits():
            _log.warning("forkserver.limited pid=%d limits=%r", server.pid, ", ".join(names))
        return bool(names)

    def _look_at_all(self) -> None:
        self._look_at(list(self._servers))

    def _look_at(self, servers: list[ForkserverClient]) -> None:
        while servers:
            server = servers.pop()
            if server not in self._servers:
                continue
            try:
                warning = server.look()
            except ForkserverLost as lost:
                self._lost(server, lost)
                # That may have taken a second; the node does not wait for many of them in a row.
                self._look = self._reactor.after(0.0, partial(self._look_at, servers))
                return
            if warning:
                self._pass_on(server, self._servers[server], messages.ForkserverWarned(warning))
        self._look = (
            self._reactor.after(POLL_INTERVAL_S, self._look_at_all) if self._servers else None
        )

    def _close_idle(self) -> None:
        """End the forkservers without trial processes: another environment is needed now."""
        busy = {running.server for running in self._running.values()}
        for server in [server for server in self._servers if server not in busy]:
            self._leave(server)
            self._await_end(server, time.monotonic() + _CLOSE_S)

    def _leave(self, server: ForkserverClient) -> None:
        self._reactor.unwatch(server)
        del self._servers[server]
        self._leaving.add(server)
        server.leave()

    def _await_end(self, server: ForkserverClient, deadline: float) -> None:
        """Reap a forkserver that was left; kill it as an orphan if it has not ended in time.

        A preloaded module can have made children of the node (``CLONE_PARENT``): orphans, too.
        """
        has_ended = server.has_ended()
        if not has_ended and time.monotonic() < deadline:
            self._reactor.after(_LOOK_S, partial(self._await_end, server, deadline))
            return
        self._leaving.discard(server)
        self._children.discard(server.pid)
        self._orphans.sweep(lambda _: has_ended or server.has_ended())

    def _readable(self, server: ForkserverClient, _events: int) -> None:
        # Handling a report may close this forkserver.
        warnings = self._servers[server]
        try:
            reports = server.read()
        except ForkserverLost as lost:
            self._lost(server, lost)
            return
        for report in reports:
            self._pass_on(server, warnings, report)

    def _lost(self, server: ForkserverClient, lost: ForkserverLost) -> None:
        """Handle a forkserver's death; report its trial processes gone when orphans are dead."""
        self._reactor.unwatch(server)
        # Removed first: trials that start because of its reports need another forkserver.
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
        processes = {process: self._running.pop(process) for process in lost.processes}
        self._children.discard(server.pid)
        self._orphans.sweep(partial(self._say_gone, processes))

    def _warn(self, warnings: _Warnings, events_keys: Iterable[str]) -> None:
        for events_key in events_keys:
            for text in warnings.notices(events_key):
                self.on_warning(events_key, text)

    def _pass_on(
        self, server: ForkserverClient, warnings: _Warnings, report: messages.ForkserverReport
    ) -> None:
        match report:
            case messages.ProcessForked(process, pid):
                # The pids that a dead forkserver reported are not proven, so no process is moved.
                is_alive = server in self._servers
                self._groups.enter(process, server.process_of(process) if is_alive else None)
                self._running[process].listener.forked(process, pid)
            case messages.ProcessExited(process, None):  # there was no process to fork
                self._running[process].listener.lost(process, self._why)
            case messages.ProcessExited(process, _, signal, exit_code):
                self._running[process].listener.exited(process, signal, exit_code)
            case messages.ProcessTreeGone(process):
                self._groups.leave(process)
                self._running.pop(process).listener.gone(process)
            case messages.ProcessTreeStuck(process, has_exited, pids):
                stuck = self._running.pop(process)
                if not has_exited:
                    stuck.listener.exited(process, SIGKILL, None)
                _log.warning("trial.stuck process=%s text=%r", process, stuck_text(pids))
                self._say_gone({process: stuck}, pids)
            case messages.ForkserverWarned(text):
                self._why = text
                warnings.add(text)
                running = self._running.values()
                self._warn(warnings, {one.events_key for one in running if one.server is server})
            case messages.PreloadBegan(module):
                _log.info("forkserver.preloading module=%r", module)
            case messages.ForkserverReady(preloaded):
                _log.info("forkserver.ready preloaded=%r", ",".join(preloaded))
            case messages.ForkserverPong():
                pass

    def _say_gone(self, processes: dict[str, _PooledProcess], stuck: Collection[int]) -> None:
        if stuck:
            for events_key in {one.events_key for one in processes.values()}:
                self.on_warning(events_key, stuck_text(stuck))
        for process, one in processes.items():
            self._groups.leave(process)
            one.listener.gone(process)
