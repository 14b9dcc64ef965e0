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
from tunemq_workers.broker.consumer_launcher import COMMAND, READY, REJECTED, fork_consumer
from tunemq_workers.processes.child_process import ChildProcess
from tunemq_workers.processes.orphans import OrphanReaper
from tunemq_workers.runtime.frame_connection import FrameConnection
from tunemq_workers.runtime.frames import UNREADABLE
from tunemq_workers.runtime.reactor import Reactor, Timer, cancel, do_nothing

#: Seconds after which a consumer that is not ready yet is replaced.
_STARTING_S: Final = 15.0
#: Consumers that die within this time (seconds) after becoming ready are restarted with a growing
#: delay.
_STEADY_S: Final = 5.0
_BACK_OFF_S: Final = (0.1, 2.0)
#: After this many ends in a row of consumers that received no command, the node gives up.
_MOST_DEATHS: Final = 10
#: Seconds that consumer and forkserver get to end when the node ends.
_CLOSE_S: Final = 1.0
#: After this time the node ends without a killed forkserver that waits in the kernel.
_KILLED_S: Final = 20.0

_log = logging.getLogger(__name__)


class ConsumerProcess:
    """Keep one consumer alive, and the forkserver that forks it.

    Args:
        reactor: runs the callbacks.
        start: starts a forkserver of consumers.
        first: a forkserver that runs already.
        children: the pids of the node's own children; receives the forkserver's.
        on_ready: called when a consumer begins to consume the queue.
        on_command: takes a task's argument.
        on_rejected: takes the reason for which the consumer rejected a message.
        on_death: called when the consumer ended by itself; `start_if_none` starts another.
        on_failing: called with the reason when no consumer works for long.
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
        on_failing: Callable[[str], object],
    ) -> None:
        self._reactor, self._start, self._children = reactor, start, children
        self._on_ready, self._on_command, self._on_death = on_ready, on_command, on_death
        self._on_rejected, self._on_failing = on_rejected, on_failing
        self._forkserver: ChildProcess | None = None
        self._consumer: FrameConnection | None = None
        #: Whether a consumer reported that it consumes the queue.
        self.is_ready = False
        self._is_redis_away = False
        self._ready_at = 0.0
        self._deaths_in_a_row = 0
        #: The number of them that received no command.
        self._unused_in_a_row = 0
        self._overdue: Timer | None = None
        self._pending: Timer | None = None
        self._orphans = OrphanReaper(reactor, children)
        self._attend(first)
        self._start_now()

    def start_if_none(self) -> None:
        """Start a consumer if none runs; after several early deaths, start it with a delay."""
        if self._consumer is not None or self._pending is not None:
            return
        if self._deaths_in_a_row <= 1:
            self._start_now()
            return
        delay_s = backoff_s(self._deaths_in_a_row - 2, *_BACK_OFF_S)
        self._pending = self._reactor.after(delay_s, self._start_now)

    def redis_is_away(self) -> None:
        """Replace a consumer that is ready, because its connection to Redis may be dead.

        Waiting until Redis is back would delay commands, because other processes start at that
        moment, too. The new consumer does all of its start except connecting while Redis is away.
        """
        self._is_redis_away = True
        self._deaths_in_a_row = self._unused_in_a_row = 0  # they may be consequences
        if self.is_ready:
            self.restart("Redis is away")

    def redis_is_back(self) -> None:
        """Start a consumer now if none runs, and give a waiting one its full time to connect."""
        self._is_redis_away = False
        if self._pending is not None:
            self._pending.cancel()
            self._start_now()
        elif self._consumer is None:
            self.start_if_none()
        elif not self.is_ready:
            self._expect_ready(self._consumer)

    def restart(self, reason: str) -> None:
        """Replace the consumer; the log names the reason."""
        _log.info("consumer.restart reason=%r", reason)
        self._drop()
        cancel(self._pending)
        self._start_now()

    def close(self) -> None:
        """End the consumer and the forkserver, and wait for both.

        The process may continue as another node instance, so it must leave no child behind.
        """
        cancel(self._pending)
        self._drop()
        if (forkserver := self._forkserver) is not None:
            self._forkserver = None
            self._reactor.unwatch(forkserver.sock)
            forkserver.sock.close()  # the forkserver then ends its consumer and itself
            pidfd = os.pidfd_open(forkserver.pid)
            if not is_readable(pidfd, _CLOSE_S):
                os.kill(forkserver.pid, signal.SIGKILL)
                is_readable(pidfd, _KILLED_S)
            os.waitpid(forkserver.pid, os.WNOHANG)
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
        except OSError as problem:  # no process or descriptor is free now; retry later
            _log.error("consumer.not_started problem=%r", str(problem))
            self._pending = self._reactor.after(_BACK_OFF_S[1], self._start_now)
        else:
            self._hear(consumer)

    def _attend(self, forkserver: ChildProcess) -> None:
        self._forkserver = forkserver
        forkserver.sock.setblocking(False)  # never block on a forkserver that hangs
        self._children.add(forkserver.pid)
        # A forkserver never writes, so a readable socket means that it ended.
        self._reactor.watch(forkserver.sock, lambda _: self._forkserver_died())
        _log.info("consumer.forkserver pid=%d", forkserver.pid)

    def _forkserver_died(self) -> None:
        _log.warning("consumer.forkserver_died")
        self._count_death()
        if self._pending is not None:
            self._pending.cancel()
            self._pending = None
        self._drop()
        self._drop_forkserver()
        self._on_death()

    def _drop_forkserver(self) -> None:
        """Kill the forkserver and reap the processes that it leaves behind."""
        if (forkserver := self._forkserver) is None:
            return
        self._forkserver = None
        self._reactor.unwatch(forkserver.sock)
        forkserver.sock.close()
        os.kill(forkserver.pid, signal.SIGKILL)  # not reaped yet, so the pid is still its own
        self._children.discard(forkserver.pid)
        self._orphans.sweep(do_nothing)

    def _hear(self, consumer: socket.socket) -> None:
        self.is_ready = False
        self._consumer = FrameConnection(
            self._reactor, consumer, on_other=self._said, on_end=self._died
        )
        self._expect_ready(self._consumer)
        _log.info("consumer.started")

    def _expect_ready(self, consumer: FrameConnection) -> None:
        cancel(self._overdue)
        self._overdue = self._reactor.after(_STARTING_S, lambda: self._is_overdue(consumer))

    def _is_overdue(self, consumer: FrameConnection) -> None:
        # While Redis is away no consumer can become ready, and a restart would only delay the next
        # one.
        if self._consumer is consumer and not self.is_ready and not self._is_redis_away:
            self._count_death()
            self._drop_forkserver()  # the forkserver may be what hangs
            self.restart(f"not ready after {_STARTING_S:.0f} s")

    def _said(self, kind: int, payload: bytes) -> None:
        if kind == COMMAND:
            self._unused_in_a_row = 0
            self._on_command(payload)
        elif kind == REJECTED:
            self._on_rejected(payload.decode())
        elif kind == READY:
            self.is_ready = True
            self._ready_at = time.monotonic()
            self._on_ready()
        elif kind == UNREADABLE:
            _log.warning("consumer.unreadable problem=%r", payload.decode())

    def _died(self) -> None:
        _log.warning("consumer.died log=consumer.log")
        if self.is_ready and time.monotonic() - self._ready_at >= _STEADY_S:
            self._deaths_in_a_row = self._unused_in_a_row = 0
        self._count_death()
        self._drop()
        self._on_death()

    def _count_death(self) -> None:
        self._deaths_in_a_row += 1
        if self._is_redis_away:  # also one that answers, and refuses to give messages: a replica
            return
        self._unused_in_a_row += 1
        if self._unused_in_a_row == _MOST_DEATHS:
            # Without a consumer the node receives no command, and its searches would wait for it.
            self._on_failing(
                f"its Celery consumer ended {_MOST_DEATHS} times in a row; consumer.log says why"
            )

    def _drop(self) -> None:
        """Forget the consumer; closing its socket ends it."""
        cancel(self._overdue)
        if self._consumer is None:
            return
        self._consumer.close()
        self._consumer, self.is_ready = None, False
