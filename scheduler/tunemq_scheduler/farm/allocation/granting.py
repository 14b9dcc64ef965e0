"""`SlotGranting`: gives free slots to the experiments that are next."""

from __future__ import annotations

from collections import Counter
from typing import Final

from tunemq_scheduler.farm.allocation.books.amounts import covers, minus
from tunemq_scheduler.farm.allocation.books.claims import SlotClaim, SlotClaims
from tunemq_scheduler.farm.allocation.books.ledger import NodeLedger
from tunemq_scheduler.farm.allocation.books.member import ShareMember
from tunemq_scheduler.farm.allocation.books.members import ShareMembers
from tunemq_scheduler.farm.allocation.books.slot_requests import SlotRequest
from tunemq_scheduler.farm.allocation.turns import (
    ServeExperiment,
    ShareLevel,
    levels_of,
    take_turns,
)

#: A request may be passed over this often; then a slot is cleared for it.
MAX_TIMES_PASSED_OVER: Final = 64


class SlotGranting:
    """Gives free slots.

    Attributes:
        passed: by request, how often others got something while it waited.
    """

    def __init__(self, ledger: NodeLedger, members: ShareMembers, claims: SlotClaims) -> None:
        self._ledger = ledger
        self._members = members
        self._claims = claims
        self.passed: Counter[SlotRequest] = Counter()
        #: Requests for which there is no space until more becomes free, with the highest priority
        #: that waits for each.
        self._blocked: dict[SlotRequest, int] = {}
        self._grown = 0
        self._avoid: dict[str, set[str]] = {}

    def run(self, now: float) -> None:
        """Give all slots that can be given."""
        if self._members.expected:
            return
        self._avoid.clear()
        self.settle_claims(now)
        if self._ledger.grown != self._grown:
            self._grown = self._ledger.grown
            self._blocked.clear()
        waiting = self._members.waiting
        for request in [one for one in waiting if one not in self._blocked]:
            if self._ledger.capacity.fit(dict(request)) is None:
                self._block(request)
        open_ones = [request for request in waiting if request not in self._blocked]
        estimate = self._ledger.capacity.estimate
        for level, queues in levels_of(self._members, open_ones, estimate).items():
            take_turns(self._members, level, queues, self._server(level, now))
        for request in self.passed.keys() - waiting.keys():
            del self.passed[request]

    def is_blocked(self, request: SlotRequest) -> bool:
        """Return whether no node has space for a request."""
        return request in self._blocked

    # --- waiting requests -------------------------------------------------------------------------

    def _server(self, level: ShareLevel, now: float) -> ServeExperiment:
        def serve(member: ShareMember, request: SlotRequest) -> bool:
            if request in self._blocked or not self._give(member, request, now):
                return False
            self._pass_over(level.priority)
            self.passed.pop(request, None)
            return True

        return serve

    def _give(self, member: ShareMember, request: SlotRequest, now: float) -> bool:
        amounts = self._ledger.capacity.estimate(request)
        if amounts is None or self._members.quotas.hit(member.owner, amounts):
            return False
        if member.comes_behind(request):
            return False
        avoid = self._avoided_by(member, request)
        asked, preferred = dict(request), member.preferred.get(request, "")
        node = self._ledger.capacity.fit(asked, preferred, avoid)
        if node is None:
            if not avoid or self._ledger.capacity.fit(asked) is None:
                self._block(request)
            return False
        devices = self._ledger.capacity.devices(node, asked, self._ledger.nodes[node].capacity)
        if devices is None:
            return False
        self._grant(member, request, node, devices, now)
        return True

    def _grant(
        self,
        member: ShareMember,
        request: SlotRequest,
        instance_id: str,
        devices: dict[str, float],
        now: float,
    ) -> None:
        part = self._ledger.part(member.name, instance_id)
        member.parts[instance_id] = part
        self._ledger.grant(part, request, devices, now)
        self._members.book_part(part, counts=True)
        self._members.review(member, now)

    def _avoided_by(self, member: ShareMember, request: SlotRequest) -> set[str]:
        if member.name not in self._avoid:
            busy = {one for one, part in member.parts.items() if not part.may_grow}
            self._avoid[member.name] = busy | member.avoided.keys()
        return self._avoid[member.name] | member.excluded.get(request, frozenset())

    def _block(self, request: SlotRequest) -> None:
        waiting = self._members.waiting.get(request, ())
        top = max((self._members[name].priority for name in waiting), default=0)
        self._blocked[request] = top

    def _pass_over(self, priority: int) -> None:
        for request, top in self._blocked.items():
            if top >= priority:
                self.passed[request] += 1

    # --- claims -----------------------------------------------------------------------------------

    def settle_claims(self, now: float) -> None:
        """Give cleared slots, or free ones elsewhere, to the experiments that claimed them.

        There may be thousands of claims, so a claim is checked only when its node has changed.
        """
        grown, nowhere = self._ledger.grown, set[tuple[str, SlotRequest]]()
        for claim in sorted(self._claims, key=lambda one: -one.member.priority):
            owner, quotas = claim.member.owner, self._members.quotas
            if self._ledger.grown != grown:
                grown = self._ledger.grown
                nowhere.clear()
            is_as_it_was = self._version(claim) == claim.looked_at
            if not self._is_wanted(claim) or not (is_as_it_was or self._may_come(claim)):
                self._claims.drop(claim, now)
            elif quotas.hit_when_clear(owner, claim.amounts):
                continue
            elif not is_as_it_was and self._is_clear(claim):
                self._claims.drop(claim, now)
                devices = dict(claim.amounts.devices)
                self._grant(claim.member, claim.request, claim.instance_id, devices, now)
                self.passed.pop(claim.request, None)
            elif (claim.member.name, claim.request) in nowhere:
                claim.looked_at = self._version(claim)
            elif not self._try_elsewhere(claim, now):
                nowhere.add((claim.member.name, claim.request))
                claim.looked_at = self._version(claim)

    def _version(self, claim: SlotClaim) -> int:
        node = self._ledger.nodes.get(claim.instance_id)
        return 0 if node is None else node.version

    def _is_wanted(self, claim: SlotClaim) -> bool:
        member, request = claim.member, claim.request
        given = member.idle[request] + member.claims[request]
        wanted = 0 if member.is_paused else member.wants.get(request, 0)
        return member.name in self._members and given <= wanted

    def _may_come(self, claim: SlotClaim) -> bool:
        """Return whether the slot will be clear once all leaving trials have ended."""
        node = self._ledger.nodes.get(claim.instance_id)
        if node is None or not node.is_open:
            return False
        others = self._claims.claimed(claim.instance_id, claim.member.priority, claim)
        return covers(minus(node.not_offered, others), claim.amounts)

    def _is_clear(self, claim: SlotClaim) -> bool:
        part = claim.member.parts.get(claim.instance_id)
        may_grow = part is None or part.may_grow
        return may_grow and covers(self._ledger.nodes[claim.instance_id].free, claim.amounts)

    def _try_elsewhere(self, claim: SlotClaim, now: float) -> bool:
        asked = dict(claim.request)
        node = self._ledger.capacity.fit(asked, "", self._avoided_by(claim.member, claim.request))
        if node is None:
            return False
        devices = self._ledger.capacity.devices(node, asked, self._ledger.nodes[node].capacity)
        self._claims.drop(claim, now)
        self._grant(claim.member, claim.request, node, devices or {}, now)
        return True
