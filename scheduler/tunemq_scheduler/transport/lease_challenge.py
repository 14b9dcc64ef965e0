"""`LeaseChallenge`: a random number that nodes repeat in their leases, to show that these are new.

A number in a row shows which of two leases is newer, but a scheduler that has just started has seen
none, and somebody may hold leases back to play them later. A lease that repeats a number which this
scheduler chose a moment ago was written since then. Pure.
"""

from __future__ import annotations

import secrets
from typing import Final

from tunemq_shared.broker.redis_keys import LEASE_TTL_S

#: A challenge is replaced this often, and counts until the next one is replaced: so a live node has
#: at least this long to answer a new one, and a played lease counts for twice as long at most.
_REPLACED_EVERY_S: Final = LEASE_TTL_S
_BYTES: Final = 16


class LeaseChallenge:
    """The challenge of now, and the one before it.

    What counts changes only when the scheduler looks: one that looks too rarely finds answers to
    the challenge that it posed at its last look.
    """

    def __init__(self) -> None:
        self._current, self._before = secrets.token_hex(_BYTES), ""
        self._replaced_at: float | None = None

    def pose(self, now: float) -> str:
        """The challenge to be shown to nodes, at ``now`` of a monotonic clock."""
        if self._replaced_at is None:
            self._replaced_at = now
        elif now >= self._replaced_at + _REPLACED_EVERY_S:
            self._current, self._before = secrets.token_hex(_BYTES), self._current
            self._replaced_at = now
        return self._current

    def is_answered_by(self, answer: str) -> bool:
        """Whether this answer was given to one of the challenges that count."""
        return bool(answer) and answer in {self._current, self._before}
