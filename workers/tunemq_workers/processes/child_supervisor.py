"""`ChildSupervisor`: starts a node's helper process, receives its answers, and restarts it."""

from __future__ import annotations

import logging
import os
import signal
import time
from collections.abc import Callable
from functools import partial
from typing import Final, Generic, TypeVar

from tunemq_shared.base.backoff import backoff_s
from tunemq_shared.base.decoding_errors import UNDECODABLE
from tunemq_shared.base.errors import TransportError
from tunemq_shared.system.processes import is_readable, signal_name
from tunemq_shared.system.stopped_process import POLL_INTERVAL_S, StoppedProcessDetector
from tunemq_workers.processes.child_process import ChildProcess
from tunemq_workers.processes.killed_trees import stuck_text
from tunemq_workers.runtime.frame_connection import FrameConnection
from tunemq_workers.runtime.frames import ANSWER, ORDER
from tunemq_workers.runtime.reactor import Reactor, Timer, cancel

#: Delays between restarts of a process that exits again and again; they start over once one ran for
#: the time below.
_BACK_OFF_S: Final = (0.1, 10.0)
_LIVED_S: Final = 10.0
#: How long the node waits at its end for the process to exit.
_CLOSE_S: Final = 1.0
#: After this time a killed process that does not end is replaced.
_STUCK_S: Final = 20.0

_log = logging.getLogger(__name__)
A = TypeVar("A")


