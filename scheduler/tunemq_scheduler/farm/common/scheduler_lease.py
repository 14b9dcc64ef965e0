"""`SchedulerLease`: gives a farm one scheduler; a replaced one notices that before it acts.

Each start of a scheduler gets a **term**, greater than all before. The term is stored in Redis and,
because Redis may be wiped, in a file of the farm. It is never below the time of the start in Unix
seconds, so that the terms of a farm that lost both still grow, unless a clock was ahead. Nodes obey
only the newest term.

The **lease** is a key in Redis. Its holder renews it in a separate thread, because a user's
algorithm may block the loop for any time. A scheduler that wants to be the next waits until the
lease expires, unless the holder is certainly dead: a process of the same machine that is gone.

A lease alone proves nothing, because a process may be suspended between checking the lease and
acting. So a script writes to Redis only if it finds the same term there (`guarded`), and other
writes happen soon after a check of the lease (`proven_at`).
"""

from __future__ import annotations

import contextlib
import re
import threading
import time
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path
from typing import Any, Final

import msgspec

from tunemq_scheduler.base.lease_holder import LeaseHolder
from tunemq_scheduler.farm.common.small_files import make_folder, replace_file
from tunemq_scheduler.transport.redis.key_types import TERM_OF, TEXT_OF
from tunemq_scheduler.transport.redis.redis_connection import (
    RedisCommand,
    RedisConnection,
    RedisFull,
)
from tunemq_shared.base.decoding_errors import UNDECODABLE
from tunemq_shared.base.errors import JournalError, SchedulerSuperseded, TransportError
from tunemq_shared.broker import redis_keys

#: The renewal period of the lease, and its lifetime without renewal.
PERIOD_S: Final = 1.0
TTL_S: Final = 10.0
_RETRY_S: Final = 0.1
_FULL_RETRY_S: Final = 1.0

_CLAIM: Final = (
    TERM_OF
    + """
local held = text_of(KEYS[1])
held = held and string.sub(held, 1, 4096)
if held and held ~= ARGV[3] then return {held, redis.call('PTTL', KEYS[1])} end
local term = math.max(term_of(KEYS[2]) + 1, tonumber(ARGV[1]))
term = string.format('%d', term)
redis.call('SET', KEYS[2], term)
redis.call('SET', KEYS[1], term .. ':' .. ARGV[2], 'PX', ARGV[4])
return tonumber(term)
"""
)
# A wiped Redis knows no term: the first scheduler restores its own, and the highest one wins.
_RENEW: Final = (
    TERM_OF
    + """
local mine = tonumber(ARGV[1])
if term_of(KEYS[2]) > mine then
  return string.sub(text_of(KEYS[1]) or 'another scheduler', 1, 4096)
end
redis.call('SET', KEYS[2], ARGV[1])
redis.call('SET', KEYS[1], ARGV[1] .. ':' .. ARGV[2], 'PX', ARGV[3])
return 1
"""
)
_GUARDED: Final = (
    TERM_OF
    + """
if term_of(KEYS[1]) > tonumber(ARGV[1]) then return 0 end
local refused, i = nil, 2
while i <= #ARGV do
  local last = i + tonumber(ARGV[i])
  local answer = redis.pcall(unpack(ARGV, i + 1, last))
  if type(answer) == 'table' and answer.err and not refused then
    refused = {err = answer.err .. ' (' .. ARGV[i + 1] .. ')'}
  end
  i = last + 1
end
return refused or 1
"""
)
# An earlier search may be gone for good, and nodes keep its events until its stream is deleted.
_TAKE: Final = (
    TERM_OF
    + """
if term_of(KEYS[1]) > tonumber(ARGV[1]) then return 0 end
local ours = {}
for key in string.gmatch(ARGV[2], '[^\\n]+') do ours[key] = true end
for key in string.gmatch(text_of(KEYS[2]) or '', '[^\\n]+') do
  if not ours[key] then redis.call('DEL', key) end
end
redis.call('SET', KEYS[2], ARGV[2])
return 1
"""
)
_RESIGN: Final = (
    TEXT_OF
    + """
if text_of(KEYS[2]) == ARGV[1] then redis.call('DEL', KEYS[1]) end
return 1
"""
)
_KEYS: Final = ("2", redis_keys.SCHEDULER, redis_keys.TERM)


