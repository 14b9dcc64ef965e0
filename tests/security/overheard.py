"""All that is said to a Redis."""

from __future__ import annotations

import contextlib
import threading
from typing import Any

import redis


class Overheard(threading.Thread):
    """All that is said to a Redis, by MONITOR."""

    def __init__(self, client: redis.Redis) -> None:
        super().__init__(name="monitor", daemon=True)
        self._client = client
        self._lines: list[bytes] = []
        self._monitor: Any = None
        self.is_there = threading.Event()

    @property
    def said(self) -> bytes:
        """What was said until now."""
        return b"\n".join(self._lines)

    def run(self) -> None:
        """See `threading.Thread`."""
        connection = self._client.connection_pool.make_connection()
        connection.socket_timeout = None  # nothing may be said for long
        connection.connect()
        connection.send_command("MONITOR")
        connection.read_response(disable_decoding=True)
        self._monitor = connection
        self.is_there.set()
        with contextlib.suppress(redis.RedisError, OSError, ValueError, AttributeError):
            while True:
                self._lines.append(connection.read_response(disable_decoding=True))

    def stop(self) -> bytes:
        """What was said, as `redis-cli monitor` would print it, and with its escapes undone."""
        self._monitor._sock.shutdown(2)
        self.join()
        text = self.said
        return text + b"\n" + text.decode("unicode_escape").encode("latin-1", errors="replace")
