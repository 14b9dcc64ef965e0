"""`StreamReader`: new entries of some Redis streams, with a read always outstanding.

The next ``XREAD`` is asked as soon as the last one is answered. So an entry is on its way the
moment it is appended, and waiting for one is waiting for a socket, which a wake-up or a signal can
end at once without disturbing the connection.

Who may append to a stream may leave entries there that nobody has memory for. An answer that is too
long is left unread; then a script removes what is longer than an entry may be, and yields of the
others what there is room for.
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
#: And of all streams: an answer of full batches is not too long.
_ENTRIES: Final = 128
_BEGINNING: Final = b"0-0"
#: All entries of one answer of the script have about so many bytes, or it is one entry.
_PIECE_BYTES: Final = 8 * 2**20
#: It looks at no more at once: nobody else is served meanwhile.
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
#: Redis answers "nothing" after so long, which shows that the connection is alive; one that has
#: died in silence is found a little later.
_BLOCK_S: Final = 4.0
_ANSWER_WITHIN_S: Final = _BLOCK_S + 4.0


class StreamReader:
    """Reads streams from their beginnings; `rewind` reads them from there again."""

    def __init__(self, line: RedisConnection) -> None:
        self._connection = line
        self._cursors: dict[bytes, bytes] = {}
        #: Those that are not read for now.
        self._held: set[bytes] = set()
        self._asked_at: float | None = None
        #: So many entries of each stream are in one answer at most, and were in the last; it is
        #: one after an answer that was too long, since Redis has to make even what is not read.
        self._most = self._count = COUNT
        #: Those of which the last answer may not have had all.
        self._unfinished: set[bytes] = set()
        #: The streams of entries that were removed unread since this was looked at: too long.
        self.removed: list[str] = []

    @property
    def unread(self) -> list[bytes]:
        """The newest entries that were read of streams of events that are held, or have more."""
        some = (self._held | self._unfinished) - {redis_keys.NODES.encode()}
        return [place for key, place in self._cursors.items() if key in some]

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
        self._connection.close()
        self._asked_at = None

    def ask(self) -> None:
        """Have a read outstanding.

        Raises:
            WireUnavailable: Redis cannot be reached.
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
        """The new entries by stream, and ask for the next ones.

        Raises:
            WireUnavailable: the connection broke; nothing is skipped.
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
            if key not in self._cursors:  # forgotten since it was asked for
                continue
            taken[key] = [
                (entry_id, dict(zip(fields[::2], fields[1::2], strict=True)))
                for entry_id, fields in entries
            ]
            self._cursors[key] = entries[-1][0]
        try:
            self.ask()
        except RedisUnavailable:
            # What was taken counts; the caller asks again and finds out.
            self.reset()
        return taken

    def _read_pieces(self) -> list[tuple[bytes, list[tuple[bytes, list[bytes]]]]]:
        """New entries as far as there is room for them; what is too long is removed."""
        keys = [key for key in self._cursors if key not in self._held]
        random.shuffle(keys)  # the first may leave no room for others
        bounds = (COUNT, _PIECE_BYTES, _LOOKED_AT_BYTES)
        places = [part for key in keys for part in (self._cursors[key], _longest(key))]
        self._connection.connect()
        ((read, removed),) = self._connection.ask(
            [("EVAL", _SCRIPT, str(len(keys)), *keys, *bounds, *places)]
        )
        self.removed += [key.decode() for key in removed]
        return list(read)


def _longest(key: bytes) -> int:
    """How many bytes an entry of this stream has at most, the names of its fields included."""
    is_nodes = key == redis_keys.NODES.encode()
    longest = limits.REGISTRATION_BYTES if is_nodes else limits.EVENTS_BYTES + limits.HEADER_BYTES
    return longest + 1024
