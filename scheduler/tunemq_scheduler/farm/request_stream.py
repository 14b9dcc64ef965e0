"""`RequestStream`: the requests in Redis, each taken from there by one scheduler, once.

What is read is claimed by removing it, so the stream holds what nobody has begun. A client that
gives up removes its request in the same way, and then knows that it was not and will not be done.
"""

from __future__ import annotations

import select
import time
from typing import Any, Final

from tunemq_scheduler.executors.redis_line import Command, RedisLine
from tunemq_shared import wire
from tunemq_shared.errors import SchedulerSuperseded, WireError, WireUnavailable

#: So many in one go, so that a flood of requests does not hold the scheduler up.
COUNT: Final = 16
#: Redis answers "nothing" after so long, which shows that the connection is alive.
_BLOCK_S: Final = 4.0
_ANSWER_WITHIN_S: Final = _BLOCK_S + 4.0

#: An entry of a time so far ahead is nobody's, and behind the greatest id there is none: then the
#: stream begins anew, and who has asked asks again.
_AHEAD_AT_MOST_MS: Final = 86_400_000
#: Whose asker has gone long since: he was told that it was not done.
_CLAIM: Final = """
if tonumber(redis.call('GET', KEYS[1]) or '0') > tonumber(ARGV[1]) then return 0 end
local now = redis.call('TIME')[1] * 1000
local oldest, newest = now - tonumber(ARGV[2]), now + tonumber(ARGV[3])
local claimed, is_exhausted = {}, false
for i = 4, #ARGV do
  local is_there = redis.call('XDEL', KEYS[2], ARGV[i])
  local sent = tonumber(string.match(ARGV[i], '^%d+'))
  if sent > newest then
    is_exhausted = true
  elseif is_there == 1 and sent >= oldest then
    claimed[#claimed + 1] = ARGV[i]
  end
end
if is_exhausted then redis.call('DEL', KEYS[2]) end
return claimed
"""


class RequestStream:
    """Requests as they come in.

    Args:
        url: where Redis is.
    """

    def __init__(self, url: str) -> None:
        self._reading, self._writing = RedisLine(url), RedisLine(url)
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
            answer = self._reading.receive()
            entries: list[Any] = answer[0][1] if answer else []
            claimed = self._claim(term, [entry[0] for entry in entries])
            self._ask()
        except WireError:
            self.close()
            raise
        return [
            dict(zip(fields[::2], fields[1::2], strict=True))
            for entry_id, fields in entries
            if entry_id in claimed
        ]

    def send(self, commands: list[Command]) -> None:
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
        self._reading.connect()
        block = str(int(_BLOCK_S * 1000))
        streams = ("STREAMS", wire.REQUESTS, "0-0")
        self._reading.post([("XREAD", "COUNT", str(COUNT), "BLOCK", block, *streams)])
        self._asked_at = time.monotonic()

    def _is_answered(self) -> bool:
        poll = select.poll()
        poll.register(self._reading.fileno(), select.POLLIN)
        if poll.poll(0):
            return True
        if self._asked_at is not None and time.monotonic() - self._asked_at > _ANSWER_WITHIN_S:
            raise WireUnavailable(f"Redis at {self._reading.address} does not answer any more.")
        return False

    def _claim(self, term: int, ids: list[bytes]) -> set[bytes]:
        if not ids:
            return set()
        self._writing.connect()
        times = str(wire.ANSWER_TTL_S * 1000), str(_AHEAD_AT_MOST_MS)
        keys = ("2", wire.TERM, wire.REQUESTS)
        (answer,) = self._writing.ask([("EVAL", _CLAIM, *keys, str(term), *times, *ids)])
        if answer == 0:
            raise SchedulerSuperseded(
                "This farm has a newer scheduler, which answers all requests from now on."
            )
        return set(answer)
