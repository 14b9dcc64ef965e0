"""`RedisMemory`: tracks whether Redis is full, and reports it.

A full Redis rejects writes: nodes keep their results, orders wait, and silence of nodes does not
count, until it has memory again. `tunemq_scheduler.security.redis_probes` rejects a Redis that
evicts keys when a farm's scheduler starts.
"""

from __future__ import annotations

import time
from typing import Final

from tunemq_scheduler.transport.redis.redis_connection import (
    RedisCommand,
    RedisConnection,
    RedisFull,
)
from tunemq_shared.base.errors import RedisUnavailable, TransportError
from tunemq_shared.broker import redis_keys

#: A full Redis rejects this command; otherwise it has no effect, also on a missing key.
PROBE: Final[RedisCommand] = ("SETRANGE", redis_keys.GENERATION, "0", "")


def run_id(line: RedisConnection) -> str:
    """Return the id of the running Redis process; empty without the right to ask.

    Raises:
        RedisUnavailable: Redis went away.
    """
    try:
        (text,) = line.ask([("INFO", "server")])
    except (RedisUnavailable, RedisFull):
        raise
    except TransportError:  # the administrator withheld this right on purpose
        return ""
    lines: list[str] = text.decode(errors="replace").splitlines()
    return dict(one.split(":", 1) for one in lines if ":" in one).get("run_id", "")


class RedisMemory:
    """Since when Redis has been full."""

    def __init__(self) -> None:
        self.full_since: float | None = None
        self._notices: list[str] = []

    @property
    def full_s(self) -> float:
        """For how many seconds Redis has been full; 0 if it is not."""
        return 0.0 if self.full_since is None else time.monotonic() - self.full_since

    def is_used_up(self, error: TransportError) -> None:
        """Record that Redis rejected a write for lack of memory."""
        if self.full_since is None:
            self.full_since = time.monotonic()
            self._notices.append(
                f"{error} Trials go on, and wait when their nodes have no room for results either;"
                " nothing is lost."
            )

    def is_back(self) -> bool:
        """Record that Redis accepted such a write; return whether it had been full."""
        if self.full_since is None:
            return False
        seconds, self.full_since = self.full_s, None
        self._notices.append(f"Redis has room again after {seconds:.0f} s.")
        return True

    def notes(self) -> list[str]:
        """Return that Redis is full, as text; empty if it is not."""
        if self.full_since is None:
            return []
        return [f"Redis has been full for {self.full_s:.0f} s: results and orders wait."]

    def notices(self) -> list[str]:
        """Return what happened since the last call."""
        notices, self._notices = self._notices, []
        return notices
