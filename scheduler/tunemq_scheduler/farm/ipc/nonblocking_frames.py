"""Non-blocking frames on the socket between an experiment's process and its supervisor.

A frame is a 4-byte big-endian length, followed by that many bytes of msgpack.
"""

from __future__ import annotations

import socket
import struct
from collections import deque
from contextlib import suppress
from typing import Final

from tunemq_shared.base.errors import TransportError

#: Both ends reject longer frames. The largest is a result of the maximum size that a node accepts
#: (32 MiB), together with the rest of its batch.
MAX_FRAME_BYTES: Final = 64 * 2**20
#: The most bytes to read at once; the rest stays in the socket, which makes the other end wait.
RECEIVE_BYTES: Final = 2**20

_HEADER: Final = struct.Struct(">I")


class IpcFrameDecoder:
    """Splits a stream of bytes, received in any pieces, into frames."""

    def __init__(self) -> None:
        self._data = bytearray()

    def feed(self, data: bytes) -> list[bytes]:
        """Return the payloads of all frames that ``data`` completes, in order.

        Raises:
            TransportError: a length is invalid; the rest of the stream is unreadable.
        """
        self._data += data
        frames, offset = [], 0
        while len(self._data) - offset >= _HEADER.size:
            (length,) = _HEADER.unpack_from(self._data, offset)
            if not 0 < length <= MAX_FRAME_BYTES:
                raise TransportError(
                    f"a frame says that it has {length} bytes; 1 to {MAX_FRAME_BYTES} are possible."
                )
            after = offset + _HEADER.size + length
            if after > len(self._data):
                break
            frames.append(bytes(memoryview(self._data)[offset + _HEADER.size : after]))
            offset = after
        if offset:
            del self._data[:offset]
        return frames


class FrameSocket:
    """One end of a connection, which queues outgoing frames and never waits for the other end.

    Args:
        sock: a connected stream socket; closed with this.
    """

    def __init__(self, sock: socket.socket) -> None:
        sock.setblocking(False)
        self._sock = sock
        self._decoder = IpcFrameDecoder()
        self._waiting: deque[memoryview] = deque()
        #: How many bytes wait to be sent.
        self.waiting = 0
        #: How many bytes were received.
        self.received = 0
        #: Whether nothing more will arrive: the other end is closed, or its process has ended.
        self.is_at_end = False
        #: Whether nothing more can be sent; earlier data from the other end can still be read.
        self.is_stalled = False

    def fileno(self) -> int:
        """Return the socket; -1 once it is closed."""
        return self._sock.fileno()

    def put(self, payload: bytes) -> None:
        """Queue a frame; see `flush`.

        Raises:
            TransportError: it exceeds the maximum size.
        """
        if len(payload) > MAX_FRAME_BYTES:
            raise TransportError(
                f"a message has {len(payload)} bytes; {MAX_FRAME_BYTES} are possible at most."
            )
        if not self.is_stalled:
            self._waiting += (memoryview(_HEADER.pack(len(payload))), memoryview(payload))
            self.waiting += _HEADER.size + len(payload)

    def flush(self) -> None:
        """Send as much as the socket accepts now."""
        while self._waiting:
            try:
                sent = self._sock.send(self._waiting[0])
            except BlockingIOError:
                return
            except OSError:  # the other end is closed
                self.is_stalled = True
                self._waiting.clear()
                self.waiting = 0
                return
            self.waiting -= sent
            if sent < len(self._waiting[0]):
                self._waiting[0] = self._waiting[0][sent:]
            else:
                self._waiting.popleft()

    def receive(self) -> list[bytes]:
        """Return the complete frames; reads at most `RECEIVE_BYTES`.

        Raises:
            TransportError: the data is invalid.
        """
        if self.is_at_end:
            return []
        try:
            data = self._sock.recv(RECEIVE_BYTES)
        except BlockingIOError:
            return []
        except OSError:
            data = b""
        if not data:
            self.is_at_end = True
            return []
        self.received += len(data)
        return self._decoder.feed(data)

    def refuse_more(self) -> None:
        """Receive only what has been sent so far, even if other processes have the other end."""
        with suppress(OSError):  # it is closed
            self._sock.shutdown(socket.SHUT_RD)

    def close(self) -> None:
        """Close the socket."""
        self._sock.close()
        self.is_at_end = self.is_stalled = True
        self._waiting.clear()
        self.waiting = 0
