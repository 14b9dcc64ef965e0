"""Redis and its memory: whether it may evict what is ours, and what is told when it is full.

A Redis that evicts keys takes a node's queue or the stream of results for a cache. One that is full
and evicts nothing refuses what needs memory: then nodes keep their results, orders wait, nobody's
silence counts, and all of it goes on when there is room.
"""

from __future__ import annotations

import time
from typing import Final

from tunemq_scheduler.executors.redis_line import Command, RedisFull, RedisLine
from tunemq_shared import wire
from tunemq_shared.errors import ConfigError, WireError, WireUnavailable

#: Refused by a Redis that is full, and without effect otherwise, on a key that is missing as well.
PROBE: Final[Command] = ("SETRANGE", wire.GENERATION, "0", "")
_SAFE: Final = "noeviction"


def check_policy(line: RedisLine) -> list[str]:
    """Look whether Redis may evict our keys; returns what a person should know.

    Raises:
        ConfigError: it evicts keys when its memory is used up; says what to do.
        WireUnavailable: it went away.
    """
    told = _info(line, "memory")
    policy, limit = told.get("maxmemory_policy", _SAFE), told.get("maxmemory", "0")
    if policy == _SAFE:
        return []
    what = f"Redis at {line.address} has the maxmemory-policy {policy}"
    fix = f"redis-cli CONFIG SET maxmemory-policy {_SAFE}, and the same line in redis.conf"
    if limit != "0":
        raise ConfigError(
            f"{what}: when its {told.get('maxmemory_human', limit)} are used up it deletes orders "
            f"and results of trials. Have it refuse instead: {fix}."
        )
    return [f"{what}; should it get a maxmemory, it will delete results of trials: {fix}."]


def run_id(line: RedisLine) -> str:
    """Which run of a Redis process this is; empty where we may not ask.

    Raises:
        WireUnavailable: it went away.
    """
    return _info(line, "server").get("run_id", "")


class RedisRoom:
    """Since when Redis has been full, if it is."""

    def __init__(self) -> None:
        self.full_since: float | None = None
        self._news: list[str] = []

    def is_used_up(self, error: WireError) -> None:
        """It refused something for want of memory."""
        if self.full_since is None:
            self.full_since = time.monotonic()
            self._news.append(
                f"{error}. Trials go on, and wait when their nodes have no room for results "
                "either; nothing is lost. Give Redis more memory: redis-cli CONFIG SET maxmemory."
            )

    def is_back(self) -> bool:
        """It took something that needs memory; returns whether it had been full."""
        if self.full_since is None:
            return False
        seconds = time.monotonic() - self.full_since
        self.full_since = None
        self._news.append(f"Redis has room again after {seconds:.0f} s.")
        return True

    def notes(self) -> list[str]:
        """While it is full, that it is."""
        if self.full_since is None:
            return []
        seconds = time.monotonic() - self.full_since
        return [f"Redis has been full for {seconds:.0f} s: results and orders wait."]

    def news(self) -> list[str]:
        """What happened since the last call."""
        news, self._news = self._news, []
        return news


def _info(line: RedisLine, section: str) -> dict[str, str]:
    """What Redis says of itself; nothing where we may not ask."""
    try:
        (text,) = line.ask([("INFO", section)])
    except (WireUnavailable, RedisFull):
        raise
    except WireError:  # whoever set up permissions knows what it is
        return {}
    lines = text.decode(errors="replace").splitlines()
    return dict(one.split(":", 1) for one in lines if ":" in one)
