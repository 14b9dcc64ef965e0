"""The node's hold on its ear: starts it, hears it, and starts another when it dies or goes deaf."""

from __future__ import annotations

import logging
import os
import select
import signal
from collections.abc import Callable
from typing import Final

from tunemq_shared.errors import WireError
from tunemq_workers.child_process import ChildProcess
from tunemq_workers.ear_process import MAIL, READY
from tunemq_workers.frames import FrameDecoder
from tunemq_workers.reactor import Reactor, Timer

#: An ear that needs longer to consume its queue is started anew.
_STARTING_S: Final = 15.0
#: Ears that die before they heard anything are started less and less often.
_BACK_OFF_S: Final = (0.1, 2.0)
#: How long a killed ear may take to end when the node does.
_CLOSE_S: Final = 1.0
_RECEIVE_BYTES: Final = 256 * 2**10

_log = logging.getLogger(__name__)


class EarLink:
    """Keeps one ear alive.

    Args:
        reactor: calls back.
        start: starts an ear process.
        first: an ear that runs already.
        children: the pids of the node's own children; the ear's is kept there until it is reaped.
        on_ready: an ear consumes the queue.
        on_mail: a task's argument came.
        on_death: the ear ended by itself; `start_if_none` starts another.
    """

    def __init__(
        self,
        reactor: Reactor,
        start: Callable[[], ChildProcess],
        first: ChildProcess,
        children: set[int],
        *,
        on_ready: Callable[[], None],
        on_mail: Callable[[bytes], None],
        on_death: Callable[[], None],
    ) -> None:
        self._reactor, self._start, self._children = reactor, start, children
        self._on_ready, self._on_mail, self._on_death = on_ready, on_mail, on_death
        self._ear: ChildProcess | None = None
        self._is_ready = self._is_doubted = False
        self._deaths_in_a_row = 0
        self._overdue: Timer | None = None
        self._pending: Timer | None = None
        #: Ears that were killed and not waited for yet: pidfd and pid.
        self._ended: dict[int, int] = {}
        self._attend(first)

    @property
    def pid(self) -> int | None:
        """The ear's process, if there is one."""
        return self._ear.pid if self._ear else None

    def start_if_none(self) -> None:
        """Start an ear unless there is one; after several that died young, not at once."""
        if self._ear is not None or self._pending is not None:
            return
        if self._deaths_in_a_row <= 1:
            self._start_now()
            return
        low, high = _BACK_OFF_S
        delay_s = min(high, low * 2.0 ** min(self._deaths_in_a_row - 2, 10))
        self._pending = self._reactor.after(delay_s, self._start_now)

    @property
    def is_ready(self) -> bool:
        """Whether an ear consumes the queue, as far as we know."""
        return self._is_ready

    def doubt(self) -> None:
        """Redis is away: the connection of an ear that is ready may be dead."""
        self._is_doubted = self._is_ready

    def renew(self, reason: str) -> None:
        """Put another ear in the place of a doubtful one; one that waited for Redis is as good."""
        if self._is_doubted:
            self.restart(reason)
        else:
            self.start_if_none()

    def restart(self, reason: str) -> None:
        """Put another ear in the place of this one."""
        _log.info("ear.restart reason=%r", reason)
        self._drop()
        if self._pending is not None:
            self._pending.cancel()
        self._start_now()

    def close(self) -> None:
        """End the ear, and wait for its end: the process may go on, as another node."""
        if self._pending is not None:
            self._pending.cancel()
        self._drop()
        for pidfd in list(self._ended):
            if select.select([pidfd], [], [], _CLOSE_S)[0]:
                self._reap(pidfd)

    def _start_now(self) -> None:
        self._pending = None
        if self._ear is not None:
            return
        try:
            ear = self._start()
        except OSError as problem:  # no process is to be had now; one that dies frees one
            _log.error("ear.not_started problem=%r", str(problem))
            self._pending = self._reactor.after(_BACK_OFF_S[1], self._start_now)
        else:
            self._attend(ear)

    def _attend(self, ear: ChildProcess) -> None:
        self._ear, self._is_ready, self._is_doubted = ear, False, False
        self._children.add(ear.pid)
        self._decoder = FrameDecoder()
        ear.sock.setblocking(False)
        self._reactor.watch(ear.sock, self._readable)
        self._overdue = self._reactor.after(_STARTING_S, lambda: self._is_overdue(ear))
        _log.info("ear.started pid=%d", ear.pid)

    def _is_overdue(self, ear: ChildProcess) -> None:
        if self._ear is ear and not self._is_ready:
            self.restart(f"not ready after {_STARTING_S:.0f} s")

    def _readable(self, _events: int) -> None:
        assert self._ear is not None  # it is watched only while it is there
        try:
            data = self._ear.sock.recv(_RECEIVE_BYTES)
            frames = self._decoder.feed(data)
        except BlockingIOError:
            return
        except (OSError, WireError) as problem:
            _log.warning("ear.unreadable problem=%r", str(problem))
            data, frames = b"", []
        if not data:
            self._died()
            return
        for kind, payload in frames:
            if kind == MAIL:
                self._on_mail(payload)
            elif kind == READY:
                self._is_ready = True
                self._deaths_in_a_row = 0
                self._on_ready()

    def _died(self) -> None:
        _log.warning("ear.died pid=%s", self.pid)
        self._deaths_in_a_row += 1
        self._drop()
        self._on_death()

    def _drop(self) -> None:
        """Forget the ear, and see to its end."""
        if self._overdue is not None:
            self._overdue.cancel()
        if self._ear is None:
            return
        ear, self._ear = self._ear, None
        self._is_ready = self._is_doubted = False
        self._reactor.unwatch(ear.sock)
        ear.sock.close()
        os.kill(ear.pid, signal.SIGKILL)  # a child that was not waited for: the pid is its own
        pidfd = os.pidfd_open(ear.pid)
        self._ended[pidfd] = ear.pid
        self._reactor.watch(pidfd, lambda _: self._reap(pidfd))

    def _reap(self, pidfd: int) -> None:
        pid = self._ended.pop(pidfd)
        self._reactor.unwatch(pidfd)
        os.close(pidfd)
        os.waitpid(pid, 0)
        self._children.discard(pid)
