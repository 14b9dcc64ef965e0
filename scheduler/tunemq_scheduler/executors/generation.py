"""`Generation`: whether Redis still has what was put into it.

The wire has a random key. Where that is gone or another one, where a stream is missing, or Redis
was started again (it may have lost its last second, whatever it keeps on disk), the wire begins
anew: with a new key, at which nodes introduce themselves again and send whatever is not journalled.

The key names the run of Redis in which it was made, because that may have ended while there was no
scheduler to see it.
"""

from __future__ import annotations

import secrets
from collections.abc import Sequence
from typing import Any, Final

from tunemq_scheduler.executors.redis_line import Command, RedisLine
from tunemq_scheduler.executors.redis_room import run_id
from tunemq_shared import defences, wire

#: How many answers `Generation.begins` wants.
QUESTIONS: Final = 3


class Generation:
    """The wire's generation as this scheduler knows it.

    Args:
        line: an open connection, at every call.
        events_key: of the stream that is ours.
    """

    def __init__(self, line: RedisLine, events_key: str) -> None:
        self._line, self._events_key = line, events_key
        #: How many have begun since we look.
        self.begun = 0
        self._known: bytes | None = None
        self._run_id = ""
        self.questions: tuple[Command, ...] = (
            ("GET", wire.GENERATION),
            ("EXISTS", events_key),
            ("EXISTS", wire.NODES),
        )

    def begins(self, answers: Sequence[Any]) -> bool:
        """Compare what Redis answered to the questions.

        Returns:
            Whether a generation has begun: all is to be read from the beginning, and said again.

        Raises:
            WireError: the wire could not be made anew; ask again.
        """
        generation, *are_there = answers
        if generation is not None and generation == self._known and all(are_there):
            return False
        return self._begin(generation, self._run_id)

    def begins_with_link(self) -> bool:
        """The same, after a connection was made."""
        run = run_id(self._line)
        answers = self._line.ask(self.questions)
        begins = self._begin(answers[0], run) if run != self._run_id else self.begins(answers)
        self._run_id = run  # not before: an attempt that failed is made again
        return begins

    def renew(self) -> bool:
        """Events are missing between others: begin anew; returns whether it did."""
        if not defences.GENERATION:
            return False
        # The generation goes first: without it no node appends what it had in its hands.
        self._line.ask([("DEL", wire.GENERATION), ("DEL", self._events_key)])
        return self._begin(None, self._run_id)

    def _begin(self, generation: bytes | None, run: str) -> bool:
        """Begin with the generation that is there, else with a new one.

        What is there counts if somebody else set it in this run of Redis.
        """
        if self._known is not None and not defences.GENERATION:
            return False
        # The streams are there before the generation that nodes wait for, so that none finds them
        # missing. This is how an empty one is made.
        for key in (self._events_key, wire.NODES):
            make = ("XGROUP", "CREATE", key, "maker", "$", "MKSTREAM")
            self._line.ask([make, ("XGROUP", "DESTROY", key, "maker")])
        is_old = generation is not None and not generation.endswith(f"@{run}".encode())
        if generation is None or generation == self._known or is_old:
            fresh = f"{secrets.token_hex(8)}@{run}"
            only_if_none = ("NX",) if generation is None else ()
            setting = [("SET", wire.GENERATION, fresh, *only_if_none), ("GET", wire.GENERATION)]
            generation = self._line.ask(setting)[1]
        self._known = generation
        self.begun += 1
        return True
