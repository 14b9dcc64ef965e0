"""`BoundedParser` uses parts of redis-py that are not public; no public part limits a reply.

A redis-py without them must fail here and not drop the limit silently.
"""

from __future__ import annotations

import inspect
import io
from types import SimpleNamespace
from typing import Any

import pytest
import redis
from redis._parsers import _RESP2Parser
from redis._parsers.socket import SocketBuffer
from redis.connection import Connection

from tunemq_scheduler.transport.redis import bounded_replies
from tunemq_scheduler.transport.redis.bounded_replies import STRING_BYTES, BoundedParser, TooLong

_LACKS = f"redis-py {redis.__version__} changed what bounded_replies.py relies on: "


class FakeSocket:
    """A socket that has these bytes to read."""

    def __init__(self, data: bytes) -> None:
        self._data = io.BytesIO(data)

    def recv(self, size: int) -> bytes:
        """Return the next bytes."""
        data = self._data.read(size)
        assert data, "the parser reads beyond the limit"
        return data

    def settimeout(self, timeout: object) -> None:
        """Ignore the time limit."""

    def shutdown(self, how: int) -> None:
        """Do nothing."""

    def close(self) -> None:
        """Do nothing."""


def read(data: bytes) -> Any:
    """Parse a reply on a connection to a server that sends these bytes."""
    connection: Any = Connection(parser_class=BoundedParser, protocol=2)
    parser = connection._parser
    assert isinstance(parser, BoundedParser), f"{_LACKS}parser_class"
    connection._sock = FakeSocket(data)
    parser.on_connect(connection)
    return parser.read_response()


def test_redis_py_has_the_private_parts_that_bounded_replies_uses():
    buffer: Any = SocketBuffer(SimpleNamespace(), 1, 1.0)
    assert hasattr(buffer._buffer, "read"), f"{_LACKS}SocketBuffer._buffer"
    assert next(iter(inspect.signature(buffer._read_from_socket).parameters)) == "length", _LACKS
    assert next(iter(inspect.signature(buffer.read).parameters)) == "length", _LACKS
    assert getattr(_RESP2Parser(1), "_buffer", ...) is None, f"{_LACKS}_RESP2Parser._buffer"
    assert getattr(Connection(), "_sock", ...) is None, f"{_LACKS}Connection._sock"


def test_reply_within_the_limits_is_read():
    assert read(b"*2\r\n$3\r\nabc\r\n:7\r\n") == [b"abc", 7]


def test_string_longer_than_the_limit_is_rejected_before_it_is_read():
    with pytest.raises(TooLong):
        read(b"$%d\r\n" % (STRING_BYTES + 1))


def test_reply_of_many_strings_beyond_the_limit_is_rejected(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(bounded_replies, "REPLY_BYTES", 1000)
    assert len(read(b"*5\r\n" + b"$3\r\nabc\r\n" * 5)) == 5
    with pytest.raises(TooLong):
        read(b"*50\r\n" + b"$3\r\nabc\r\n" * 50)
