"""Supervises the Celery consumer process and restarts it when it exits or hangs."""

from __future__ import annotations

import logging
import os
import signal
import socket
import time
from collections.abc import Callable
from typing import Final

from tunemq_shared.base.backoff import backoff_s
from tunemq_shared.system.processes import is_readable
from tunemq_workers.broker.consumer_start import COMMAND, READY, REJECTED, fork_consumer
from tunemq_workers.processes.child_process import ChildProcess
from tunemq_workers.processes.orphans import OrphanReaper
from tunemq_workers.runtime.frame_connection import FrameConnection
from tunemq_workers.runtime.frames import UNREADABLE
from tunemq_workers.runtime.reactor import Reactor, Timer

#: A consumer that needs longer to consume its queue is started anew.
_STARTING_S: Final = 15.0
#: Consumers that die sooner than this after they were ready are started less and less often.
_STEADY_S: Final = 5.0
_BACK_OFF_S: Final = (0.1, 2.0)
#: How long consumer and forkserver may take to end when the node does.
_CLOSE_S: Final = 1.0

_log = logging.getLogger(__name__)


class ConsumerProcess:
    """Keeps one consumer alive, and the forkserver that it comes from.

    Args:
        reactor: calls back.
        start: starts a forkserver of consumers.
        first: one that runs already.
        children: the pids of the node's own children; the forkserver's is kept there.
        on_ready: a consumer consumes the queue.
        on_mail: a task's argument came.
        on_refused: something else came, and was refused for this reason.
        on_death: the consumer ended by itself; `start_if_none` starts another.
    """

    def __init__(
        self,
        reactor: Reactor,
        start: Callable[[], ChildProcess],
        first: ChildProcess,
        children: set[int],
        *,
        on_ready: Callable[[], None],
        on_command: Callable[[bytes], None],
        on_rejected: Callable[[str], None],
        on_death: Callable[[], None],
    ) -> None:
        self._reactor, self._start, self._children = reactor, start, children
        self._on_ready, self._on_command, self._on_death = on_ready, on_command, on_death
        self._on_rejected = on_rejected
        self._forkserver: ChildProcess | None = None
        self._consumer: FrameConnection | None = None
        self._is_ready = self._is_redis_away = False
        self._ready_at = 0.0
        self._deaths_in_a_row = 0
        self._overdue: Timer | None = None
        self._pending: Timer | None = None
        self._orphans = OrphanReaper(reactor, children)
        self._attend(first)
        self._start_now()

    def start_if_none(self) -> None:
        """Start a consumer unless there is one; after several that died young, not at once."""
        if self._consumer is not None or self._pending is not None:
            return
        if self._deaths_in_a_row <= 1:
            self._start_now()
            return
        delay_s = backoff_s(self._deaths_in_a_row - 2, *_BACK_OFF_S)
        self._pending = self._reactor.after(delay_s, self._start_now)

    @property
    def is_ready(self) -> bool:
        """Whether a consumer consumes the queue, as far as we know."""
        return self._is_ready

    def redis_is_away(self) -> None:
        """Put another consumer in the place of one that is ready: its connection may be dead.

        Not when Redis is back: then others start at the same time, and commands wait for it. The
        new one waits for Redis, with nothing left to do but to connect.
        """
        self._is_redis_away = True
        if self._is_ready:
            self.restart("Redis is away")

    def redis_is_back(self) -> None:
        """Have a consumer at once, and give one that waited for Redis its time to connect."""
        self._is_redis_away = False
        if self._pending is not None:
            self._pending.cancel()
            self._start_now()
        elif self._consumer is None:
            self.start_if_none()
        elif not self._is_ready:
            self._expect_ready(self._consumer)

    def restart(self, reason: str) -> None:
        """Put another consumer in the place of this one."""
        _log.info("consumer.restart reason=%r", reason)
        self._drop()
        if self._pending is not None:
            self._pending.cancel()
        self._start_now()

    def close(self) -> None:
        """End the consumer, and wait for its end: the process may go on, as another node."""
        if self._pending is not None:
            self._pending.cancel()
        self._drop()
        if (forkserver := self._forkserver) is not None:
            self._forkserver = None
            self._reactor.unwatch(forkserver.sock)
            forkserver.sock.close()  # it ends its consumer and itself
            pidfd = os.pidfd_open(forkserver.pid)
            if not is_readable(pidfd, _CLOSE_S):
                os.kill(forkserver.pid, signal.SIGKILL)
            os.waitpid(forkserver.pid, 0)
            os.close(pidfd)

    def _start_now(self) -> None:
        self._pending = None
        if self._consumer is not None:
            return
        try:
            if self._forkserver is None:
                self._attend(self._start())
            assert self._forkserver is not None
            consumer = fork_consumer(self._forkserver)
        except OSError as problem:  # no process is to be had now; one that dies frees one
            _log.error("consumer.not_started problem=%r", str(problem))
            self._pending = self._reactor.after(_BACK_OFF_S[1], self._start_now)
        else:
            self._hear(consumer)

    def _attend(self, forkserver: ChildProcess) -> None:
        self._forkserver = forkserver
        forkserver.sock.setblocking(False)  # one that is stuck is not waited for
        self._children.add(forkserver.pid)
        # It never writes: this is its end.
        self._reactor.watch(forkserver.sock, lambda _: self._forkserver_died())
        _log.info("consumer.forkserver pid=%d", forkserver.pid)

    def _forkserver_died(self) -> None:
        _log.warning("consumer.forkserver_died")
        self._deaths_in_a_row += 1
        if self._pending is not None:
            self._pending.cancel()
            self._pending = None
        self._drop()
        self._drop_forkserver()
        self._on_death()

    def _drop_forkserver(self) -> None:
        """Kill it; what is left of it and of its consumer is nobody's."""
        if (forkserver := self._forkserver) is None:
            return
        self._forkserver = None
        self._reactor.unwatch(forkserver.sock)
        forkserver.sock.close()
        os.kill(forkserver.pid, signal.SIGKILL)  # it was not waited for: the pid is its own
        self._children.discard(forkserver.pid)
        self._orphans.sweep(_nobody_waits)

    def _hear(self, consumer: socket.socket) -> None:
        self._is_ready = False
        self._consumer = FrameConnection(
            self._reactor, consumer, on_other=self._said, on_end=self._died
        )
        self._expect_ready(self._consumer)
        _log.info("consumer.started")

    def _expect_ready(self, consumer: FrameConnection) -> None:
        if self._overdue is not None:
            self._overdue.cancel()
        self._overdue = self._reactor.after(_STARTING_S, lambda: self._is_overdue(consumer))

    def _is_overdue(self, consumer: FrameConnection) -> None:
        # While Redis is away none can be ready, and one that is just starting would be late for it.
        if self._consumer is consumer and not self._is_ready and not self._is_redis_away:
            self._drop_forkserver()  # it may be what is stuck
            self.restart(f"not ready after {_STARTING_S:.0f} s")

    def _said(self, kind: int, payload: bytes) -> None:
        if kind == COMMAND:
            self._on_command(payload)
        elif kind == REJECTED:
            self._on_rejected(payload.decode())
        elif kind == READY:
            self._is_ready = True
            self._ready_at = time.monotonic()
            self._on_ready()
        elif kind == UNREADABLE:
            _log.warning("consumer.unreadable problem=%r", payload.decode())

    def _died(self) -> None:
        _log.warning("consumer.died log=consumer.log")
        if self._is_ready and time.monotonic() - self._ready_at >= _STEADY_S:
            self._deaths_in_a_row = 0
        self._deaths_in_a_row += 1
        self._drop()
        self._on_death()

    def _drop(self) -> None:
        """Forget the consumer; closing its socket ends it."""
        if self._overdue is not None:
            self._overdue.cancel()
        if self._consumer is None:
            return
        self._consumer.close()
        self._consumer, self._is_ready = None, False


def _nobody_waits() -> None:
    """For when all that a forkserver has left is gone."""