class SchedulerLease:
    """A farm's lease, from `claim` until `close`.

    Args:
        url: the Redis address.
        me: this process.
    """

    def __init__(self, url: str, me: LeaseHolder) -> None:
        self._me = me
        self._url = url
        self._connection = RedisConnection(url)
        self._thread: threading.Thread | None = None
        self._closed = threading.Event()
        self._looked_at = self._failed_at = float("-inf")
        self._beat = 0
        #: The scheduler that took over, in words; None if none did.
        self._successor: str | None = None
        self._broke: BaseException | None = None
        #: The term of this scheduler, for all its messages.
        self.term = 0

    # --- claiming ---------------------------------------------------------------------------------

    def claim(
        self,
        at_least: int,
        tell: Callable[[str], None],
        waits: Callable[[str, float], None] = lambda _status, _full_s: None,
    ) -> int:
        """Get the lease, keep it renewed, and return the new term. Waits while Redis is full.

        Args:
            at_least: the lower bound of the term.
            tell: shows a line to the person at the terminal if this has to wait.
            waits: called at least once a second while this waits, with the reason in words, and for
                how many seconds Redis has been full; 0 if it is not.

        Raises:
            RedisUnavailable: Redis cannot be reached.
            SchedulerSuperseded: another scheduler runs on this farm; names it.
        """
        self._connection.connect()
        replaced, seen, is_told, full_since = b"", b"", False, 0.0
        deadline = time.monotonic() + 2 * TTL_S
        while True:
            term = max(at_least, int(time.time()))
            lasts = str(int(TTL_S * 1000))
            try:
                answer = self._ask(_CLAIM, str(term), self._value(), replaced, lasts)
            except RedisFull as full:
                if not full_since:
                    full_since = time.monotonic()
                    tell(f"{full}. Waiting for room: raise maxmemory in redis.conf.")
                # Other clients may have filled it with data that only a scheduler deletes. Without
                # a generation, nodes register again.
                self._connection.ask([("DEL", redis_keys.GENERATION, redis_keys.NODES)])
                waits("Redis is full; waiting for room", time.monotonic() - full_since)
                time.sleep(_FULL_RETRY_S)
                deadline = time.monotonic() + 2 * TTL_S
                continue
            if isinstance(answer, int):
                break
            held, left_ms = answer
            holder = _holder(held)
            is_void = holder is None or not 0 <= left_ms <= TTL_S * 1000
            if is_void and not replaced:
                why = "it names no scheduler" if holder is None else "it never ends, or too late"
                tell(
                    f"Removed the lease {redis_keys.SCHEDULER} from Redis: {why}."
                    " Another program writes to this farm's Redis: load deploy/redis/users.acl, and"
                    " give its users new passwords."
                )
            is_free = is_void or (holder is not None and holder.is_gone)
            if is_free and time.monotonic() < deadline:
                replaced = held
                continue
            if (seen and held != seen) or time.monotonic() > deadline:
                raise SchedulerSuperseded(
                    f"Another scheduler runs on this farm: {holder or 'an unknown one'}. A farm has"
                    " one; end that, or use another Redis (or another database of this one)."
                )
            seen = held
            if not is_told:
                is_told = True
                tell(
                    f"Another scheduler had this farm: {holder or 'an unknown one'}. Waiting until"
                    f" its lease runs out, {TTL_S:g} s at the most."
                )
            waits("another scheduler had this farm; waiting until its lease runs out", 0.0)
            time.sleep(_RETRY_S)
        self.term = answer
        self._looked_at = time.monotonic()
        self._thread = threading.Thread(target=self._run, name="scheduler lease", daemon=True)
        self._thread.start()
        return answer

    def close(self) -> None:
        """Release the lease, so that a successor need not wait."""
        self._closed.set()
        if self._thread is not None:
            self._thread.join()
        try:
            if self.term and self._successor is None:
                self._connection.connect()
                self._ask(_RESIGN, str(self.term))
        except TransportError:
            pass  # it expires by itself
        finally:
            self._connection.close()

    # --- before acting ----------------------------------------------------------------------------

    @property
    def proven_at(self) -> float:
        """The last time, by the monotonic clock, at which this scheduler could act.

        At that time it held the lease, or Redis did not answer. While Redis is away, no successor
        can take over on its own. A successor on the other side of a network partition continues
        from a copy of the journal.
        """
        return max(self._looked_at, self._failed_at)

    def check_known(self) -> None:
        """Raise if it is already known that another scheduler took over; takes no time.

        Raises:
            SchedulerSuperseded: another scheduler took over; names it.
        """
        if self._broke is not None:
            raise self._broke
        if self._successor is not None:
            raise SchedulerSuperseded(
                "This scheduler did not renew its lease in time, and another one took its place:"
                f" {self._successor}. Nothing was done since; the search continues there."
            )

    def guarded(self, commands: Sequence[RedisCommand]) -> RedisCommand:
        """Return one command that runs all of these; with a newer term in Redis, it answers 0."""
        parts = [part for command in commands for part in (str(len(command)), *command)]
        return ("EVAL", _GUARDED, "1", redis_keys.TERM, str(self.term), *parts)

    def taking(self, events_keys: Iterable[str]) -> RedisCommand:
        """Return a command that replaces the farm's streams; with a newer term, it answers 0."""
        keys = redis_keys.listed(events_keys)
        return ("EVAL", _TAKE, "2", redis_keys.TERM, redis_keys.STREAMS, str(self.term), keys)

    # --- the thread -------------------------------------------------------------------------------

    def _run(self) -> None:
        try:
            while self._successor is None and not self._closed.wait(PERIOD_S):
                self._look()
        except BaseException as error:  # noqa: BLE001  kept; the loop's thread raises and tells it (`check_known`)
            self._broke = error

    def _look(self) -> None:
        self._beat += 1
        try:
            self._connection.connect()
            answer = self._ask(_RENEW, str(self.term), self._value(), str(int(TTL_S * 1000)))
        except TransportError:
            self._connection.close()
            answer = None  # Redis is away for a successor, too
            self._failed_at = time.monotonic()
        if isinstance(answer, bytes):
            self._successor = str(_holder(answer) or "one that has ended since")
        elif answer is not None:
            self._looked_at = time.monotonic()

    def _ask(self, script: str, *arguments: str | bytes) -> Any:
        return self._connection.ask([("EVAL", script, *_KEYS, *arguments)])[0]

    def _value(self) -> str:
        me = msgspec.json.encode(self._me).decode()
        return f"{self._me.token}:{self._beat}:{me}"


def read_term(file: Path) -> int:
    """Return the last term of a farm from its file; 0 if that has none."""
    try:
        text = file.read_bytes()
    except OSError:
        return 0
    return int(text) if re.fullmatch(rb"[0-9]{1,12}", text) else 0


def keep_term(file: Path, term: int) -> None:
    """Write a farm's term to its file; a full disk is no reason to stop, because Redis has it."""
    with contextlib.suppress(JournalError):
        make_folder(file.parent)
        replace_file(file, str(term).encode())


def _holder(value: bytes) -> LeaseHolder | None:
    """Return the holder from the value of the lease."""
    try:
        return msgspec.json.decode(value.split(b":", 3)[3], type=LeaseHolder)
    except (IndexError, *UNDECODABLE):
        return None