class ChildSupervisor(Generic[A]):
    """Runs at most one process of a kind, and none before `start_if_none`.

    It starts a process only after the previous one was killed or ended, so no two ever work at the
    same time. One that SIGKILL does not end, as it waits for a file system, is left to the kernel.
    One that sends what cannot be read is killed: what trials wrote may have made it do so.

    Args:
        reactor: the node's loop, which makes all calls.
        name: the process's name, for messages and the log.
        start: starts a process; called in the reactor's thread.
        children: the pids of the node's child processes; holds this one until it is reaped.
        on_up: called when a process has started, which has received nothing yet.
        decode: decodes an answer; raises one of `UNDECODABLE`.
        on_answer: called with each answer.
        on_end: called with the reason when the process ended for any cause, or could not be
            started.
    """

    def __init__(
        self,
        reactor: Reactor,
        name: str,
        start: Callable[[], ChildProcess],
        children: set[int],
        *,
        on_up: Callable[[], None],
        decode: Callable[[bytes], A],
        on_answer: Callable[[A], None],
        on_end: Callable[[str], None],
    ) -> None:
        self._reactor, self._name = reactor, name
        self._start, self._children = start, children
        self._decode = decode
        self._on_up, self._on_answer, self._on_end = on_up, on_answer, on_end
        self._link: FrameConnection | None = None
        self._pid = self._pidfd = -1
        self._started_at = 0.0
        self._why: str | None = None
        self._deaths_in_a_row = 0
        self._pending: Timer | None = None
        self._look: Timer | None = None

    @property
    def is_up(self) -> bool:
        """Whether there is a process that accepts orders."""
        return self._link is not None

    @property
    def pid(self) -> int | None:
        """The pid of the process, until it is reaped."""
        return self._pid if self._pid > 0 else None

    def start_if_none(self) -> None:
        """Start a process once the previous one is reaped and the restart delay has passed."""
        if self._pid > 0 or self._pending is not None:
            return
        delay_s = 0.0
        if self._deaths_in_a_row:
            delay_s = backoff_s(self._deaths_in_a_row - 1, *_BACK_OFF_S)
        self._pending = self._reactor.after(delay_s, self._start_now)

    def send(self, order: bytes) -> None:
        """Send an encoded order to the running process."""
        assert self._link is not None  # the caller has checked `is_up`
        self._link.send(ORDER, order)

    def end(self, why: str | None = "") -> None:
        """Kill the process, if there is one; `on_end` follows, with this reason.

        None: it has ended by itself.
        """
        if self._link is not None:
            self._why = why
            self._drop()

    def close(self) -> None:
        """Kill the process and wait for its exit; no callback is called any more."""
        cancel(self._pending)
        if self._link is not None:
            self._drop()
        cancel(self._look)
        if self._pid > 0:
            self._reactor.unwatch(self._pidfd)
            # One that hangs in the kernel is left to the process that inherits the node's children.
            if is_readable(self._pidfd, _CLOSE_S):
                self._reap()

    def _start_now(self) -> None:
        self._pending = None
        try:
            self._pid, sock = self._start()
        except OSError as problem:  # out of processes for now
            why = f"the {self._name} process cannot be started: {problem}"
            _log.error("%s.not_started why=%r", self._name, why)
            self._deaths_in_a_row += 1
            self._on_end(why)
            return
        self._children.add(self._pid)
        self._pidfd = os.pidfd_open(self._pid)
        self._started_at, self._why = time.monotonic(), None
        self._link = FrameConnection(
            self._reactor,
            sock,
            on_other=self._receive,
            on_end=partial(self.end, None),
        )
        self._look = self._reactor.after(
            POLL_INTERVAL_S, partial(self._look_at_it, StoppedProcessDetector())
        )
        _log.info("%s.started pid=%d", self._name, self._pid)
        self._on_up()

    def _receive(self, kind: int, payload: bytes) -> None:
        if self._link is None:  # an answer before this one ended it
            return
        try:
            if kind != ANSWER:
                raise TransportError(f"kind {kind}: {payload[:100]!r}")
            answer = self._decode(payload)
        except (*UNDECODABLE, TransportError) as problem:
            self._deaths_in_a_row += 1
            self.end(f"the {self._name} process {self._pid} sent what cannot be read: {problem}")
            return
        self._on_answer(answer)

    def _look_at_it(self, stops: StoppedProcessDetector) -> None:
        """Restart a process that is stopped: any trial of the node's user can do that to it."""
        if stops.look(self._pid):
            self._deaths_in_a_row += 1
            self.end(f"the {self._name} process {self._pid} was stopped (SIGSTOP or a debugger)")
        else:
            self._look = self._reactor.after(POLL_INTERVAL_S, partial(self._look_at_it, stops))

    def _drop(self) -> None:
        """Close the socket and kill the process."""
        assert self._link is not None  # it is dropped once
        cancel(self._look)
        self._link.close()
        self._link = None
        self._reactor.watch(self._pidfd, self._ended)
        self._look = self._reactor.after(_STUCK_S, self._give_up)
        os.kill(self._pid, signal.SIGKILL)  # not reaped yet, so the pid cannot be reused

    def _give_up(self) -> None:
        """Leave a killed process that does not end; it is an orphan from now on."""
        _log.warning("%s.stuck text=%r", self._name, stuck_text([self._pid]))
        why = self._why or f"the {self._name} process {self._pid} was killed and does not end"
        self._reactor.unwatch(self._pidfd)
        self._forget()
        self._deaths_in_a_row += 1
        self._on_end(why)

    def _ended(self, _events: int) -> None:
        cancel(self._look)
        self._reactor.unwatch(self._pidfd)
        pid = self._pid
        code = self._reap()
        if time.monotonic() - self._started_at >= _LIVED_S:
            self._deaths_in_a_row = 0
        if self._why is None:  # it ended by itself
            self._deaths_in_a_row += 1
            how = f"exit code {code}" if code >= 0 else signal_name(-code)
            self._why = f"the {self._name} process {pid} ended with {how}"
        _log.info("%s.ended pid=%d why=%r", self._name, pid, self._why)
        self._on_end(self._why)

    def _reap(self) -> int:
        _, status = os.waitpid(self._pid, 0)
        self._forget()
        return os.waitstatus_to_exitcode(status)

    def _forget(self) -> None:
        os.close(self._pidfd)
        self._children.discard(self._pid)
        self._pid = self._pidfd = -1
