"""`RequestStream`: the requests in Redis; one scheduler takes each of them once.

Taking a request deletes it, so the stream holds only requests that have not begun. A client that
gives up deletes its request in the same way, and then knows that it will not run.

While no scheduler reads, a user may append entries that are longer than any request. So the
scheduler waits with a command that returns one entry, and then a script takes entries and truncates
long ones.
"""

from __future__ import annotations

import select
import time
from typing import Final

from tunemq_scheduler.transport.redis.key_types import (
    TERM_OF,
    KeyType,
    OnKeyRejected,
    clear_wrong_types,
)
from tunemq_scheduler.transport.redis.redis_connection import (
    RedisCommand,
    RedisConnection,
    ReplyTooLong,
)
from tunemq_shared.base.errors import RedisUnavailable, SchedulerSuperseded, TransportError
from tunemq_shared.broker import redis_keys
from tunemq_shared.protocol.farm_requests import MAX_REQUEST_BYTES
from tunemq_shared.signing.message_signing import HEAD_BYTES

#: Limits for one call, so that a flood of requests does not delay the scheduler: entries and bytes.
COUNT: Final = 16
_BYTES: Final = 4 * 2**20
#: Fields are truncated after this many bytes; a field that long makes no valid request, and is
#: rejected. Entries are truncated after this many names and values; requests have fewer.
FIELD_BYTES: Final = MAX_REQUEST_BYTES + HEAD_BYTES + 1
_PARTS: Final = 32
#: Redis answers "nothing" after this long, which proves that the connection is alive.
_BLOCK_S: Final = 4.0
_ANSWER_WITHIN_S: Final = _BLOCK_S + 4.0

#: No client of the farm appends an entry this far in the future, and after one with the greatest id
#: none can follow. The stream is then deleted, and clients send their requests again.
_AHEAD_AT_MOST_MS: Final = 86_400_000
#: An old entry is skipped: its client has given up and reported that it was not done.
_TAKE: Final = (
    TERM_OF
    + """
if term_of(KEYS[1]) > tonumber(ARGV[1]) then return 0 end
local now = redis.call('TIME')[1] * 1000
local oldest, newest = now - tonumber(ARGV[2]), now + tonumber(ARGV[3])
local room, longest, parts = tonumber(ARGV[5]), tonumber(ARGV[6]), tonumber(ARGV[7])
local taken, is_exhausted = {}, false
for _ = 1, tonumber(ARGV[4]) do
  local streams = room > 0 and redis.call('XREAD', 'COUNT', 1, 'STREAMS', KEYS[2], '0-0')
  if not streams then break end
  local id, fields = unpack(streams[1][2][1])
  redis.call('XDEL', KEYS[2], id)
  local sent = tonumber(string.match(id, '^%d+'))
  if sent > newest then
    is_exhausted = true
  elseif sent >= oldest then
    local kept = {}
    for i = 1, math.min(#fields, parts) do
      kept[i] = string.sub(fields[i], 1, longest)
      room = room - #kept[i]
    end
    taken[#taken + 1] = kept
  end
end
if is_exhausted then redis.call('DEL', KEYS[2]) end
return taken
"""
)


class RequestStream:
    """The stream of incoming requests.

    Args:
        url: the Redis address.
        rejected: receives a key of the wrong type.
    """

    def __init__(self, url: str, rejected: OnKeyRejected) -> None:
        self._rejected = rejected
        self._reading, self._writing = RedisConnection(url), RedisConnection(url)
        self._asked_at: float | None = None

    def fileno(self) -> int | None:
        """Return the socket that is readable when `take` has something; None if there is none."""
        return None if self._asked_at is None else self._reading.fileno()

    def take(self, term: int) -> list[dict[bytes, bytes]]:
        """Return the fields of new requests, which no other scheduler will take; does not wait.

        Args:
            term: the term of this scheduler.

        Raises:
            SchedulerSuperseded: there is a scheduler with a greater term.
            TransportError: Redis rejected the command; the next call tries again.
            RedisUnavailable: Redis cannot be reached. Requests taken at that moment are lost until
                their clients repeat them.
        """
        try:
            if self._asked_at is None:
                self._ask()
            if not self._is_answered():
                return []
            self._asked_at = None
            taken = self._take(term) if self._is_any() else []
            self._ask()
        except TransportError:
            self.close()
            raise
        return [dict(zip(fields[::2], fields[1::2], strict=True)) for fields in taken]

    def send(self, commands: list[RedisCommand]) -> None:
        """Run these commands.

        Raises:
            TransportError: Redis rejected one; all others have run.
            RedisUnavailable: Redis cannot be reached; they may or may not have run.
        """
        self._writing.connect()
        self._writing.ask(commands)

    def close(self) -> None:
        """Close the connections; `take` opens new ones."""
        self._reading.close()
        self._writing.close()
        self._asked_at = None

    def _ask(self) -> None:
        # From the beginning: entries that were read are deleted.
        if not self._reading.is_open:
            self._reading.connect()
            types = {redis_keys.REQUESTS: KeyType.STREAM}
            clear_wrong_types(self._reading, types, self._rejected)
        block = str(int(_BLOCK_S * 1000))
        streams = ("STREAMS", redis_keys.REQUESTS, "0-0")
        self._reading.post([("XREAD", "COUNT", "1", "BLOCK", block, *streams)])
        self._asked_at = time.monotonic()

    def _is_answered(self) -> bool:
        poll = select.poll()
        poll.register(self._reading.fileno(), select.POLLIN)
        if poll.poll(0):
            return True
        if self._asked_at is not None and time.monotonic() - self._asked_at > _ANSWER_WITHIN_S:
            raise RedisUnavailable(f"Redis at {self._reading.address} does not answer any more.")
        return False

    def _is_any(self) -> bool:
        try:
            return bool(self._reading.receive())
        except ReplyTooLong:  # the script truncates it
            return True

    def _take(self, term: int) -> list[list[bytes]]:
        """Take the oldest entries; return the fields of each as alternating names and values."""
        self._writing.connect()
        times = str(redis_keys.ANSWER_TTL_S * 1000), str(_AHEAD_AT_MOST_MS)
        keys, bounds = (
            ("2", redis_keys.TERM, redis_keys.REQUESTS),
            (COUNT, _BYTES, FIELD_BYTES, _PARTS),
        )
        (answer,) = self._writing.ask([("EVAL", _TAKE, *keys, str(term), *times, *bounds)])
        if answer == 0:
            raise SchedulerSuperseded(
                "This farm has a newer scheduler, which answers all requests from now on."
            )
        taken: list[list[bytes]] = answer
        return taken
