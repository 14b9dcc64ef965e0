"""Keeps a scheduler without keys from a farm whose last one had some.

It would refuse all that nodes say, and throw it away.
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
#: Of what stands in Redis no more is shown.
_SHOWN: Final = 16


def refuse_unsigned(
    url: str, keys: LiveKeys, *, is_insecure: bool, tell: Callable[[str], None]
) -> None:
    """Return if a scheduler with these keys may have this farm.

    Args:
        url: where the farm's Redis is.
        is_insecure: whether ``--insecure`` was given: then what is wrong is only told.
        tell: shows a line to people.

    Raises:
        ConfigError: the farm signs, and there are no keys; says how to mend it.
        WireUnavailable: Redis cannot be reached.
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
