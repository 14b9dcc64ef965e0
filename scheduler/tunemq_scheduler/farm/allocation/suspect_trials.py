"""`SuspectIsolation`: runs a suspect trial alone on a node.

A node is lost with all trials on it, of any experiment, and the cause is unknown. So each trial
that lost too many nodes runs alone next: then the loss of another node is evidence against it.

For each experiment with a waiting suspect trial, one node at a time is emptied. Its trials run to
their end; if the farm preempts, they are preempted after `_TIMEOUT_S`. When the suspect trial
reports a new result or ends, the node is shared again. A trial that never reports would keep it for
ever: so the trials of one owner run alone for half of the time at most, `_ALONE_S` at once.
Experiments take turns, and none, nor an owner, gets more than its share of the nodes in this way.
"""

from __future__ import annotations

import math
from typing import Final

from tunemq_scheduler.farm.allocation.allocation_state import AllocationState
from tunemq_scheduler.farm.allocation.amounts import ALONE, covers
from tunemq_scheduler.farm.allocation.ledger import READY, LedgerNode
from tunemq_scheduler.farm.allocation.members import ShareMember

#: The time after which trials on such a node are preempted, in seconds.
_TIMEOUT_S: Final = 240.0
#: After this many seconds with reserved nodes, an owner gets none for as long.
_ALONE_S: Final = 1800.0


class SuspectIsolation:
    """Reserves nodes for suspect trials."""

    def __init__(self, state: AllocationState) -> None:
        self._state, self._ledger, self._members = state, state.ledger, state.members
        #: Since when each of these nodes is being emptied.
        self._since: dict[str, float] = {}
        #: When each owner's time with reserved nodes began.
        self._reserved: dict[str, float] = {}
        #: The turn in which each experiment last got a node.
        self._turns: dict[str, int] = {}
        self._turn = 0

    def run(self) -> None:
        """Reserve the nodes that are needed, and release all others."""
        if self._members.expected:
            return
        nodes, now = self._ledger.nodes, self._state.now
        self._reserved = {
            owner: at for owner, at in self._reserved.items() if now < at + 2 * _ALONE_S
        }
        for instance_id, node in nodes.items():
            if node.alone_for and not self._is_needed(instance_id, node):
                self._let_go(instance_id, node)
        self._turns = {name: turn for name, turn in self._turns.items() if name in self._members}
        self._since = {one: at for one, at in self._since.items() if one in nodes}
        for member in self._members:
            if not member.was_alone:
                continue
            if self._is_over(member.owner):
                member.was_alone = frozenset()
            for instance_id in member.was_alone & nodes.keys():
                if nodes[instance_id].is_open and self._may_have_more(member):
                    self._keep(instance_id, member)
        waiting = [one for one in self._members if one.suspect is not None and not one.is_paused]
        for member in sorted(
            waiting, key=lambda one: (-one.priority, self._turns.get(one.name, 0))
        ):
            self._serve(member)

    def _is_needed(self, instance_id: str, node: LedgerNode) -> bool:
        if node.alone_for not in self._members or node.state != READY:
            return False
        member = self._members[node.alone_for]
        if member.is_paused or self._is_over(member.owner):
            return False
        return instance_id in member.alone or self._would_do(member, instance_id)

    def _would_do(self, member: ShareMember, instance_id: str) -> bool:
        suspect = member.suspect
        return (
            suspect is not None
            and instance_id not in suspect.excluded
            and instance_id not in member.avoided
            and self._ledger.nodes[instance_id].could_hold(suspect.request)
        )

    def _serve(self, member: ShareMember) -> None:
        mine = [one for one, node in self._ledger.nodes.items() if node.alone_for == member.name]
        emptied = next((one for one in mine if one not in member.alone), None)
        if emptied is None:
            if self._is_over(member.owner) or not self._may_have_more(member):
                return
            emptied = self._choose(member)
            if emptied is None:
                return
            self._turn += 1
            self._turns[member.name] = self._turn
            self._since[emptied] = self._state.now
            self._keep(emptied, member)
            for part in list(self._ledger.nodes[emptied].parts.values()):
                for grant in list(part.grants):
                    self._state.remove(grant)
        self._hurry(emptied, member)
        self._give(emptied, member)

    def _keep(self, instance_id: str, member: ShareMember) -> None:
        self._ledger.keep_for(instance_id, member.name)
        self._reserved.setdefault(member.owner, self._state.now)

    def _is_over(self, owner: str) -> bool:
        """Whether an owner has used up its time with reserved nodes."""
        return self._state.now >= self._reserved.get(owner, math.inf) + _ALONE_S

    def _may_have_more(self, member: ShareMember) -> bool:
        """Whether an experiment, and its owner, have less than their share of the nodes."""
        reserved = [
            self._members[node.alone_for]
            for node in self._ledger.nodes.values()
            if node.alone_for in self._members
        ]
        ready = sum(node.state == READY for node in self._ledger.nodes.values())
        own = sum(one is member for one in reserved)
        of_owner = sum(one.owner == member.owner for one in reserved)
        owners = {one.owner for one in self._members}
        return own < max(1, ready // len(self._members)) and of_owner < max(1, ready // len(owners))

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

    def _hurry(self, instance_id: str, member: ShareMember) -> None:
        grace_s, now = self._state.grace_s, self._state.now
        if grace_s is None or now < self._since.get(instance_id, now) + _TIMEOUT_S:
            return
        for part in list(self._ledger.nodes[instance_id].parts.values()):
            if part.leaving and self._members.of(part).priority <= member.priority:
                self._ledger.hurry(part, grace_s)

    def _give(self, instance_id: str, member: ShareMember) -> None:
        """Offer the whole node once no other experiment holds a part of it."""
        node = self._ledger.nodes[instance_id]
        part = self._state.part(member, instance_id)
        if not part.grants and part.may_grow and covers(node.free, node.whole):
            self._state.grant(member, ALONE, instance_id, node.whole)

    def _let_go(self, instance_id: str, node: LedgerNode) -> None:
        self._since.pop(instance_id, None)
        for part in list(node.parts.values()):
            for grant in [one for one in part.grants if one.request == ALONE]:
                self._state.remove(grant)
        self._ledger.keep_for(instance_id, "")
        if node.state == READY:
            for part in list(node.parts.values()):
                self._state.restore(part)
