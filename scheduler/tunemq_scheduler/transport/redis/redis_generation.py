"""`RedisGeneration`: detects whether Redis lost data.

Redis holds a random key, the generation. The generation changes when that key is missing or
different, when a stream is missing, or when Redis was restarted (it may have lost its last second,
even with persistence). Nodes then register again and resend all events that are not journalled.

The key names the run of Redis in which it was created, because Redis may restart while no scheduler
is running.
"""

from __future__ import annotations

import secrets
import time
from collections.abc import Mapping, Sequence
from typing import Any, Final

from tunemq_scheduler.transport.deregistered_nodes import place_of
from tunemq_scheduler.transport.redis.redis_connection import (
    RedisCommand,
    RedisConnection,
    RedisFull,
)
from tunemq_scheduler.transport.redis.stream_reader import StreamEntry
from tunemq_shared.base.errors import RedisUnavailable, TransportError
from tunemq_shared.broker import redis_keys

#: The number of answers that `RedisGeneration.begins` takes.
QUESTIONS: Final = 2
#: How far an entry's id may be ahead of Redis' clock, which may have been set back by some hours.
_AHEAD_AT_MOST_MS: Final = 86_400_000


class RedisGeneration:
    """The current generation, as this scheduler knows it.

    Args:
        line: a connection that is open at every call, except where a method says otherwise.
    """

    def __init__(self, line: RedisConnection) -> None:
        self._connection = line
        #: How many generations have begun since this object exists.
        self.begun = 0
        self._known: bytes | None = None
        self._run_id = ""
        #: The keys of the streams that must exist.
        self._streams = [redis_keys.NODES]

    def add(self, events_key: str) -> None:
        """Create a stream, which must exist from now on.

        Raises:
            TransportError: Redis could not create it.
        """
        self._make(events_key)
        self._streams.append(events_key)

    def remove(self, events_key: str) -> None:
        """Stop expecting a stream; needs no connection."""
        if events_key in self._streams:
            self._streams.remove(events_key)

    @property
    def questions(self) -> tuple[RedisCommand, ...]:
        """The commands whose answers `begins` takes."""
        return ("GET", redis_keys.GENERATION), ("EXISTS", *self._streams)

    def begins(self, answers: Sequence[Any]) -> bool:
        """Check Redis' answers to the questions.

        Returns:
            Whether a new generation has begun, so that everything is read and sent again.

        Raises:
            TransportError: the new generation could not be set up; call it again.
        """
        generation, are_there = answers
        is_known = generation is not None and generation == self._known
        if is_known and are_there == len(self._streams):
            return False
        self._begin(generation, self._run_id)
        return True

    def begins_with_link(self, signer: str = "") -> bool:
        """Check the same after a new connection was made.

        Args:
            signer: the id of the key that this scheduler signs with; empty without keys.
        """
        run, begins = _run_id(self._connection), True
        *answers, signs = self._connection.ask([*self.questions, ("GET", redis_keys.SIGNS)])
        if self._known is None and (signer or signs):
            # An earlier scheduler may have had other keys, and have rejected and deleted messages
            # of nodes.
            self._connection.ask([("DEL", redis_keys.GENERATION)])
            self._begin(None, run)
        elif run != self._run_id:
            self._begin(answers[0], run)
        else:
            begins = self.begins(answers)
        self._run_id = run  # not before: a failed attempt is repeated
        return begins

    def renew(self, streams: Sequence[str] = ()) -> None:
        """Begin a new generation, with these streams emptied.

        Args:
            streams: streams with missing entries, or that accept no more. Events of ended nodes in
                them are lost, so pass only those for which that is unavoidable.
        """
        # Delete the generation first: without it, no node appends events that it had prepared.
        emptied = [("DEL", *streams)] if streams else []
        self._connection.ask([("DEL", redis_keys.GENERATION), *emptied])
        self._begin(None, self._run_id)

    def exhausted(self, taken: Mapping[bytes, Sequence[StreamEntry]]) -> list[str]:
        """Return the streams that can accept no more entries.

        A client may append an entry with any id, and later entries must have greater ids. After an
        entry with the greatest id, none can follow.

        Args:
            taken: the entries that were read, by stream.

        Raises:
            RedisUnavailable: Redis cannot be reached.
        """
        places = {key.decode(): place_of(entries[-1][0])[0] for key, entries in taken.items()}
        if max(places.values(), default=0) <= time.time() * 1000 + _AHEAD_AT_MOST_MS:
            return []
        ((seconds, _),) = self._connection.ask([("TIME",)])  # this machine's clock may be wrong
        latest = int(seconds) * 1000 + _AHEAD_AT_MOST_MS
        return [key for key, milliseconds in places.items() if milliseconds > latest]

    def _begin(self, generation: bytes | None, run: str) -> None:
        """Adopt the generation that exists, or create a new one.

        An existing one counts if another scheduler set it in this run of Redis.
        """
        # Create the streams before the generation that nodes wait for, so that nodes find them.
        for key in self._streams:
            self._make(key)
        is_old = generation is not None and not generation.endswith(f"@{run}".encode())
        if generation is None or generation == self._known or is_old:
            fresh = f"{secrets.token_hex(8)}@{run}"
            only_if_none = ("NX",) if generation is None else ()
            setting = [
                ("SET", redis_keys.GENERATION, fresh, *only_if_none),
                ("GET", redis_keys.GENERATION),
            ]
            generation = self._connection.ask(setting)[1]
        self._known = generation
        self.begun += 1

    def _make(self, key: str) -> None:
        """Create an empty stream, by creating and deleting a consumer group."""
        make = ("XGROUP", "CREATE", key, "maker", "$", "MKSTREAM")
        self._connection.ask([make, ("XGROUP", "DESTROY", key, "maker")])


def _run_id(line: RedisConnection) -> str:
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
