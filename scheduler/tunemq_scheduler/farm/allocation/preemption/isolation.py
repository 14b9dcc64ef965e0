"""`SuspectIsolation`: runs a suspect trial alone on a node.

A node is lost with all trials on it, of any experiment, and the cause is unknown. So each trial
that lost too many nodes runs alone next: then the loss of another node is evidence against it.

For each experiment with a waiting suspect trial, one node at a time is emptied. Its trials run to
their end; if the farm preempts, they are preempted after `_TIMEOUT_S`. When the suspect trial
reports a new result or ends, the node is shared again. Experiments take turns, and none gets more
than its share of the nodes in this way.
"""

from __future__ import annotations

from typing import Final

from tunemq_scheduler.farm.allocation.books.amounts import covers
from tunemq_scheduler.farm.allocation.books.ledger import READY, LedgerNode, NodeLedger
from tunemq_scheduler.farm.allocation.books.member import ShareMember
from tunemq_scheduler.farm.allocation.books.members import ShareMembers
from tunemq_scheduler.farm.allocation.books.node_parts import NodePart, SlotGrant
from tunemq_scheduler.farm.allocation.books.slot_requests import ALONE
from tunemq_scheduler.farm.allocation.share_settings import FairShareSettings

#: The time after which trials on such a node are preempted, in seconds.
_TIMEOUT_S: Final = 240.0


class SuspectIsolation:
    """Reserves nodes for suspect trials."""

    def __init__(
        self, settings: FairShareSettings, ledger: NodeLedger, members: ShareMembers
    ) -> None:
        self._grace_s = settings.preempt_grace_s if settings.preempts else None
        self._ledger, self._members = ledger, members
        #: Since when each of these nodes is being emptied.
        self._since: dict[str, float] = {}
        #: The turn in which each experiment last got a node.
        self._turns: dict[str, int] = {}
        self._turn = 0

    def run(self, now: float) -> None:
        """Reserve the nodes that are needed, and release all others."""
        if self._members.expected:
            return
        for instance_id, node in self._ledger.nodes.items():
            if node.alone_for and not self._is_needed(instance_id, node):
                self._let_go(instance_id, node, now)
        self._turns = {name: turn for name, turn in self._turns.items() if name in self._members}
        self._since = {one: at for one, at in self._since.items() if one in self._ledger.nodes}
        for member in self._members:
            for instance_id in member.alone:
                known = self._ledger.nodes.get(instance_id)
                if known is not None and known.state == READY and not known.alone_for:
                    self._ledger.keep_for(instance_id, member.name)
        waiting = [one for one in self._members if one.suspect is not None and not one.is_paused]
        for member in sorted(
            waiting, key=lambda one: (-one.priority, self._turns.get(one.name, 0))
        ):
            self._serve(member, now)

    def _is_needed(self, instance_id: str, node: LedgerNode) -> bool:
        member = self._members.get(node.alone_for)
        if member is None or member.is_paused or node.state != READY:
            return False
        return instance_id in member.alone or self._would_do(member, instance_id)

    def _would_do(self, member: ShareMember, instance_id: str) -> bool:
        suspect = member.suspect
        return (
            suspect is not None
            and instance_id not in suspect.excluded
            and instance_id not in member.avoided
            and self._ledger.capacity.could_hold(instance_id, suspect.request)
        )

    def _serve(self, member: ShareMember, now: float) -> None:
        mine = [one for one, node in self._ledger.nodes.items() if node.alone_for == member.name]
        emptied = next((one for one in mine if one not in member.alone), None)
        if emptied is None:
            ready = sum(node.state == READY for node in self._ledger.nodes.values())
            if len(mine) >= max(1, ready // len(list(self._members))):
                return
            emptied = self._choose(member)
            if emptied is None:
                return
            self._turn += 1
            self._turns[member.name] = self._turn
            self._since[emptied] = now
            self._ledger.keep_for(emptied, member.name)
            self._empty(emptied, now)
        self._hurry(emptied, member, now)
        self._give(emptied, member, now)

    def _choose(self, member: ShareMember) -> str | None:
        """Return the node on which the fewest trials have to end first."""
        nodes = [
            one
            for one, node in self._ledger.nodes.items()
            if node.is_open and not node.is_unknown and self._would_do(member, one)
        ]
        return min(nodes, key=self._slots_held, default=None)

    def _slots_held(self, instance_id: str) -> int:
        parts = self._ledger.nodes[instance_id].parts.values()
        return sum(grant.is_held for part in parts for grant in (*part.grants, *part.leaving))

    def _empty(self, instance_id: str, now: float) -> None:
        for part in list(self._ledger.nodes[instance_id].parts.values()):
            for grant in list(part.grants):
                self._remove(grant, now)

    def _hurry(self, instance_id: str, member: ShareMember, now: float) -> None:
        if self._grace_s is None or now < self._since.get(instance_id, now) + _TIMEOUT_S:
            return
        for part in list(self._ledger.nodes[instance_id].parts.values()):
            if part.leaving and self._members[part.experiment].priority <= member.priority:
                self._ledger.hurry(part, self._grace_s)

    def _give(self, instance_id: str, member: ShareMember, now: float) -> None:
        """Offer the whole node once no other experiment holds a part of it."""
        node = self._ledger.nodes[instance_id]
        part = self._ledger.part(member.name, instance_id)
        if part.grants or not part.may_grow or not covers(node.free, node.whole):
            return
        member.parts[instance_id] = part
        self._ledger.grant_whole(part, ALONE, now)
        self._book(part, now)

    def _let_go(self, instance_id: str, node: LedgerNode, now: float) -> None:
        self._since.pop(instance_id, None)
        for part in list(node.parts.values()):
            for grant in [one for one in part.grants if one.request == ALONE]:
                self._remove(grant, now)
        self._ledger.keep_for(instance_id, "")
        for part in list(node.parts.values()):
            is_paused = self._members[part.experiment].is_paused
            if node.state == READY and not is_paused and part.restore():
                self._ledger.changed(part)
                self._book(part, now)

    def _remove(self, grant: SlotGrant, now: float) -> None:
        self._ledger.remove(grant)
        self._book(grant.part, now)

    def _book(self, part: NodePart, now: float) -> None:
        node = self._ledger.nodes[part.instance_id]
        self._members.book_part(part, counts=not node.is_lost)
        self._members.review(self._members[part.experiment], now)
