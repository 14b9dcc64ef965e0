"""Keep a scheduler without keys from a farm whose last scheduler had keys.

It would reject and discard all messages of the nodes.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Final

from tunemq_scheduler.security.findings import problem
from tunemq_scheduler.security.start_up_findings import refuse
from tunemq_scheduler.transport.redis.key_types import KeyType, clear_wrong_types
from tunemq_scheduler.transport.redis.redis_connection import RedisConnection
from tunemq_shared.broker import redis_keys
from tunemq_shared.signing.live_keys import LiveKeys

_CHECK: Final = "farm-keys"
#: The most characters of a value in Redis that a message shows.
_SHOWN: Final = 16


def refuse_unsigned(
    url: str, keys: LiveKeys, *, is_insecure: bool, tell: Callable[[str], None]
) -> None:
    """Check that a scheduler with these keys may run this farm.

    Args:
        url: Of the farm's Redis.
        keys: The scheduler's keys.
        is_insecure: ``--insecure`` was given: a problem is only shown.
        tell: Shows a line to people.

    Raises:
        ConfigError: The farm signs, but there are no keys; says how to fix it.
        RedisUnavailable: Redis cannot be reached.
    """
    if keys.is_signed:
        return
    line = RedisConnection(url)
    try:
        line.connect()
        clear_wrong_types(line, {redis_keys.SIGNS: KeyType.STRING}, lambda *said: tell(said[-1]))
        (signs,) = line.ask([("GET", redis_keys.SIGNS)])
    finally:
        line.close()
    if not signs:
        return
    shown = bytes(signs)[:_SHOWN].decode(errors="replace")
    what = f"this farm signs (its last scheduler with the key {shown!r}), and there are no keys."
    found = problem(_CHECK, what, "give --keys FILE, the farm's scheduler.toml.", refuses=True)
    refuse([found], is_insecure=is_insecure, tell=tell)
