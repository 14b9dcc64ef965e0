"""`RequestStream`: the requests in Redis, each taken from there by one scheduler, once.

What is taken is removed, so the stream holds what nobody has begun. A client that gives up removes
its request in the same way, and then knows that it was not and will not be done.

Who may submit may also leave entries there that no request is as long as, while no scheduler reads.
So the scheduler waits with a command that yields one entry, and then has a script take entries, of
which that cuts off what is too long.
"""

from __future__ import annotations

import select
import time
from typing import Final

from tunemq_scheduler.transport.redis.key_types import (
    TEXT_OF,
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

#: So many in one go, so that a flood of requests does not hold the scheduler up; and no more of
#: them once they have so many bytes.
COUNT: Final = 16
_BYTES: Final = 4 * 2**20
#: What is behind so many bytes of a field is cut off: one that long makes no request, and is
#: refused as too long. Fields behind so many names and values are left out; requests have fewer.
FIELD_BYTES: Final = MAX_REQUEST_BYTES + HEAD_BYTES + 1
_PARTS: Final = 32
#: Redis answers "nothing" after so long, which shows that the connection is alive.
_BLOCK_S: Final = 4.0
_ANSWER_WITHIN_S: Final = _BLOCK_S + 4.0

#: An entry of a time so far ahead is nobody's, and behind the greatest id there is none: then the
#: stream begins anew, and who has asked asks again.
_AHEAD_AT_MOST_MS: Final = 86_400_000
#: An old entry is left out: its asker has gone long since, and was told that it was not done.
_TAKE: Final = (
    TEXT_OF
    + """
if tonumber(text_of(KEYS[1]) or '0') > tonumber(ARGV[1]) then return 0 end
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
    """Requests as they come in.

    Args:
        url: where Redis is.
        refused: is told of a stream that was none.
    """

    def __init__(self, url: str, rejected: OnKeyRejected) -> None:
        self._rejected = rejected
        self._reading, self._writing = RedisConnection(url), RedisConnection(url)
        self._asked_at: float | None = None

    def fileno(self) -> int | None:
        """The socket that is readable when `take` has something; None while there is none."""
        return None if self._asked_at is None else self._reading.fileno()

    def take(self, term: int) -> list[dict[bytes, bytes]]:
        """The fields of requests that came in, which nobody else will do; waits for none.

        Raises:
            SchedulerSuperseded: there is a scheduler with a greater term.
            WireError: Redis refused it; all is asked again after this.
            WireUnavailable: Redis cannot be reached; nothing that was claimed is lost but to a
                client that asks again.
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
        """Do these commands.

        Raises:
            WireError: one was refused; all others were done.
            WireUnavailable: Redis cannot be reached; they may or may not have been done.
        """
        self._writing.connect()
        self._writing.ask(commands)

    def close(self) -> None:
        """Close the connections; `take` opens others."""
        self._reading.close()
        self._writing.close()
        self._asked_at = None

    def _ask(self) -> None:
        # From the beginning: what was read has been removed, or is nobody's any more.
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
        except ReplyTooLong:  # the script cuts it off
            return True

    def _take(self, term: int) -> list[list[bytes]]:
        """The fields of the oldest entries, as names and values in turn."""
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
