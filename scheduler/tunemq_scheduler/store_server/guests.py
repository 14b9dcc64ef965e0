"""`Guests`: the connections that a server has, at most so many, and which of them do nothing now.

Who opens connections and says nothing, or very slowly, keeps nobody out: when there is no room for
one more, the one goes that has been waiting longest for a request.
"""

from __future__ import annotations

import contextlib
import socket
import threading
import time


class Guests:
    """Connections. **Threads.** Any may call anything.

    Args:
        most: so many there may be.
    """

    def __init__(self, most: int) -> None:
        self._most = most
        self._changed = threading.Condition()
        self._all: set[socket.socket] = set()
        #: Those of which a request is awaited, the longest first.
        self._waiting: dict[socket.socket, None] = {}

    def admit(self, guest: socket.socket) -> bool:
        """Take one more, if there is room or can be made."""
        with self._changed:
            if len(self._all) >= self._most:
                if not self._waiting:
                    return False
                self._send_away(next(iter(self._waiting)))
            self._all.add(guest)
            self._waiting[guest] = None
        return True

    def make_room(self) -> None:
        """End the one that waits longest, and wait a moment for somebody to leave."""
        with self._changed:
            if self._waiting:
                self._send_away(next(iter(self._waiting)))
            self._changed.wait(0.1)

    def awaits(self, guest: socket.socket) -> None:
        """A request of it is awaited from now on."""
        with self._changed:
            self._waiting.pop(guest, None)
            if guest in self._all:
                self._waiting[guest] = None

    def is_served(self, guest: socket.socket) -> None:
        """It has made a request."""
        with self._changed:
            self._waiting.pop(guest, None)

    def leave(self, guest: socket.socket) -> None:
        """It is gone."""
        with self._changed:
            self._waiting.pop(guest, None)
            self._all.discard(guest)
            self._changed.notify_all()

    def send_away(self, grace_s: float) -> None:
        """End those that wait at once, and the others when they are served or the grace is over."""
        deadline = time.monotonic() + grace_s
        with self._changed:
            while self._all and time.monotonic() < deadline:
                for guest in tuple(self._waiting):
                    self._send_away(guest)
                self._changed.wait(0.05)
            for guest in tuple(self._all):
                self._send_away(guest)

    def _send_away(self, guest: socket.socket) -> None:
        """Have its thread see the end of it."""
        self._waiting.pop(guest, None)
        self._all.discard(guest)
        with contextlib.suppress(OSError):  # it is gone already
            guest.shutdown(socket.SHUT_RDWR)
