"""`RedisLink`: the connections to one Redis, which may go away, be full, and come back.

A full Redis rejects writes: nodes keep their results, orders wait, and silence of nodes does not
count, until it has memory again. `tunemq_scheduler.security.redis_probes` rejects a Redis that
evicts keys when a farm's scheduler starts.
"""

from __future__ import annotations

import time
from collections.abc import Iterable, Sequence
from typing import Final, Protocol

from tunemq_scheduler.transport.redis.celery_publisher import CeleryPublisher
from tunemq_scheduler.transport.redis.redis_connection import RedisCommand, RedisConnection
from tunemq_scheduler.transport.redis.stream_reader import StreamReader
from tunemq_shared.base.errors import RedisRejectsUser, RedisUnavailable, TransportError
from tunemq_shared.broker.redis_dangers import LACKS_RIGHTS

#: The pause between attempts to reach a Redis that is away.
RETRY_EVERY_S: Final = 0.1
#: A missing right is reported again if it was not reported for this long.
_TOLD_FOR_S: Final = 60.0


class EmbeddedServices(Protocol):
    """The embedded farm, which keeps Redis and the node running."""

    def trouble(self) -> str | None:
        """Return why the embedded farm has failed for good; None if it has not."""

    def notices(self) -> list[str]:
        """Return notices since the last call."""

    def excuse_node(self) -> None:
        """Ignore one node death, because a trial may have caused it and is judged for it."""


class LeaseGuard(Protocol):
    """The lease of a farm, for which several schedulers may compete."""

    def check_known(self) -> None:
        """Raise if it is already known that another scheduler has the lease; takes no time."""

    def guarded(self, commands: Sequence[RedisCommand]) -> RedisCommand:
        """Return one command that runs all of these only while the lease is held."""

    def taking(self, events_keys: Iterable[str]) -> RedisCommand:
        """Return a command that replaces the farm's streams, only while the lease is held."""


class RedisLink:
    """Three connections: for commands, for reading streams, for publishing orders.

    Args:
        url: the Redis address: ``unix://``, ``redis://`` or ``rediss://``.
        guard: allows posted commands only while it holds the farm's lease.
        backing: the embedded services; None if Redis is not theirs.
    """

    def __init__(
        self, url: str, guard: LeaseGuard | None, backing: EmbeddedServices | None
    ) -> None:
        self.line = RedisConnection(url)
        self.reader = StreamReader(RedisConnection(url))
        self.publisher = CeleryPublisher(url)
        self._guard, self._backing = guard, backing
        self._away_since: float | None = None
        self._away_because = ""
        self._full_since: float | None = None
        #: Notices that were not shown yet.
        self.notices: list[str] = []
        self._told, self._told_until = "", 0.0
        #: When to try again while Redis is away.
        self.retry_due = 0.0

    @property
    def is_away(self) -> bool:
        """Whether Redis cannot be reached."""
        return self._away_since is not None

    def post(self, commands: Sequence[RedisCommand]) -> None:
        """Send commands, on a farm only with its lease; see `RedisConnection.post`."""
        self.line.post(commands if self._guard is None else [self._guard.guarded(commands)])

    def lost(self, error: TransportError) -> None:
        """Record that Redis is away or rejects commands, and try again soon.

        Raises:
            RedisUnavailable: the embedded Redis has failed for good.
        """
        now = time.monotonic()
        self.retry_due = now + RETRY_EVERY_S
        if self._away_since is None:
            self._away_since = now
        self._away_because = str(error)
        if isinstance(error, RedisRejectsUser) or LACKS_RIGHTS in self._away_because:
            if self._away_because != self._told or now > self._told_until:
                why = self._away_because.rstrip(".")
                self.notices.append(f"{why}. The scheduler waits for that; trials continue.")
            self._told, self._told_until = self._away_because, now + _TOLD_FOR_S
        self.close()
        self.ask_backing()

    def is_back(self) -> None:
        """Record that Redis can be reached and runs commands."""
        self._away_since = None

    @property
    def full_s(self) -> float:
        """For how many seconds Redis has been full; 0 if it is not."""
        return 0.0 if self._full_since is None else time.monotonic() - self._full_since

    def is_used_up(self, error: TransportError) -> None:
        """Record that Redis rejected a write for lack of memory."""
        if self._full_since is None:
            self._full_since = time.monotonic()
            self.notices.append(
                f"{error} Trials continue, and wait when their nodes have no room for results;"
                " nothing is lost."
            )

    def has_room(self) -> bool:
        """Record that Redis accepted such a write; return whether it had been full."""
        if self._full_since is None:
            return False
        self.notices.append(f"Redis has room again after {self.full_s:.0f} s.")
        self._full_since = None
        return True

    def ask_backing(self) -> None:
        """Check whether the embedded farm can recover.

        Raises:
            RedisUnavailable: it cannot.
        """
        trouble = self._backing.trouble() if self._backing is not None else None
        if trouble is not None:
            raise RedisUnavailable(f"The embedded farm cannot be used any more: {trouble}.")

    def notes(self) -> list[str]:
        """Return that Redis is away or full, as text; empty if it is neither."""
        if self._away_since is not None:
            seconds = time.monotonic() - self._away_since
            away = f"Redis has been away for {seconds:.0f} s ({self._away_because})"
            return [f"{away} The trials continue; their results come when it is back."]
        if self._full_since is not None:
            return [f"Redis has been full for {self.full_s:.0f} s: results and orders wait."]
        return []

    def close(self) -> None:
        """Close the connections; the next use opens them again."""
        self.line.close()
        self.reader.reset()
        self.publisher.close()
