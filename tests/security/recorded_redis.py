"""Record all commands that a Redis receives."""

from __future__ import annotations

import contextlib
import threading
from typing import Any

import redis


class Overheard(threading.Thread):
    """Record all commands that a Redis receives, by MONITOR."""

    def __init__(self, client: redis.Redis) -> None:
        super().__init__(name="monitor", daemon=True)
        self._client = client
        self._lines: list[bytes] = []
        self._monitor: Any = None
        self.is_there = threading.Event()

    @property
    def said(self) -> bytes:
        """The commands so far."""
        return b"\n".join(self._lines)

    def run(self) -> None:
        """See `threading.Thread`."""
        connection = self._client.connection_pool.make_connection()
        connection.socket_timeout = None  # commands may be rare
        connection.connect()
        connection.send_command("MONITOR")
        connection.read_response(disable_decoding=True)
        self._monitor = connection
        self.is_there.set()
        with contextlib.suppress(redis.RedisError, OSError, ValueError, AttributeError):
            while True:
                self._lines.append(connection.read_response(disable_decoding=True))

    def stop(self) -> bytes:
        """Stop; return the text of `redis-cli monitor`, then the same with escapes decoded."""
        self._monitor._sock.shutdown(2)
        self.join()
        text = self.said
        return text + b"\n" + text.decode("unicode_escape").encode("latin-1", errors="replace")
