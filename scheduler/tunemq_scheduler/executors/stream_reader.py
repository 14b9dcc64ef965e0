"""`StreamReader`: new entries of some Redis streams, with a read always outstanding.

The next ``XREAD`` is asked as soon as the last one is answered. So an entry is on its way the
moment it is appended, and waiting for one is waiting for a socket, which a wake-up or a signal can
end at once without disturbing the connection.
"""

from __future__ import annotations

import select
import time
from collections.abc import Collection
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

    def __init__(self, line: RedisLine) -> None:
        self._line = line
        self._cursors: dict[bytes, bytes] = {}
        #: Those that are not read for now.
        self._held: set[bytes] = set()
        self._asked_at: float | None = None

    @property
    def held(self) -> list[bytes]:
        """The newest entries that were read of streams that are held."""
        return [place for key, place in self._cursors.items() if key in self._held]

    def watch(self, key: str) -> None:
        """Read this stream, too, from its beginning."""
        self._cursors[key.encode()] = _BEGINNING
        if self._asked_at is not None:  # for the others alone
            self.reset()

    def forget(self, key: str) -> None:
        """Read this stream no longer."""
        self._cursors.pop(key.encode(), None)
        self._held.discard(key.encode())

    def hold(self, key: str, *, is_held: bool) -> None:
        """Read a stream that is watched no further, or on; what was asked for comes yet."""
        if is_held:
            self._held.add(key.encode())
        else:
            self._held.discard(key.encode())
            self.reset()

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
        cursors = {key: place for key, place in self._cursors.items() if key not in self._held}
        self._line.post([(*command, *cursors, *cursors.values())])
        self._asked_at = time.monotonic()

    def wait(self, seconds: float, others: Collection[int]) -> tuple[bool, set[int]]:
        """Wait for an answer, or for one of the other descriptors to become readable.

        Returns:
            Whether `take` has something to take, and which of the others are readable.
        """
        ours = -1 if self._asked_at is None else self._line.fileno()
        poll = select.poll()  # not select.select: a script may have more than 1024 files open
        for descriptor in others if ours < 0 else (ours, *others):
            poll.register(descriptor, select.POLLIN)
        ready = {descriptor for descriptor, _ in poll.poll(max(0.0, seconds) * 1000)}
        return ours in ready, ready - {ours}

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
            if key not in self._cursors:  # forgotten since it was asked for
                continue
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
