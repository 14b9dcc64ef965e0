"""Redis and its memory: what is told when it is full.

It refuses what needs memory then: nodes keep their results, orders wait, nobody's silence counts,
and all of it goes on when there is room. One that makes room by deleting what is ours is refused
when a farm's scheduler starts (`tunemq_scheduler.security.redis_probes`).
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

#: Refused by a Redis that is full, and without effect otherwise, on a key that is missing as well.
PROBE: Final[RedisCommand] = ("SETRANGE", redis_keys.GENERATION, "0", "")


def run_id(line: RedisConnection) -> str:
    """Which run of a Redis process this is; empty where we may not ask.

    Raises:
        WireUnavailable: it went away.
    """
    try:
        (text,) = line.ask([("INFO", "server")])
    except (RedisUnavailable, RedisFull):
        raise
    except TransportError:  # whoever set up permissions knows what it is
        return ""
    lines: list[str] = text.decode(errors="replace").splitlines()
    return dict(one.split(":", 1) for one in lines if ":" in one).get("run_id", "")


class RedisMemory:
    """Since when Redis has been full, if it is."""

    def __init__(self) -> None:
        self.full_since: float | None = None
        self._notices: list[str] = []

    @property
    def full_s(self) -> float:
        """For how many seconds it has been full; 0 while it is not."""
        return 0.0 if self.full_since is None else time.monotonic() - self.full_since

    def is_used_up(self, error: TransportError) -> None:
        """It refused something for want of memory."""
        if self.full_since is None:
            self.full_since = time.monotonic()
            self._notices.append(
                f"{error} Trials go on, and wait when their nodes have no room for results either;"
                " nothing is lost."
            )

    def is_back(self) -> bool:
        """It took something that needs memory; returns whether it had been full."""
        if self.full_since is None:
            return False
        seconds, self.full_since = self.full_s, None
        self._notices.append(f"Redis has room again after {seconds:.0f} s.")
        return True

    def notes(self) -> list[str]:
        """While it is full, that it is."""
        if self.full_since is None:
            return []
        return [f"Redis has been full for {self.full_s:.0f} s: results and orders wait."]

    def notices(self) -> list[str]:
        """What happened since the last call."""
        notices, self._notices = self._notices, []
        return notices
