"""`Preemption`: room is made for those to whom it is due, where there is none.

For a higher priority at once, at the cost of lower ones. Within one priority an owner's slots go to
another when the one has missed so much more of its share than the other that it is worth the
trouble: first as trials end, after some minutes more by preemption. Experiments of one owner, and
requests larger than all that comes free by itself, get their slots as trials end.

Nothing is cleared for what would then not fit; and what is cleared for somebody is claimed.
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

#: So often shares are compared.
_REVIEW_S: Final = 10.0
#: Trials that were to end by themselves, and did not, have to give way after this, in seconds. A
#: node that is kept for something large may have empty slots for so long, as one by one ends.
_CLAIM_TIMEOUT_S: Final = {SHARE: 240.0, SIZE: 900.0}


class Preemption:
    """Makes claims, and has others let go of what is in their way."""

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
        """Clear what has to be cleared."""
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
        """Where trials were to end by themselves, and did not, they have to give way."""
        grace_s = self._planner.grace_s
        if grace_s is None:
            return
        for claim in self._planner.claims:
            if self._planner.now >= claim.at + _CLAIM_TIMEOUT_S.get(claim.kind, math.inf):
                for part in claim.givers:
                    self._planner.ledger.hurry(part, grace_s)
