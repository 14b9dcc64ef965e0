"""`SupervisorConnection`: the experiment's side of its connection with the supervisor."""

from __future__ import annotations

import os
import select
import socket
import threading
import time
from collections import deque
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Final

from tunemq_scheduler.farm.ipc import ipc_messages as r
from tunemq_scheduler.farm.ipc.nonblocking_frames import FrameSocket
from tunemq_shared.base.errors import SchedulerSuperseded

#: A supervisor that was silent for longer than this may have been replaced.
FRESH_S: Final = 5.0
#: How long `check` waits for a newer lease proof; a Redis that does not answer delays it, too.
_HEARD_WITHIN_S: Final = 30.0
#: How many bytes may be queued for a supervisor before the experiment waits.
_MOST_WAITING: Final = 16 * 2**20
#: How long `close` waits for the supervisor to read the remaining messages.
_CLOSED_WITHIN_S: Final = 10.0
#: How often the experiment reports that this thread reads messages.
ALIVE_EVERY_S: Final = 5.0


class SupervisorConnection:
    """Sends and receives messages, and knows whether the supervisor still has the farm's lease.

    One thread at a time calls all methods except `wake`.

    Args:
        sock: connected with the supervisor.
        fresh_s, heard_within_s: time limits in seconds, for tests.
    """

    def __init__(
        self,
        sock: socket.socket,
        *,
        fresh_s: float = FRESH_S,
        heard_within_s: float = _HEARD_WITHIN_S,
    ) -> None:
        self._frames = FrameSocket(sock)
        self._inbox: deque[r.ToExperiment] = deque()
        self._fresh_s, self._heard_within_s = fresh_s, heard_within_s
        self._heard_at = self._alive_at = float("-inf")
        self._wake_reader, self._wake_writer = os.pipe2(os.O_NONBLOCK | os.O_CLOEXEC)

    # --- the lease --------------------------------------------------------------------------------

    @property
    def is_lost(self) -> bool:
        """Whether the supervisor has gone."""
        return self._frames.is_at_end or self._frames.is_stalled

    def check(self) -> None:
        """Return if this process may act: the supervisor lives and had the lease a moment ago.

        Raises:
            SchedulerSuperseded: it is gone, or silent.
        """
        deadline = time.monotonic() + self._heard_within_s
        while True:
            self.check_known()
            now = time.monotonic()
            if now - self._heard_at <= self._fresh_s:
                return
            if now >= deadline:
                raise SchedulerSuperseded(
                    f"The farm's supervisor was not heard for {self._fresh_s:g} s and may have been"
                    " replaced. Nothing was done since; trials continue for the next scheduler."
                )
            self._select(deadline - now)

    def check_known(self) -> None:
        """Return unless the supervisor is already known to be gone.

        Raises:
            SchedulerSuperseded: it is gone.
        """
        if self.is_lost:
            raise SchedulerSuperseded(
                "The farm's supervisor has ended; trials continue, for the next one to take over."
            )

    # --- messages ---------------------------------------------------------------------------------

    def send(self, message: r.ToSupervisor) -> None:
        """Send a message; waits only if very many bytes are queued."""
        self._frames.put(r.encode(message))
        self._frames.flush()
        while self._frames.waiting > _MOST_WAITING and not self.is_lost:
            self._select(None)

    def wait(self, timeout: float) -> bool:
        """Wait for messages; return whether `wake` was called."""
        if self._inbox:
            timeout = 0.0
        return self._select(timeout)

    def pause(self, seconds: float) -> None:
        """Wait for this many seconds, while reporting that nothing hangs."""
        deadline = time.monotonic() + seconds
        while (left := deadline - time.monotonic()) > 0:
            if self.is_lost:
                time.sleep(left)
            else:
                self._select(left)

    def say_alive(self) -> None:
        """Report at times, during work of many short steps, that nothing hangs."""
        self._select(0.0)

    @contextmanager
    def alive(self) -> Iterator[None]:
        """Report that nothing hangs while the farm's own code transfers much."""
        is_done = threading.Event()

        def report() -> None:
            while not (is_done.is_set() or self.is_lost):
                self._select(None)

        reporter = threading.Thread(target=report, name="alive", daemon=True)
        reporter.start()
        try:
            yield
        finally:
            is_done.set()
            self.wake()
            reporter.join()

    def take(self) -> list[r.ToExperiment]:
        """Return the received messages, except lease proofs."""
        taken = list(self._inbox)
        self._inbox.clear()
        return taken

    def first(self) -> r.ToExperiment:
        """Return the next message; waits for it.

        Raises:
            SchedulerSuperseded: the supervisor has ended.
        """
        while not self._inbox:
            self.check_known()
            self._select(None)
        return self._inbox.popleft()

    def wake(self) -> None:
        """Make `wait` return at once; for any thread or signal handler."""
        try:
            os.write(self._wake_writer, b"!")
        except OSError:  # full: it wakes anyway; or closed: `wait` has ended
            return

    def close(self) -> None:
        """Send the queued messages, and close the connection."""
        if self._wake_writer < 0:
            return
        deadline = time.monotonic() + _CLOSED_WITHIN_S
        while self._frames.waiting and not self.is_lost and time.monotonic() < deadline:
            self._select(deadline - time.monotonic())
            self._inbox.clear()
        self._frames.close()
        descriptors = self._wake_reader, self._wake_writer
        self._wake_reader = self._wake_writer = -1
        for descriptor in descriptors:
            os.close(descriptor)

    # --- the socket -------------------------------------------------------------------------------

    def _select(self, timeout: float | None) -> bool:
        """Wait until the socket is ready, and use it; return whether `wake` was called."""
        if self.is_lost:
            return True
        poll = select.poll()
        wants_write = select.POLLOUT if self._frames.waiting else 0
        poll.register(self._frames.fileno(), select.POLLIN | wants_write)
        poll.register(self._wake_reader, select.POLLIN)
        ready = dict(poll.poll(None if timeout is None else max(0.0, timeout) * 1000))
        seen = ready.get(self._frames.fileno(), 0)
        if seen & select.POLLOUT:
            self._frames.flush()
        if seen & ~select.POLLOUT:
            self._receive()
        if self._wake_reader in ready:
            os.read(self._wake_reader, 4096)
            return True
        return False

    def _receive(self) -> None:
        for payload in self._frames.receive():
            message = r.decode_for_experiment(payload)
            if isinstance(message, r.LeaseProof):
                self._heard_at = max(self._heard_at, message.at)
                self._answer_proof()
            else:
                self._inbox.append(message)

    def _answer_proof(self) -> None:
        now = time.monotonic()
        if now - self._alive_at >= ALIVE_EVERY_S:
            self._alive_at = now
            self._frames.put(r.encode(r.ExperimentAlive()))
            self._frames.flush()
