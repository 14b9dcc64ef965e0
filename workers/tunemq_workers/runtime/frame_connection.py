"""`FrameConnection`: the node's end of a socket to a trial process or the consumer."""

from __future__ import annotations

import math
import socket
from collections.abc import Callable
from contextlib import suppress
from typing import Final

from tunemq_shared.base.errors import TransportError
from tunemq_workers.runtime.frames import (
    EVENT,
    MAX_FRAME_BYTES,
    UNREAD,
    UNREADABLE,
    FrameDecoder,
    frame,
)
from tunemq_workers.runtime.reactor import READ, WRITE, Reactor, do_nothing

_RECEIVE_BYTES: Final = 256 * 2**10


class FrameConnection:
    """Read frames from a process and send frames to it, without blocking.

    Args:
        reactor: runs the callbacks.
        sock: the socket; owned by the connection from now on.
        on_event: takes each event, undecoded; optional if the process sends none.
        on_other: takes kind and payload of each other frame, and `UNREADABLE` or `UNREAD`.
        on_end: called when the process closed its end or sent an invalid frame.
        most_unsent: bytes that may wait for a process that does not read; beyond them, ``on_other``
            takes `UNREAD`.
        longest: bytes of the longest frame that the process may send.
    """

    def __init__(
        self,
        reactor: Reactor,
        sock: socket.socket,
        *,
        on_event: Callable[[bytes], object] = do_nothing,
        on_other: Callable[[int, bytes], None],
        on_end: Callable[[], None],
        most_unsent: float = math.inf,
        longest: int = MAX_FRAME_BYTES,
    ) -> None:
        self._reactor, self._sock = reactor, sock
        self.on_event = on_event
        self.on_sent: Callable[[int], object] = do_nothing
        self._on_other, self._on_end = on_other, on_end
        self._decoder = FrameDecoder(longest)
        self._unsent = bytearray()
        self._most_unsent = most_unsent
        self._is_held = False
        self._is_open = True
        sock.setblocking(False)
        self._watch()

    def send(self, kind: int, payload: bytes) -> None:
        """Send a frame as soon as the socket has space for it."""
        if len(self._unsent) > self._most_unsent:
            return
        self._unsent += frame(kind, payload)
        self.on_sent(kind)
        self._flush()
        if len(self._unsent) > self._most_unsent:
            self._on_other(UNREAD, b"")

    def hold(self, is_held: bool) -> None:
        """Pause or resume reading; while paused, the process blocks when its socket is full."""
        if self._is_held != is_held:
            self._is_held = is_held
            self._watch()

    def drain(self) -> None:
        """Read all that a dead process has sent."""
        # Another process may have inherited its end of the socket, and write for ever.
        with suppress(OSError):
            self._sock.shutdown(socket.SHUT_RD)
        while self._receive():
            pass

    def close(self) -> None:
        """Close the socket; may be called again."""
        if self._is_open:
            self._is_open = False
            self._reactor.unwatch(self._sock)
            self._sock.close()

    def _watch(self) -> None:
        if not self._is_open:
            return
        events = (0 if self._is_held else READ) | (WRITE if self._unsent else 0)
        if events:
            self._reactor.watch(self._sock, self._ready, events)
        else:
            self._reactor.unwatch(self._sock)

    def _ready(self, events: int) -> None:
        if events & WRITE:
            self._flush()
        if events & READ:
            self._receive()

    def _flush(self) -> None:
        had_waited = len(self._unsent)
        try:
            while self._is_open and self._unsent:
                del self._unsent[: self._sock.send(self._unsent)]
        except BlockingIOError:
            pass
        except OSError:  # the process is dying; its forkserver reports that
            self._unsent.clear()
        if had_waited or self._unsent:
            self._watch()

    def _receive(self) -> bool:
        """Handle the data of one receive call; return whether there may be more."""
        if not self._is_open:
            return False
        try:
            data, _, flags, _ = self._sock.recvmsg(_RECEIVE_BYTES)
            if flags & socket.MSG_CTRUNC:
                raise TransportError("descriptors came with it (SCM_RIGHTS).")
            frames = self._decoder.feed(data)
        except BlockingIOError:
            return False
        except ConnectionError:  # the process ended without reading its orders
            data, frames = b"", []
        except TransportError as problem:
            data, frames = b"", [*self._decoder.whole, (UNREADABLE, str(problem).encode())]
        on_event = self.on_event
        for kind, payload in frames:
            if kind == EVENT:
                on_event(payload)
            else:
                self._on_other(kind, payload)
        if not data:
            self.close()
            self._on_end()
        return bool(data)
