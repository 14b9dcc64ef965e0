"""Deletes Redis keys of the farm that have the wrong type, and strings that are far too long.

Redis answers WRONGTYPE to each command about such a key until it is deleted, and the client that
wrote it may be gone. So the scheduler deletes it and continues as after a wipe (F06).
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from enum import Enum
from typing import Final

from tunemq_scheduler.transport.redis.redis_connection import RedisConnection
from tunemq_shared.base.errors import RedisUnavailable, TransportError


class KeyType(Enum):
    """The type that a key of the farm has if it exists."""

    STRING = "string"
    STREAM = "stream"
    HASH = "hash"
    LIST = "list"


#: Takes the kind of message, the reason in a word, and a sentence for people.
OnKeyRejected = Callable[[str, str, str], None]

# The scheduler's Redis user may not ask for a key's type. So the script tries a command of the
# expected type that changes at most an unused field of a reply.
_CLEAR: Final = """
local last, longest = '18446744073709551615-18446744073709551615', 4096
local cleared = {}
for i, key in ipairs(KEYS) do
  local kind, answer = ARGV[i], false
  if kind == 'string' then
    answer = redis.pcall('GET', key)
    if type(answer) == 'string' and #answer > longest then
      answer = {err = 'WRONGTYPE, or rather too long'}
    end
  elseif kind == 'stream' then answer = redis.pcall('XREAD', 'COUNT', 1, 'STREAMS', key, last)
  elseif kind == 'list' then answer = redis.pcall('LLEN', key)
  elseif redis.call('EXISTS', key) == 1 then answer = redis.pcall('HSET', key, 't', '') end
  if type(answer) == 'table' and answer.err and string.find(answer.err, 'WRONGTYPE') then
    redis.call('DEL', key)
    cleared[#cleared + 1] = key
  end
end
return cleared
"""
#: For scripts: a key's text, or nothing if it is not a string.
TEXT_OF: Final = """
local function text_of(key)
  local answer = redis.pcall('GET', key)
  return type(answer) == 'string' and answer
end
"""


#: No scheduler has a greater term, which is about the Unix time. Readers accept twice that.
_MOST_TERM: Final = 2**39
#: For scripts, with `TEXT_OF`: a key's term; 0 if no scheduler wrote it.
TERM_OF: Final = (
    TEXT_OF
    + f"""
local function term_of(key)
  local term = tonumber(text_of(key) or '0')
  return term and term >= 0 and term <= {_MOST_TERM} and math.floor(term) or 0
end
"""
)


def clear_wrong_types(
    line: RedisConnection, types: Mapping[str, KeyType], rejected: OnKeyRejected
) -> list[str]:
    """Delete keys that have another type, or are too long; return them.

    Args:
        line: an open connection.
        types: the expected types, by key.
        rejected: receives each deleted key.

    Raises:
        RedisUnavailable: Redis went away.
    """
    kinds = [kind.value for kind in types.values()]
    try:
        (cleared,) = line.ask([("EVAL", _CLEAR, str(len(types)), *types, *kinds)])
    except RedisUnavailable:
        raise
    except TransportError:  # scripts are not allowed; the command that needs the key reports it
        return []
    if not isinstance(cleared, list):
        raise line.unexpected(cleared)
    keys = [key.decode() for key in cleared]
    for key in keys:
        rejected(
            "key",
            "wrong_type",
            f"The key {key} in Redis was no {types[key].value} of ours: it is deleted, and nodes"
            " resend its content. A client that is no node of this farm may have write access to"
            " Redis.",
        )
    return keys
