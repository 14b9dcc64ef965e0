"""`BoundedParser`: redis-py's parser, for replies of which others decide how long they are.

Redis has no command that says how long an entry of a stream is, and none that reads up to a number
of bytes. But each string of a reply begins with its length, so what is too long is left unread.
"""

from __future__ import annotations

from typing import Any, Final

from redis._parsers import _RESP2Parser
from redis._parsers.socket import SocketBuffer
from redis.exceptions import RedisError

from tunemq_shared.protocol.message_limits import EVENTS_BYTES

#: The longest string: a batch with one long event; and all strings of a reply.
STRING_BYTES: Final = EVENTS_BYTES + 2**20
REPLY_BYTES: Final = 64 * 2**20
#: What a short string costs in Python beside its bytes.
_OVERHEAD_BYTES: Final = 64


class TooLong(RedisError):
    """A reply has more bytes than we have memory for."""


class _Buffer(SocketBuffer):
    room = REPLY_BYTES

    def read(self, length: int, timeout: object = None) -> bytes:
        """The next string; with the connection's timeout, as we ask for no other."""
        del timeout
        room = self.room = self.room - length - _OVERHEAD_BYTES
        if room < 0 or length > STRING_BYTES:
            raise TooLong(f"a reply has more than {REPLY_BYTES} bytes, or a string too long")
        length += 2  # the end of the line; as the original does, which a call more makes slower
        data = self._buffer.read(length)
        missing = length - len(data)
        if missing:
            self._read_from_socket(missing)
            data += self._buffer.read(missing)
        return data[:-2]


class BoundedParser(_RESP2Parser):
    """Of a connection that is closed by a reply that is too long."""

    def on_connect(self, connection: Any) -> None:
        """Read from a new socket."""
        super().on_connect(connection)  # type: ignore[no-untyped-call]
        self._buffer: Any = _Buffer(
            connection._sock,  # noqa: SLF001  as it does itself
            self.socket_read_size,
            connection.socket_timeout,
        )

    def read_response(self, *args: Any, **kwargs: Any) -> Any:
        """One reply."""
        if self._buffer is not None:
            self._buffer.room = REPLY_BYTES
        return super().read_response(*args, **kwargs)
