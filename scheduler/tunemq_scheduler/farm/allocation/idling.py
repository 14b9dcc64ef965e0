"""`IdleSlotReclaim`: takes back offered slots that stay empty while others wait."""

from __future__ import annotations

from typing import Final

from tunemq_scheduler.farm.allocation.allocation_state import AllocationState
from tunemq_scheduler.farm.allocation.amounts import SlotRequest, plus, total
from tunemq_scheduler.farm.allocation.granting import SlotGranting
from tunemq_scheduler.farm.allocation.members import ShareMember
from tunemq_scheduler.farm.allocation.node_grants import SlotGrant

#: How long a slot may be empty while others wait.
_IDLE_S: Final = 30.0
_POLL_INTERVAL_S: Final = 10.0
#: How long an experiment that left a slot empty gets nothing on that node; doubled each time.
_AVOIDED_S: Final = 60.0
_DOUBLED_AT_MOST: Final = 2
#: How long a request whose slot stayed empty comes after the experiment's other requests.
_BEHIND_S: Final = 60.0


class IdleSlotReclaim:
    """Finds slots that stay empty although trials wait.

    An experiment may have reasons for this: a node failed its trials, or its search algorithm is
    still computing.
    """

    def __init__(self, state: AllocationState, granting: SlotGranting) -> None:
        self._state, self._ledger, self._members = state, state.ledger, state.members
        self._granting = granting
        self._looked_at = 0.0

    def run(self) -> None:
        """Take back empty slots that others wait for."""
        now = self._state.now
        if now < self._looked_at + _POLL_INTERVAL_S:
            return
        self._looked_at = now
        for member in self._members:
            over = [node for node, until in member.avoided.items() if until <= now]
            for node in over:
                del member.avoided[node]
                self._ledger.grown += 1  # this experiment may use that node again
            member.behind = {one: until for one, until in member.behind.items() if until > now}
        names = {
            name
            for request, names in self._members.waiting.items()
            if self._granting.is_blocked(request)
            for name in names
        }
        for member in list(self._members):
            if not any(member.idle.values()):
                continue
            others_wait = bool(names - {member.name})
            for part in list(member.parts.values()):
                for grant in list(part.grants):
                    if self._is_unused(grant) and self._is_in_the_way(member, grant):
                        member.behind[grant.request] = now + _BEHIND_S
                        self._state.remove(grant)
                    elif others_wait or self._is_shunned(member, grant):
                        self._look_at(member, grant)

    def _is_in_the_way(self, member: ShareMember, grant: SlotGrant) -> bool:
        """Return whether an experiment's empty slots are all that blocks its other requests.

        A slot that was offered for a paused trial may stay empty as long as another trial waits.
        """
        waiting = self._members.waiting
        mine = [one for one in waiting if one != grant.request and member.name in waiting[one]]
        return any(
            self._is_in_the_capacity_of(request, member, grant)
            or self._is_in_the_quota_of(request, member)
            for request in mine
        )

    def _is_in_the_capacity_of(
        self, request: SlotRequest, member: ShareMember, grant: SlotGrant
    ) -> bool:
        instance_id = grant.part.instance_id
        node = self._ledger.nodes.get(instance_id)
        if node is None or not node.is_open or not self._granting.is_blocked(request):
            return False
        idle = total(one.amounts for one in grant.part.grants if not one.is_held)
        devices = node.devices(dict(request), plus(node.capacity, idle))
        return devices is not None and instance_id not in member.excluded.get(request, ())

    def _is_in_the_quota_of(self, request: SlotRequest, member: ShareMember) -> bool:
        quotas, amounts = self._members.quotas, self._ledger.estimate(request)
        if amounts is None or not quotas.hit(member.owner, amounts):
            return False
        idle = [one.amounts for one in member.idle_grants()]
        return not quotas.hit_later(member.owner, amounts, idle)

    def _is_shunned(self, member: ShareMember, grant: SlotGrant) -> bool:
        """Return whether a waiting trial avoids all nodes offered to it, and another has space."""
        shunned = member.shunned.get(grant.request)
        if not shunned:
            return False
        alike = (one for one in member.idle_grants() if one.request == grant.request)
        nodes = {one.part.instance_id for one in alike}
        return any(
            nodes <= some and self._ledger.placement.fit(dict(grant.request), "", some) is not None
            for some in shunned
        )

    def _look_at(self, member: ShareMember, grant: SlotGrant) -> None:
        node = grant.part.instance_id
        if grant.is_held:
            member.unused.pop(node, None)
        elif self._is_unused(grant):
            times = min(member.unused[node], _DOUBLED_AT_MOST)
            member.unused[node] += 1
            member.avoided[node] = self._state.now + _AVOIDED_S * 2**times
            self._state.remove(grant)

    def _is_unused(self, grant: SlotGrant) -> bool:
        return grant.idle_since is not None and self._state.now >= grant.idle_since + _IDLE_S
