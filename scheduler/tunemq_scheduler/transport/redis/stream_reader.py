"""`StreamReader`: reads new entries of Redis streams, with one read always outstanding.

It sends the next ``XREAD`` as soon as the last one is answered. So Redis sends an entry the moment
it is appended, and waiting for entries is waiting for a socket, which a wake-up or a signal can
interrupt without disturbing the connection.

Another client may append entries that are too large for memory. The reader leaves such an answer
unread; then a script deletes entries that exceed the limit, and returns as many of the others as
fit.
"""

from __future__ import annotations

import random
import select
import time
from collections.abc import Collection
from typing import Final

from tunemq_scheduler.transport.redis.redis_connection import RedisConnection, ReplyTooLong
from tunemq_shared.base.errors import RedisUnavailable
from tunemq_shared.broker import redis_keys
from tunemq_shared.protocol import message_limits as limits

#: An entry: its id and its fields.
StreamEntry = tuple[bytes, dict[bytes, bytes]]

#: Entries of one stream in one answer; a batch of events has at most a quarter of a MiB.
COUNT: Final = 32
#: Entries of all streams in one answer, so that full batches do not exceed the limit.
_ENTRIES: Final = 128
_BEGINNING: Final = b"0-0"
#: The approximate size of one answer of the script, unless one entry alone is larger.
_PIECE_BYTES: Final = 8 * 2**20
#: The most that the script examines at once, because Redis serves no other client meanwhile.
_LOOKED_AT_BYTES: Final = 2**26
_SCRIPT: Final = """
local count, room, look = tonumber(ARGV[1]), tonumber(ARGV[2]), tonumber(ARGV[3])
local read, removed = {}, {}
for i, key in ipairs(KEYS) do
  local place, longest = ARGV[2 * i + 2], tonumber(ARGV[2 * i + 3])
  local entries = {}
  for _ = 1, count do
    local found = room > 0 and look > 0
      and redis.call('XREAD', 'COUNT', 1, 'STREAMS', key, place)
    if not found then break end
    local entry, size = found[1][2][1], 0
    place = entry[1]
    for _, part in ipairs(entry[2]) do size = size + #part + 64 end
    look = look - size
    if size > longest then
      redis.call('XDEL', key, place)
      removed[#removed + 1] = key
    else
      room = room - size
      entries[#entries + 1] = entry
    end
  end
  if #entries > 0 then read[#read + 1] = {key, entries} end
end
return {read, removed}
"""
#: Redis answers "nothing" after this long, which proves that the connection is alive. A dead
#: connection is detected a little later.
_BLOCK_S: Final = 4.0
_ANSWER_WITHIN_S: Final = _BLOCK_S + 4.0


