"""`Preemption`: clears slots for the experiments that are next if none is free.

For a higher priority it preempts lower ones at once. Within a priority, an owner that has missed
much more of its share gets slots of another: first as trials end, some minutes later by preemption.
Experiments of one owner, and requests larger than the slots that become free, get their slots as
trials end.

It clears nothing that would then not fit; and it reserves cleared slots with a claim.
"""

from __future__ import annotations

import math
from typing import Final

from tunemq_scheduler.farm.allocation.books.claims import SHARE, SIZE, SlotClaims
from tunemq_scheduler.farm.allocation.books.ledger import NodeLedger
from tunemq_scheduler.farm.allocation.books.members import ShareMembers
from tunemq_scheduler.farm.allocation.granting import SlotGranting
from tunemq_scheduler.farm.allocation.preemption.by_priority import PreemptionByPriority
from tunemq_scheduler.farm.allocation.preemption.by_share import PreemptionByShare
from tunemq_scheduler.farm.allocation.preemption.by_size import PreemptionBySize
from tunemq_scheduler.farm.allocation.preemption.by_turn import PreemptionByTurn
from tunemq_scheduler.farm.allocation.preemption.preemption_planner import PreemptionPlanner
from tunemq_scheduler.farm.allocation.share_settings import FairShareSettings

#: The interval at which shares are compared.
_REVIEW_S: Final = 10.0
#: The time after which trials that were expected to end are preempted, in seconds. A node that is
#: reserved for a large request may have empty slots for this long, while its trials end one by one.
_CLAIM_TIMEOUT_S: Final = {SHARE: 240.0, SIZE: 900.0}


class Preemption:
    """Makes claims, and withdraws the slots in their way."""

    def __init__(
        self,
        settings: FairShareSettings,
        ledger: NodeLedger,
        members: ShareMembers,
        claims: SlotClaims,
        granting: SlotGranting,
    ) -> None:
        self._planner = PreemptionPlanner(settings, ledger, members, claims)
        self._priorities = PreemptionByPriority(self._planner)
        self._shares = PreemptionByShare(self._planner)
        self._turns = PreemptionByTurn(self._planner)
        self._sizes = PreemptionBySize(self._planner, granting.passed)
        self._reviewed_at = -_REVIEW_S

    def run(self, now: float) -> None:
        """Clear the slots that are needed."""
        if self._planner.members.expected:
            return
        self._planner.begin(now)
        self._priorities.run()
        if now >= self._reviewed_at + _REVIEW_S:
            self._reviewed_at = now
            self._hurry()
            self._shares.run()
            self._turns.run()
            self._sizes.run()

    def _hurry(self) -> None:
        """Preempt trials that were expected to end and did not."""
        grace_s = self._planner.grace_s
        if grace_s is None:
            return
        for claim in self._planner.claims:
            if self._planner.now >= claim.at + _CLAIM_TIMEOUT_S.get(claim.kind, math.inf):
                for part in claim.givers:
                    self._planner.ledger.hurry(part, grace_s)
