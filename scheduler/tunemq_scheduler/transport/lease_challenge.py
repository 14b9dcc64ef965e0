"""`LeaseChallenge`: a random number that nodes repeat in their leases, to prove that these are new.

Renewal numbers show which of two leases is newer. But a scheduler that has just started has seen
none, and an attacker may replay old leases. A lease that repeats a number which this scheduler
chose a moment ago is certainly newer than that number. Pure.
"""

from __future__ import annotations

import secrets
from typing import Final

from tunemq_shared.broker.redis_keys import LEASE_TTL_S

#: A challenge is replaced at this interval, and stays valid until the next one is replaced. So a
#: live node has at least this long to answer, and a replayed lease is valid for at most twice this
#: long.
_REPLACED_EVERY_S: Final = LEASE_TTL_S
_BYTES: Final = 16


class LeaseChallenge:
    """The current challenge and the previous one.

    Challenges change only when the scheduler polls; one that polls too rarely still finds answers
    to the challenge of its last poll.
    """

    def __init__(self) -> None:
        self._current, self._before = secrets.token_hex(_BYTES), ""
        self._replaced_at: float | None = None

    def pose(self, now: float) -> str:
        """Return the challenge for nodes, at ``now`` of a monotonic clock."""
        if self._replaced_at is None:
            self._replaced_at = now
        elif now >= self._replaced_at + _REPLACED_EVERY_S:
            self._current, self._before = secrets.token_hex(_BYTES), self._current
            self._replaced_at = now
        return self._current

    def is_answered_by(self, answer: str) -> bool:
        """Return whether this answers one of the valid challenges."""
        return bool(answer) and answer in {self._current, self._before}