class StreamReader:
    """Reads streams from their beginnings; `rewind` reads them from there again."""

    def __init__(self, line: RedisConnection) -> None:
        self._connection = line
        self._cursors: dict[bytes, bytes] = {}
        #: Streams whose readers take no events at present.
        self._held: set[bytes] = set()
        self._asked_at: float | None = None
        #: The most entries of each stream per answer, now and in the last read. It is one after an
        #: answer that was too long, because Redis has to produce even an unread answer.
        self._most = self._count = COUNT
        #: Streams of which the last answer may not have contained all entries.
        self._unfinished: set[bytes] = set()
        #: Streams from which entries were deleted unread because they were too long; the caller
        #: clears it.
        self.removed: list[str] = []

    @property
    def unread(self) -> list[bytes]:
        """The newest read entries of event streams that are held or have more."""
        some = (self._held | self._unfinished) - {redis_keys.NODES.encode()}
        return [place for key, place in self._cursors.items() if key in some]

    def watch(self, key: str) -> None:
        """Read this stream, too, from its beginning."""
        self._cursors[key.encode()] = _BEGINNING
        if self._asked_at is not None:  # the outstanding read is for the others alone
            self.reset()

    def forget(self, key: str) -> None:
        """Stop reading this stream."""
        self._cursors.pop(key.encode(), None)
        self._held.discard(key.encode())

    def hold(self, key: str, *, is_held: bool) -> None:
        """Pause or continue reading a stream; entries that were already requested still arrive."""
        if is_held:
            self._held.add(key.encode())
        else:
            self._held.discard(key.encode())
            self.reset()

    def rewind(self) -> None:
        """Read all streams from the beginning again."""
        self.reset()
        self._cursors = dict.fromkeys(self._cursors, _BEGINNING)

    def reset(self) -> None:
        """Close the connection; the next `ask` opens another and continues."""
        self._connection.close()
        self._asked_at = None

    def ask(self) -> None:
        """Send a read, if none is outstanding.

        Raises:
            RedisUnavailable: Redis cannot be reached.
        """
        if self._asked_at is not None:
            if time.monotonic() - self._asked_at > _ANSWER_WITHIN_S:
                self.reset()
                raise RedisUnavailable(
                    f"Redis at {self._connection.address} does not answer any more."
                )
            return
        self._connection.connect()
        block = str(int(_BLOCK_S * 1000))
        cursors = {key: place for key, place in self._cursors.items() if key not in self._held}
        self._count = max(1, min(self._most, _ENTRIES // len(cursors)))
        command = ("XREAD", "COUNT", str(self._count), "BLOCK", block, "STREAMS")
        self._connection.post([(*command, *cursors, *cursors.values())])
        self._asked_at = time.monotonic()

    def wait(self, seconds: float, others: Collection[int]) -> tuple[bool, set[int]]:
        """Wait for an answer, or for one of the other descriptors to become readable.

        Args:
            seconds: the longest wait.
            others: further descriptors.

        Returns:
            Whether `take` has something to take, and which of the others are readable.
        """
        ours = -1 if self._asked_at is None else self._connection.fileno()
        poll = select.poll()  # not select.select: a script may have more than 1024 files open
        for descriptor in others if ours < 0 else (ours, *others):
            poll.register(descriptor, select.POLLIN)
        ready = {descriptor for descriptor, _ in poll.poll(max(0.0, seconds) * 1000)}
        return ours in ready, ready - {ours}

    def take(self) -> dict[bytes, list[StreamEntry]]:
        """Return the new entries by stream, and send the next read.

        Raises:
            RedisUnavailable: the connection broke; no entry is skipped.
        """
        try:
            answer = self._connection.receive()
            self._unfinished = {key for key, entries in answer or () if len(entries) >= self._count}
            self._most = min(COUNT, 2 * self._most)
        except ReplyTooLong:
            answer = self._read_pieces()
            self._unfinished, self._most = set(self._cursors), 1
        finally:
            self._asked_at = None
        taken: dict[bytes, list[StreamEntry]] = {}
        for key, entries in answer or ():
            if key not in self._cursors:  # forgotten since it was requested
                continue
            taken[key] = [
                (entry_id, dict(zip(fields[::2], fields[1::2], strict=True)))
                for entry_id, fields in entries
            ]
            self._cursors[key] = entries[-1][0]
        try:
            self.ask()
        except RedisUnavailable:
            # The taken entries count; the caller's next `ask` reports the error.
            self.reset()
        return taken

    def _read_pieces(self) -> list[tuple[bytes, list[tuple[bytes, list[bytes]]]]]:
        """Return new entries as far as they fit; delete those that are too long."""
        keys = [key for key in self._cursors if key not in self._held]
        random.shuffle(keys)  # the first may leave no space for others
        bounds = (COUNT, _PIECE_BYTES, _LOOKED_AT_BYTES)
        places = [part for key in keys for part in (self._cursors[key], _longest(key))]
        self._connection.connect()
        ((read, removed),) = self._connection.ask(
            [("EVAL", _SCRIPT, str(len(keys)), *keys, *bounds, *places)]
        )
        self.removed += [key.decode() for key in removed]
        return list(read)


def _longest(key: bytes) -> int:
    """Return the most bytes that an entry of this stream may have, with its field names."""
    is_nodes = key == redis_keys.NODES.encode()
    longest = limits.REGISTRATION_BYTES if is_nodes else limits.EVENTS_BYTES + limits.HEADER_BYTES
    return longest + 1024
