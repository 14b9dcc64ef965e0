"""`RedisLink`: the connections to one Redis, which may go away, refuse, and come back."""

from __future__ import annotations

import time
from collections.abc import Iterable, Sequence
from typing import Final, Protocol

from tunemq_scheduler.transport.redis.celery_publisher import CeleryPublisher
from tunemq_scheduler.transport.redis.redis_connection import RedisCommand, RedisConnection
from tunemq_scheduler.transport.redis.stream_reader import StreamReader
from tunemq_shared.base.errors import RedisUnavailable, TransportError
from tunemq_shared.broker.redis_dangers import LACKS_RIGHTS

#: Pauses between attempts to reach a Redis that is away.
RETRY_EVERY_S: Final = 0.1
#: A right that is missing is told again where it was not for so long.
_TOLD_FOR_S: Final = 60.0


class EmbeddedServices(Protocol):
    """What keeps Redis and the nodes alive, where that is ours: the embedded farm."""

    def trouble(self) -> str | None:
        """Why it will never work again, if so."""

    def notices(self) -> list[str]:
        """What happened since the last call that a person should know."""

    def excuse_node(self) -> None:
        """A node died while it had trials: one of them may have done it, and is judged for it."""


class LeaseGuard(Protocol):
    """Whose the nodes are, where several schedulers may think that they are theirs: a farm."""

    def check_known(self) -> None:
        """Return unless it is known already that they are another's; takes no time."""

    def guarded(self, commands: Sequence[RedisCommand]) -> RedisCommand:
        """One command that does all of these, unless they are another's."""

    def taking(self, events_keys: Iterable[str]) -> RedisCommand:
        """Makes these the farm's streams, and deletes those that were; unless it is another's."""


class RedisLink:
    """One connection for commands, one for reading streams, one for publishing orders.

    Args:
        url: where Redis is: ``unix://``, ``redis://`` or ``rediss://``.
        guard: what is posted is done only as long as it lets us.
        backing: asked whether there is hope.
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
        #: What happened since it was looked at that people should know.
        self.notices: list[str] = []
        self._told, self._told_until = "", 0.0
        #: When to try again, while it is away.
        self.retry_due = 0.0

    @property
    def is_away(self) -> bool:
        """Whether nobody can be told anything."""
        return self._away_since is not None

    def post(self, commands: Sequence[RedisCommand]) -> None:
        """Send commands, in a farm only while we hold its lease; see `RedisConnection.post`."""
        self.line.post(commands if self._guard is None else [self._guard.guarded(commands)])

    def lost(self, error: TransportError) -> None:
        """Redis is away, or refuses: go on without it, and try again soon.

        Raises:
            WireUnavailable: it is the embedded one, and it will not come back.
        """
        now = time.monotonic()
        self.retry_due = now + RETRY_EVERY_S
        if self._away_since is None:
            self._away_since = now
        self._away_because = str(error)
        if LACKS_RIGHTS in self._away_because:
            if self._away_because != self._told or now > self._told_until:
                self.notices.append(f"{error}. The scheduler waits for that; trials go on.")
            self._told, self._told_until = self._away_because, now + _TOLD_FOR_S
        self.close()
        self.ask_backing()

    def is_back(self) -> None:
        """Redis can be reached, and does what it is asked for."""
        self._away_since = None

    def ask_backing(self) -> None:
        """Return if there is hope.

        Raises:
            WireUnavailable: there is none.
        """
        trouble = self._backing.trouble() if self._backing is not None else None
        if trouble is not None:
            raise RedisUnavailable(f"The embedded farm cannot be used any more: {trouble}.")

    def notes(self) -> list[str]:
        """While Redis is away, that it is."""
        if self._away_since is None:
            return []
        seconds = time.monotonic() - self._away_since
        away = f"Redis has been away for {seconds:.0f} s ({self._away_because})"
        return [f"{away} The trials go on; their results come when it is back."]

    def close(self) -> None:
        """Close the connections; using them opens them again."""
        self.line.close()
        self.reader.reset()
        self.publisher.close()
