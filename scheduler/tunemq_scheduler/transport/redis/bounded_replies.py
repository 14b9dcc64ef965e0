"""`BoundedParser`: redis-py's parser with a limit on the size of replies.

Other clients decide how long replies are. Redis has no command that returns the length of a stream
entry, and none that reads up to a number of bytes. But each string of a reply begins with its
length, so the parser leaves strings unread that are too long.
"""

from __future__ import annotations

from typing import Any, Final

from redis._parsers import _RESP2Parser
from redis._parsers.socket import SocketBuffer
from redis.exceptions import RedisError

from tunemq_shared.protocol.message_limits import EVENTS_BYTES

#: The longest string, which is a batch with one long event; and the total of a reply.
STRING_BYTES: Final = EVENTS_BYTES + 2**20
REPLY_BYTES: Final = 64 * 2**20
#: Python's overhead for a short string.
_OVERHEAD_BYTES: Final = 64


class TooLong(RedisError):
    """A reply exceeds the memory limit."""


class _Buffer(SocketBuffer):
    room = REPLY_BYTES

    def read(self, length: int, timeout: object = None) -> bytes:
        """Return the next string; uses only the connection's own timeout."""
        del timeout
        room = self.room = self.room - length - _OVERHEAD_BYTES
        if room < 0 or length > STRING_BYTES:
            raise TooLong(f"a reply has more than {REPLY_BYTES} bytes, or a string too long")
        length += 2  # the line end; inlined from the original, because a call more is slower
        data = self._buffer.read(length)
        missing = length - len(data)
        if missing:
            self._read_from_socket(missing)
            data += self._buffer.read(missing)
        return data[:-2]


class BoundedParser(_RESP2Parser):
    """A parser whose connection closes when a reply is too long."""

    def on_connect(self, connection: Any) -> None:
        """Start reading from a new socket."""
        super().on_connect(connection)  # type: ignore[no-untyped-call]
        self._buffer: Any = _Buffer(
            connection._sock,  # noqa: SLF001  as it does itself
            self.socket_read_size,
            connection.socket_timeout,
        )

    def read_response(self, *args: Any, **kwargs: Any) -> Any:
        """Read one reply."""
        if self._buffer is not None:
            self._buffer.room = REPLY_BYTES
        return super().read_response(*args, **kwargs)
