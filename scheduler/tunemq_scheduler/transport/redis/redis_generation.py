"""`RedisGeneration`: whether Redis still has what was put into it.

The wire has a random key. Where that is gone or another one, where a stream is missing, or Redis
was started again (it may have lost its last second, whatever it keeps on disk), the wire begins
anew: with a new key, at which nodes introduce themselves again and send whatever is not journalled.

The key names the run of Redis in which it was made, because that may have ended while there was no
scheduler to see it.
"""

from __future__ import annotations

import secrets
import time
from collections.abc import Mapping, Sequence
from typing import Any, Final

from tunemq_scheduler.transport.departures import place_of
from tunemq_scheduler.transport.redis.redis_connection import RedisCommand, RedisConnection
from tunemq_scheduler.transport.redis.redis_memory import run_id
from tunemq_scheduler.transport.redis.stream_reader import StreamEntry
from tunemq_shared.broker import redis_keys

#: How many answers `RedisGeneration.begins` wants.
QUESTIONS: Final = 2
#: An entry's id may be so far ahead of Redis' clock: that may have been set back by some hours.
_AHEAD_AT_MOST_MS: Final = 86_400_000


class RedisGeneration:
    """The wire's generation as this scheduler knows it.

    Args:
        line: an open connection, at every call that is not said to need none.
    """

    def __init__(self, line: RedisConnection) -> None:
        self._connection = line
        #: How many have begun since we look.
        self.begun = 0
        self._known: bytes | None = None
        self._run_id = ""
        #: The streams that have to be there, by their keys.
        self._streams = [redis_keys.NODES]

    def add(self, events_key: str) -> None:
        """Make a stream, which has to be there from now on.

        Raises:
            WireError: it could not be made.
        """
        self._make(events_key)
        self._streams.append(events_key)

    def remove(self, events_key: str) -> None:
        """A stream need not be there any longer; needs no connection."""
        if events_key in self._streams:
            self._streams.remove(events_key)

    @property
    def questions(self) -> tuple[RedisCommand, ...]:
        """What to ask Redis for `begins`."""
        return ("GET", redis_keys.GENERATION), ("EXISTS", *self._streams)

    def begins(self, answers: Sequence[Any]) -> bool:
        """Compare what Redis answered to the questions.

        Returns:
            Whether a generation has begun: all is to be read from the beginning, and said again.

        Raises:
            WireError: the wire could not be made anew; ask again.
        """
        generation, are_there = answers
        is_known = generation is not None and generation == self._known
        if is_known and are_there == len(self._streams):
            return False
        self._begin(generation, self._run_id)
        return True

    def begins_with_link(self, signer: str = "") -> bool:
        """The same, after a connection was made.

        Args:
            signer: the id of the key that this scheduler signs with; empty without keys.
        """
        run, begins = run_id(self._connection), True
        *answers, signs = self._connection.ask([*self.questions, ("GET", redis_keys.SIGNS)])
        if self._known is None and (signer or signs):
            # Who was here before may have had other keys, and have thrown away what nodes said.
            self._connection.ask([("DEL", redis_keys.GENERATION)])
            self._begin(None, run)
        elif run != self._run_id:
            self._begin(answers[0], run)
        else:
            begins = self.begins(answers)
        self._run_id = run  # not before: an attempt that failed is made again
        return begins

    def renew(self, streams: Sequence[str] = ()) -> None:
        """Begin anew, with these streams empty.

        Args:
            streams: those in which something is missing, or that take nothing any more. What nodes
                that have ended said in them is lost; so only where it must be.
        """
        # The generation goes first: without it no node appends what it had in its hands.
        emptied = [("DEL", *streams)] if streams else []
        self._connection.ask([("DEL", redis_keys.GENERATION), *emptied])
        self._begin(None, self._run_id)

    def exhausted(self, taken: Mapping[bytes, Sequence[StreamEntry]]) -> list[str]:
        """The streams that somebody has brought to an end.

        An entry may be appended with any id, and none after it has a lower one: behind the greatest
        there is none.

        Args:
            taken: what was read, by stream.

        Raises:
            WireUnavailable: Redis cannot be reached.
        """
        places = {key.decode(): place_of(entries[-1][0])[0] for key, entries in taken.items()}
        if max(places.values(), default=0) <= time.time() * 1000 + _AHEAD_AT_MOST_MS:
            return []
        ((seconds, _),) = self._connection.ask([("TIME",)])  # our clock may be wrong
        latest = int(seconds) * 1000 + _AHEAD_AT_MOST_MS
        return [key for key, milliseconds in places.items() if milliseconds > latest]

    def _begin(self, generation: bytes | None, run: str) -> None:
        """Begin with the generation that is there, else with a new one.

        What is there counts if somebody else set it in this run of Redis.
        """
        # The streams are there before the generation that nodes wait for, so that none finds them
        # missing.
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
        """This is how an empty stream is made."""
        make = ("XGROUP", "CREATE", key, "maker", "$", "MKSTREAM")
        self._connection.ask([make, ("XGROUP", "DESTROY", key, "maker")])
