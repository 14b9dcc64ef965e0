"""`RequestStream`: what a connection says, with bounds: of a head's length, and of time."""

from __future__ import annotations

import io
import math
import socket
import time
from typing import Final

#: Seconds until a kept connection says something more, and for all of a request's head.
IDLE_S: Final = 60.0
HEAD_S: Final = 10.0
#: Seconds without a byte of what is under way.
SILENCE_S: Final = 30.0
#: Bytes of a request's head.
MAX_HEAD: Final = 32 * 2**10


class HeadTooLong(Exception):
    """The head of a request is longer than any of ours."""


class RequestStream(io.RawIOBase):
    """The bytes that come; TimeoutError where they come too slowly."""

    def __init__(self, connection: socket.socket) -> None:
        self._connection = connection
        self._deadline = math.inf
        self._room: float = math.inf
        self._is_begun = True

    def expect_head(self, within: float) -> None:
        """From now on comes the head of a request, whose first byte is to come by then."""
        self._deadline = time.monotonic() + within
        self._room = MAX_HEAD
        self._is_begun = False

    def expect_body(self, within: float = math.inf) -> None:
        """From now on comes what belongs to a request."""
        self._deadline = time.monotonic() + within
        self._room = math.inf
        self._is_begun = True
        self._connection.settimeout(SILENCE_S)

    def readable(self) -> bool:
        """See `io.RawIOBase.readable`."""
        return True

    def readinto(self, buffer: memoryview) -> int:  # type: ignore[override]  # all that is given
        """See `io.RawIOBase.readinto`."""
        left = self._deadline - time.monotonic()
        if left <= 0:
            raise TimeoutError
        if not self._room:
            raise HeadTooLong
        self._connection.settimeout(min(left, SILENCE_S) if self._is_begun else left)
        count = self._connection.recv_into(buffer[: int(min(len(buffer), self._room))])
        if not self._is_begun:
            self._is_begun = True
            self._deadline = min(self._deadline, time.monotonic() + HEAD_S)
        self._room -= count
        return count
