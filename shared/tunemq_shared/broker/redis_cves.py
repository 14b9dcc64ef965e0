"""Which product and version a Redis server is, and whether that version has known CVEs.

Valkey reports two versions: its own, and the fixed one of the Redis that it is compatible with.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Any, Final, NamedTuple

REDIS, VALKEY = "Redis", "Valkey"

#: CVE-2026-23479: a user of blocking commands can make the server run code. In Redis:
_WEAK_FROM, _WEAK_UP_TO = (7, 2, 0), (8, 6, 2)
#: The first fixed version of each line of Valkey.
_MENDED: Final[dict[tuple[int, ...], tuple[int, ...]]] = {
    (7, 2): (7, 2, 13),
    (8, 0): (8, 0, 8),
    (8, 1): (8, 1, 7),
    (9, 0): (9, 0, 4),
}
#: CVE-2025-49844, CVE-2025-46817, CVE-2025-46818 and CVE-2025-46819, and before them CVE-2024-46981
#: and CVE-2024-31449: a user of Lua scripts can make the server run code. The first fixed version
#: of each line; older lines that are not listed have no fixed version.
_LUA_MENDED: Final[dict[str, dict[tuple[int, ...], tuple[int, ...]]]] = {
    REDIS: {
        (6, 2): (6, 2, 20),
        (7, 2): (7, 2, 11),
        (7, 4): (7, 4, 6),
        (8, 0): (8, 0, 4),
        (8, 2): (8, 2, 2),
    },
    VALKEY: {(7, 2): (7, 2, 11), (8, 0): (8, 0, 6), (8, 1): (8, 1, 4)},
}


class RedisRelease(NamedTuple):
    """The product and version that a server reports: such as ``7.0.15``, empty if unknown."""

    product: str
    version: str

    def __str__(self) -> str:
        return f"{self.product} {self.version}"

    @property
    def number(self) -> tuple[int, ...]:
        """The version as a tuple for comparison; empty if unknown."""
        return tuple(int(part) for part in re.findall(r"\d+", self.version)[:3])

    @property
    def has_cve(self) -> bool:
        """Whether the version has CVE-2026-23479; a backported fix is not visible."""
        if self.product == VALKEY:
            return self.number < _MENDED.get(self.number[:2], ())
        return _WEAK_FROM <= self.number <= _WEAK_UP_TO

    @property
    def has_lua_cves(self) -> bool:
        """Whether the version has the CVEs of Lua scripts; a backported fix is not visible."""
        fixed = _LUA_MENDED[self.product]
        line = self.number[:2]
        return bool(line) and self.number < fixed.get(line, max(fixed))


def release_in_info(told: Mapping[str, str]) -> RedisRelease:
    """Read the release from the lines of ``INFO``."""
    if "valkey_version" in told:
        return RedisRelease(VALKEY, told["valkey_version"])
    return RedisRelease(REDIS, told.get("redis_version", ""))


def release_in_hello(hello: Any) -> RedisRelease:
    """Read the release from the answer to ``HELLO 2`` after login; without one, no version."""
    if not isinstance(hello, list):
        return RedisRelease(REDIS, "")
    facts = dict(zip(hello[::2], hello[1::2], strict=False))
    version = facts.get(b"version")
    product = VALKEY if facts.get(b"server") == b"valkey" else REDIS
    return RedisRelease(
        product, version.decode(errors="replace") if isinstance(version, bytes) else ""
    )
