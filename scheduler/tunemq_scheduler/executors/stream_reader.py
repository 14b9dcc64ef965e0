"""`StreamReader`: new entries of a few Redis streams, with a read always outstanding.

The next ``XREAD`` is asked as soon as the last one is answered. So an entry is on its way the
moment it is appended, and waiting for one is waiting for a socket, which a wake-up or a signal can
end at once without disturbing the connection.
"""

from __future__ import annotations

import select
import time
from collections.abc import Iterable
from typing import Final

from tunemq_scheduler.executors.redis_line import RedisLine
from tunemq_shared.errors import WireUnavailable

#: An entry: its id and its fields.
StreamEntry = tuple[bytes, dict[bytes, bytes]]

#: Entries of one stream in one answer; a batch of events has at most a quarter of a MiB.
COUNT: Final = 32
_BEGINNING: Final = b"0-0"
#: Redis answers "nothing" after so long, which shows that the connection is alive; one that has
#: died in silence is found a little later.
_BLOCK_S: Final = 4.0
_ANSWER_WITHIN_S: Final = _BLOCK_S + 4.0


class StreamReader:
    """Reads streams from their beginnings; `rewind` reads them from there again."""

    def __init__(self, line: RedisLine, keys: Iterable[str]) -> None:
        self._line = line
        self._cursors = {key.encode(): _BEGINNING for key in keys}
        self._asked_at: float | None = None

    def rewind(self) -> None:
        """Read from the beginning again."""
        self.reset()
        self._cursors = dict.fromkeys(self._cursors, _BEGINNING)

    def reset(self) -> None:
        """Drop the connection; the next `ask` opens another and reads on."""
        self._line.close()
        self._asked_at = None

    def ask(self) -> None:
        """Have a read outstanding.

        Raises:
            WireUnavailable: Redis cannot be reached.
        """
        if self._asked_at is not None:
            if time.monotonic() - self._asked_at > _ANSWER_WITHIN_S:
                self.reset()
                raise WireUnavailable(f"Redis at {self._line.address} does not answer any more.")
            return
        self._line.connect()
        block = str(int(_BLOCK_S * 1000))
        command = ("XREAD", "COUNT", str(COUNT), "BLOCK", block, "STREAMS")
        self._line.post([(*command, *self._cursors, *self._cursors.values())])
        self._asked_at = time.monotonic()

    def wait(self, seconds: float, wake: int) -> tuple[bool, bool]:
        """Wait for an answer, or for the descriptor ``wake`` to become readable.

        Returns:
            Whether `take` has something to take, and whether ``wake`` is readable.
        """
        watched = [wake] if self._asked_at is None else [wake, self._line.fileno()]
        poll = select.poll()  # not select.select: a script may have more than 1024 files open
        for descriptor in watched:
            poll.register(descriptor, select.POLLIN)
        ready = {descriptor for descriptor, _ in poll.poll(max(0.0, seconds) * 1000)}
        return bool(ready - {wake}), wake in ready

    def take(self) -> dict[bytes, list[StreamEntry]]:
        """The new entries by stream, and ask for the next ones.

        Raises:
            WireUnavailable: the connection broke; nothing is skipped.
        """
        try:
            answer = self._line.receive()
        finally:
            self._asked_at = None
        taken: dict[bytes, list[StreamEntry]] = {}
        for key, entries in answer or ():
            taken[key] = [
                (entry_id, dict(zip(fields[::2], fields[1::2], strict=True)))
                for entry_id, fields in entries
            ]
            self._cursors[key] = entries[-1][0]
        try:
            self.ask()
        except WireUnavailable:
            # What was taken counts; the caller asks again and finds out.
            self.reset()
        return taken
