"""`FairShareAllocator`: decides what the farm offers each experiment of each node.

It receives the nodes, and what experiments want, hold and know; `offers` returns the offers to
send. It has no clock: callers pass the time, too.

**Nothing is promised twice.** An offer is absolute. The most that an experiment may hold is the
maximum of all offers that it may still follow
(`tunemq_scheduler.farm.allocation.node_grants`). The allocator gives one experiment's slots to
another only after the first has confirmed the lower offer and released them.

**After a restart** experiments follow offers that this allocator does not know. Until each has
reported what it holds, no experiment gets anything. A node of which one of them had something stays
closed until that one has confirmed a new offer.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Final

from tunemq_scheduler.core.shared_amounts import OfferUsage, ResourceAmounts
from tunemq_scheduler.farm.allocation.allocation_reasons import AllocationExplainer
from tunemq_scheduler.farm.allocation.allocation_state import AllocationState
from tunemq_scheduler.farm.allocation.amounts import least
from tunemq_scheduler.farm.allocation.granting import SlotGranting
from tunemq_scheduler.farm.allocation.idling import IdleSlotReclaim
from tunemq_scheduler.farm.allocation.members import FairShareSettings, ShareMember
from tunemq_scheduler.farm.allocation.node_grants import NodePart
from tunemq_scheduler.farm.allocation.overdue_slots import OverdueSlots
from tunemq_scheduler.farm.allocation.preemption import Preemption
from tunemq_scheduler.farm.allocation.suspect_trials import SuspectIsolation
from tunemq_shared.protocol.messages import NodeJoined, NodeOffered

#: The interval after which passing time alone may change offers.
_POLL_INTERVAL_S: Final = 1.0


class FairShareAllocator:
    """Shares a farm; see the module's docstring.

    It ignores experiments and nodes that do not exist, because messages may overtake each other.
    """

    def __init__(self, settings: FairShareSettings | None = None) -> None:
        self._state = state = AllocationState(settings or FairShareSettings())
        self._ledger, self._members = state.ledger, state.members
        self._granting = SlotGranting(state)
        self._clearing = Preemption(state, self._granting.passed)
        self._idling = IdleSlotReclaim(state, self._granting)
        self._isolation = SuspectIsolation(state)
        self._overdue = OverdueSlots(state)
        #: Explains for people who has what, and why others wait.
        self.explainer = AllocationExplainer(state)
        self._is_changed = False
        self._looked_at = 0.0

    def advance(self, now: float) -> None:
        """Set the time to ``now``, in seconds of a clock that never goes back."""
        if now > self._members.now:
            self._members.advance(now)

    # --- nodes ------------------------------------------------------------------------------------

    def node_joined(self, joined: NodeJoined) -> None:
        """Add a node."""
        if joined.instance_id in self._ledger.nodes:
            return
        self._ledger.add_node(joined)
        self._book_node(joined.instance_id)

    def node_lost(self, instance_id: str, *, is_dead: bool = False) -> None:
        """Offer nothing of a lost node; forget a dead one."""
        node = self._ledger.nodes.get(instance_id)
        if node is None:
            return
        node.is_lost = True
        self._ledger.refresh(instance_id)
        self._book_node(instance_id)
        if is_dead:
            for part in list(node.parts.values()):
                self._members.of(part).parts.pop(instance_id, None)
            self._ledger.remove_node(instance_id)
            for claim in self._state.claims_on(instance_id):
                self._state.drop_claim(claim)
            for member in self._members:
                member.avoided.pop(instance_id, None)
                member.known_to.discard(instance_id)

    def node_returned(self, instance_id: str) -> None:
        """Use a lost node again as before, and repeat its offers."""
        node = self._ledger.nodes.get(instance_id)
        if node is None or not node.is_lost:
            return
        node.is_lost = False
        for part in list(node.parts.values()):
            self._ledger.say_again(part)
        self._ledger.refresh(instance_id)
        self._book_node(instance_id)

    def devices_withheld(self, instance_id: str, devices: Mapping[str, str]) -> None:
        """Withhold these devices of a node, for these reasons; all others may be given again.

        An experiment keeps a withheld device until its trial has ended.
        """
        node = self._ledger.nodes.get(instance_id)
        if node is None:
            return
        self._ledger.withhold(instance_id, devices)
        for part in list(node.parts.values()):
            self._take_withheld(part)
        self._book_node(instance_id)

    def node_drained(self, instance_id: str, grace_s: float | None = None) -> None:
        """Empty a node: its trials run to their end, or are preempted within a grace period."""
        if (node := self._ledger.nodes.get(instance_id)) is not None:
            node.is_draining = True
            self._empty_node(instance_id, grace_s)

    def node_ending(self, instance_id: str) -> None:
        """Offer nothing more of a node that was told to end; it ends its trials itself."""
        if (node := self._ledger.nodes.get(instance_id)) is not None:
            node.is_ending = True
            self._empty_node(instance_id, None)

    def _empty_node(self, instance_id: str, grace_s: float | None) -> None:
        for part in list(self._ledger.nodes[instance_id].parts.values()):
            self._empty(part, grace_s)
        self._ledger.refresh(instance_id)
        self._book_node(instance_id)

    def node_resumed(self, instance_id: str) -> None:
        """Use a drained node again."""
        node = self._ledger.nodes.get(instance_id)
        if node is not None and node.is_draining:
            node.is_draining = False
            self._ledger.refresh(instance_id)
            self._book_node(instance_id)

    # --- experiments ------------------------------------------------------------------------------

    def experiment_added(
        self, name: str, owner: str, priority: int = 0, order: float = 0.0
    ) -> None:
        """Add an experiment; of an owner's with equal slots, the lowest order is next."""
        if name not in self._members:
            self._members.add(ShareMember(name, owner, priority, order))
            self._is_changed = True

    def expect(self, name: str, hint: str = "") -> None:
        """Wait for the report of an experiment that ran before this allocator started.

        ``hint`` tells people how long that may take, and what they can do.
        """
        if name in self._members:
            self._members[name].is_inherited = self._members[name].is_expected = True
            self._members.expected[name] = hint

    def waits_for(self, name: str) -> bool:
        """Return whether all offers wait for the report of an experiment."""
        return name in self._members.expected

    def experiment_restarted(self, name: str) -> None:
        """Repeat an experiment's offers, because its new process may not have them."""
        if name in self._members:
            self._overdue.forget(name)
            for part in self._members[name].parts.values():
                self._ledger.say_again(part)
            self._is_changed = True

    def experiment_paused(self, name: str, grace_s: float | None = None) -> None:
        """Offer an experiment nothing until it is resumed; with a grace, preempt its trials."""
        if name in self._members:
            member = self._members[name]
            member.is_paused = True
            for part in list(member.parts.values()):
                self._empty(part, grace_s)
            self._members.review(member)

    def experiment_resumed(self, name: str) -> None:
        """Offer an experiment slots again."""
        if name in self._members:
            self._members[name].is_paused = False
            self._members.review(self._members[name])
            self._is_changed = True

    def experiment_gone(self, name: str) -> None:
        """Remove an ended experiment that holds nothing any more, and free its slots."""
        if name not in self._members:
            return
        member = self._members[name]
        for part in member.parts.values():
            self._members.book_part(part, counts=False)
            self._ledger.forget(part)
        for claim in self._state.claims:
            for part in [one for one in claim.givers if one.experiment == name]:
                del claim.givers[part]
        self._ledger.forget_numbers(name)
        self._members.remove(name)
        self._is_changed = True

    def usage(self, name: str, usage: OfferUsage) -> None:
        """Process an experiment's report of its known offers, holdings and demands."""
        if name not in self._members:
            return
        member = self._members[name]
        if member.is_expected:
            self._adopt(member, usage)
        self._catch_up(member, usage)
        for instance_id, part in list(member.parts.items()):
            node = self._ledger.nodes.get(instance_id)
            if node is None or node.is_lost or instance_id not in usage.seen:
                continue  # it reports nothing about a node that it considers lost
            held = usage.held.get(instance_id, ResourceAmounts())
            if not part.unknown_until:  # it can hold no more than it was offered
                held = least(held, part.taken)
            held = least(held, node.total)
            if part.report(usage.seen[instance_id], held, self._members.now):
                for kept, gone in part.swap(node.are_alike):
                    self._state.move_claim(instance_id, kept.amounts, gone.amounts)
                self._ledger.changed(part)
                self._members.book_part(part, counts=True)
            if node.withheld:
                self._take_withheld(part)
            if part.is_over:
                self._members.book_part(part, counts=False)
                self._ledger.forget(part)
                del member.parts[instance_id]
        member.hear(usage)
        self._take_spare(member)
        self._members.review(member)
        self._is_changed = True

    # --- offers and reports -----------------------------------------------------------------------

    def offers(self) -> list[tuple[str, NodeOffered]]:
        """Return the offers to send, by experiment; lowered offers come first."""
        now = self._members.now
        if self._is_changed or now >= self._looked_at + _POLL_INTERVAL_S:
            self._looked_at = now
            self._members.settle()
            self._idling.run()
            self._isolation.run()
            self._granting.run()
            self._clearing.run()
            self._granting.settle_claims()
            self._members.settle()
            self._is_changed = False
        return [(part.experiment, part.next_offer()) for part in self._ledger.take_stale()]

    def overdue(self) -> set[str]:
        """Return the experiments that keep what they should have released long ago.

        Ending their trials and removing them frees it.
        """
        return self._overdue.find()

    # --- helpers ----------------------------------------------------------------------------------

    def _adopt(self, member: ShareMember, usage: OfferUsage) -> None:
        """Take over the offers of an earlier allocator."""
        member.is_expected = False
        member.was_alone = frozenset(usage.alone)
        self._members.expected.pop(member.name, None)
        # In the order of the report: the order of a set differs between processes.
        for instance_id in dict.fromkeys((*usage.seen, *usage.held)):
            if instance_id in member.parts or not usage.seen.get(instance_id, 1):
                continue  # it was never offered anything there
            part = self._state.part(member, instance_id)
            held = usage.held.get(instance_id, ResourceAmounts())
            if (node := self._ledger.nodes.get(instance_id)) is not None:
                held = least(held, node.total)
            part.adopt(usage.seen.get(instance_id, 0), held, self._members.now)
            member.known_to.add(instance_id)
            self._ledger.changed(part)
            self._state.book(part)

    def _catch_up(self, member: ShareMember, usage: OfferUsage) -> None:
        """Continue the numbers of an earlier allocator, or of an earlier run of the experiment.

        An earlier allocator's offers of a node that was away when this one started still count. All
        others were made by this one, so that it knows them, whatever the experiment reports.
        """
        for instance_id, seen in usage.seen.items():
            is_there = instance_id in self._ledger.nodes
            if is_there and seen > self._ledger.last_offer(member.name, instance_id):
                part = self._state.part(member, instance_id)
                knows_all = not member.is_inherited or instance_id in member.known_to
                part.count_from(seen, knows_all=knows_all)
                member.known_to.add(instance_id)
                self._ledger.changed(part)
                self._state.book(part)

    def _take_spare(self, member: ShareMember) -> None:
        """Withdraw offers that it neither holds nor wants; the newest first."""
        if member.idle[()]:
            self._name_spare(member)
        for grant in member.idle_grants():
            if grant.part.instance_id in member.excluded.get(grant.request, ()):
                self._state.remove(grant)  # it should get the same on another node
        for request, idle in list(member.idle.items()):
            spare = idle - (0 if member.is_paused else member.wants.get(request, 0))
            if spare > 0:
                grants = [one for one in member.idle_grants() if one.request == request]
                for grant in sorted(grants, key=lambda one: -one.at)[:spare]:
                    self._state.remove(grant)

    def _name_spare(self, member: ShareMember) -> None:
        """Assign unused parts of larger slots to smaller requests."""
        for grant in member.idle_grants():
            node = self._ledger.nodes.get(grant.part.instance_id)
            if not grant.request and not (node is not None and node.alone_for):
                for request in member.wants:
                    amounts = self._ledger.estimate(request)
                    if amounts and amounts.resources == grant.amounts.resources:
                        grant.request = request
                        self._state.book(grant.part)
                        break

    def _take_withheld(self, part: NodePart) -> None:
        """Withdraw empty offers of withheld devices.

        This withdraws only what the experiment has not received, or has received and does not use.
        For everything else it is unknown whether a trial uses it.
        """
        withheld = self._ledger.nodes[part.instance_id].withheld
        for grant in list(part.grants):
            is_empty = grant.idle_since is not None or not grant.n
            if is_empty and grant.amounts.devices.keys() & withheld:
                self._state.remove(grant)

    def _empty(self, part: NodePart, grace_s: float | None) -> None:
        for grant in list(part.grants):
            self._ledger.remove(grant, grace_s)
        if grace_s is not None:
            self._ledger.hurry(part, grace_s)
        self._state.book(part)

    def _book_node(self, instance_id: str) -> None:
        """Update the totals, parts and demands after a node came, went or changed."""
        self._members.totals = self._ledger.totals()
        for part in self._ledger.nodes[instance_id].parts.values():
            self._state.book(part)
        for member in self._members:
            self._members.review(member)
        self._is_changed = True
