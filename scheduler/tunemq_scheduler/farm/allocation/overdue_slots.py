"""`OverdueSlots`: finds the experiments that keep slots which they must have released.

A slot is needed by others from its withdrawal on: a trial that is preempted saves within its grace,
and an experiment confirms each offer soon. One that does neither, because its process is broken or
hostile, would otherwise keep its slots for ever.
"""

from __future__ import annotations

import math
from typing import Final

from tunemq_scheduler.farm.allocation.allocation_state import AllocationState
from tunemq_scheduler.farm.allocation.node_grants import NodePart

#: How long after that something is overdue, in seconds; a trial that writes a checkpoint may take
#: ten minutes longer than its grace.
OVERDUE_S: Final = 900.0
#: How often all parts are checked, in seconds.
_REVIEW_S: Final = 10.0

#: The offer that an experiment confirmed last, if it must confirm another; and the grace of its
#: trials, if they are preempted.
_Awaited = tuple[int | None, float | None]


class OverdueSlots:
    """Remembers for each part since when its experiment has to release or to confirm something."""

    def __init__(self, state: AllocationState) -> None:
        self._state = state
        self._since: dict[NodePart, tuple[_Awaited, float]] = {}
        self._reviewed_at = -math.inf

    def forget(self, name: str) -> None:
        """Begin anew for an experiment, because it has another process."""
        self._since = {part: at for part, at in self._since.items() if part.experiment != name}

    def find(self) -> set[str]:
        """Return the experiments with something overdue; empty between reviews."""
        now = self._state.now
        if now < self._reviewed_at + _REVIEW_S:
            return set()
        self._reviewed_at = now
        before, self._since = self._since, {}
        found: set[str] = set()
        for member in self._state.members:
            for part in member.parts.values():
                grace_s = part.grace_s if part.leaving else None
                awaited = part.unconfirmed_since, grace_s
                if awaited == (None, None) or not self._state.ledger.counts(part):
                    continue
                known, since = before.get(part, (awaited, now))
                self._since[part] = awaited, since if known == awaited else now
                if now >= self._since[part][1] + (grace_s or 0.0) + OVERDUE_S:
                    found.add(member.name)
        return found
