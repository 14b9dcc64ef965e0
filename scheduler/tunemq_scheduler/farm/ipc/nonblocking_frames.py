"""Frames on the socket between an experiment's process and its supervisor, without ever waiting.

A frame is a 4-byte big-endian length and so many bytes of msgpack.
"""

from __future__ import annotations

import socket
import struct
from collections import deque
from typing import Final

from tunemq_shared.base.errors import TransportError

#: Longer frames are refused by both ends. The largest that is sent is a result of the largest size
#: that a node takes (32 MiB), with others of its batch.
MAX_FRAME_BYTES: Final = 64 * 2**20
#: So much is read at once; the rest stays in the socket, where it makes the other end wait.
RECEIVE_BYTES: Final = 2**20

_HEADER: Final = struct.Struct(">I")


class IpcFrameDecoder:
    """Cuts a stream of bytes, in whatever pieces it arrives, into frames."""

    def __init__(self) -> None:
        self._data = bytearray()

    def feed(self, data: bytes) -> list[bytes]:
        """The payload of every frame that ``data`` completes, in order.

        Raises:
            WireError: a length that no frame has; the stream cannot be read any further.
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
    """One end of a connection: what is to be sent waits here, and nobody waits for the other end.

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
        #: How many bytes have come.
        self.received = 0
        #: Whether nothing more will come: the other end is closed, or its process has ended.
        self.is_at_end = False
        #: Whether nothing more can be sent; what the other end had said before can be read still.
        self.is_stalled = False

    def fileno(self) -> int:
        """The socket; -1 once it is closed."""
        return self._sock.fileno()

    def put(self, payload: bytes) -> None:
        """Have a frame sent when there is room; see `flush`.

        Raises:
            WireError: it is larger than a frame may be.
        """
        if len(payload) > MAX_FRAME_BYTES:
            raise TransportError(
                f"a message has {len(payload)} bytes; {MAX_FRAME_BYTES} are possible at most."
            )
        if not self.is_stalled:
            self._waiting += (memoryview(_HEADER.pack(len(payload))), memoryview(payload))
            self.waiting += _HEADER.size + len(payload)

    def flush(self) -> None:
        """Send as much as the socket takes now."""
        while self._waiting:
            try:
                sent = self._sock.send(self._waiting[0])
            except BlockingIOError:
                return
            except OSError:  # nobody reads it any more
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
        """The frames that are complete; reads `RECEIVE_BYTES` at most.

        Raises:
            WireError: what comes cannot be read.
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

    def close(self) -> None:
        """Close the socket."""
        self._sock.close()
        self.is_at_end = self.is_stalled = True
        self._waiting.clear()
        self.waiting = 0
