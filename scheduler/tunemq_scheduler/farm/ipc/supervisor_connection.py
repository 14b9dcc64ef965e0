"""`SupervisorConnection`: the experiment's end of its connection with the farm's supervisor."""

from __future__ import annotations

import os
import select
import socket
import time
from collections import deque
from typing import Final

from tunemq_scheduler.farm.ipc import ipc_messages as r
from tunemq_scheduler.farm.ipc.nonblocking_frames import FrameSocket
from tunemq_shared.base.errors import SchedulerSuperseded

#: The supervisor is heard so often that one that was not for so long may have been replaced.
FRESH_S: Final = 5.0
#: How long `check` waits for a newer sign of life: a Redis that does not answer holds it up, too.
_HEARD_WITHIN_S: Final = 30.0
#: So much waits for a supervisor that does not read, before the experiment waits, too.
_MOST_WAITING: Final = 16 * 2**20
#: How long `close` waits for the supervisor to take what is left to say.
_CLOSED_WITHIN_S: Final = 10.0
#: How often the supervisor is told that this thread reads what it sends.
ALIVE_EVERY_S: Final = 5.0


class SupervisorConnection:
    """Sends, receives, and knows whether the farm is still the supervisor's.

    All methods but `wake` are called by one thread.

    Args:
        sock: connected with the supervisor.
        fresh_s, heard_within_s: for tests.
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
        """Return if we may act: the supervisor lives, and the farm was its own a moment ago.

        Raises:
            SchedulerSuperseded: it is gone, or is not heard.
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
                    " replaced. Nothing was done since; trials go on, for whoever takes over."
                )
            self._select(deadline - now)

    def check_known(self) -> None:
        """Return unless it is known already that the supervisor is gone.

        Raises:
            SchedulerSuperseded: it is.
        """
        if self.is_lost:
            raise SchedulerSuperseded(
                "The farm's supervisor has ended; trials go on, for the next one to take over."
            )

    # --- messages ---------------------------------------------------------------------------------

    def send(self, message: r.ToSupervisor) -> None:
        """Send a message; waits only where very much waits already."""
        self._frames.put(r.encode(message))
        self._frames.flush()
        while self._frames.waiting > _MOST_WAITING and not self.is_lost:
            self._select(None)

    def wait(self, timeout: float) -> bool:
        """Wait for messages; returns whether it was woken."""
        if self._inbox:
            timeout = 0.0
        return self._select(timeout)

    def pause(self, seconds: float) -> None:
        """Let so much time pass, and have the supervisor know that nothing hangs."""
        deadline = time.monotonic() + seconds
        while (left := deadline - time.monotonic()) > 0:
            if self.is_lost:
                time.sleep(left)
            else:
                self._select(left)

    def take(self) -> list[r.ToExperiment]:
        """The messages that came, but for signs of life."""
        taken = list(self._inbox)
        self._inbox.clear()
        return taken

    def first(self) -> r.ToExperiment:
        """The next message; waits for it.

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
        except OSError:  # full: it wakes already; or closed: nobody waits
            return

    def close(self) -> None:
        """Send what is left to send, and close the connection."""
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
        """Wait until something can be received or sent, and do that; whether it was woken."""
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
                self._say_alive()
            else:
                self._inbox.append(message)

    def _say_alive(self) -> None:
        now = time.monotonic()
        if now - self._alive_at >= ALIVE_EVERY_S:
            self._alive_at = now
            self._frames.put(r.encode(r.ExperimentAlive()))
            self._frames.flush()
