"""`FairShareAllocator`: what the farm offers each experiment of each node.

It is told what nodes there are, and what experiments want, hold and know; `offers` says what is to
be sent. It has no clock: time is told it, too.

**Nothing is promised twice.** An offer is absolute. What an experiment may hold at worst is the
most of all offers by which it may still go (`tunemq_scheduler.farm.allocation.books.node_parts`):
room that is to be taken from one is given to another once the one has confirmed, and let go.

**After a restart** experiments go by offers of which this allotter knows nothing. Until each of
them has said what it holds, nobody gets anything; and of a node of which one of them had something,
until it has confirmed a new offer.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Final

from tunemq_scheduler.core.allotments import OfferUsage, ResourceAmounts
from tunemq_scheduler.farm.allocation.allocation_reasons import (
    AllocationExplainer,
    NodeAllocation,
    OwnerAccount,
)
from tunemq_scheduler.farm.allocation.books.claims import SlotClaims
from tunemq_scheduler.farm.allocation.books.ledger import NodeLedger
from tunemq_scheduler.farm.allocation.books.member import ShareMember
from tunemq_scheduler.farm.allocation.books.members import ShareMembers
from tunemq_scheduler.farm.allocation.books.node_parts import NodePart
from tunemq_scheduler.farm.allocation.granting import SlotGranting
from tunemq_scheduler.farm.allocation.idling import IdleSlotReclaim
from tunemq_scheduler.farm.allocation.preemption.isolation import SuspectIsolation
from tunemq_scheduler.farm.allocation.preemption.preemption import Preemption
from tunemq_scheduler.farm.allocation.share_settings import FairShareSettings
from tunemq_shared.protocol.messages import NodeJoined, NodeOffered

#: Time alone changes something so often.
_POLL_INTERVAL_S: Final = 1.0


class FairShareAllocator:
    """Shares a farm; see the module's docstring.

    Whatever names an experiment or a node that is not there is passed over: news cross each other.
    """

    def __init__(self, settings: FairShareSettings | None = None) -> None:
        settings = settings or FairShareSettings()
        self._now = 0.0
        self._ledger = NodeLedger()
        self._members = ShareMembers(settings, self._ledger.capacity.estimate)
        self._claims = SlotClaims(self._ledger, self._members)
        self._granting = SlotGranting(self._ledger, self._members, self._claims)
        self._clearing = Preemption(
            settings, self._ledger, self._members, self._claims, self._granting
        )
        self._idling = IdleSlotReclaim(self._ledger, self._members, self._granting)
        self._isolation = SuspectIsolation(settings, self._ledger, self._members)
        self._explainer = AllocationExplainer(self._ledger, self._members, self._claims)
        self._is_changed = False
        self._looked_at = 0.0

    def advance(self, now: float) -> None:
        """It is ``now``, in seconds of a clock that never goes back."""
        if now > self._now:
            if self._now:
                self._members.advance(now - self._now)
            self._now = now

    # --- nodes ------------------------------------------------------------------------------------

    def node_joined(self, joined: NodeJoined) -> None:
        """A node is there."""
        if joined.instance_id in self._ledger.nodes:
            return
        self._ledger.add_node(joined)
        self._book_node(joined.instance_id)

    def node_lost(self, instance_id: str, *, is_dead: bool = False) -> None:
        """A node is silent: nothing of it is offered. One that is dead is forgotten."""
        node = self._ledger.nodes.get(instance_id)
        if node is None:
            return
        node.is_lost = True
        self._ledger.refresh(instance_id)
        self._book_node(instance_id)
        if is_dead:
            for part in list(node.parts.values()):
                self._members[part.experiment].parts.pop(instance_id, None)
            self._ledger.remove_node(instance_id)
            for member in self._members:
                member.avoided.pop(instance_id, None)

    def node_returned(self, instance_id: str) -> None:
        """A lost node is heard again: all is as it was, and said again."""
        node = self._ledger.nodes.get(instance_id)
        if node is None or not node.is_lost:
            return
        node.is_lost = False
        for part in list(node.parts.values()):
            part.say_again()
            self._ledger.changed(part)
        self._ledger.refresh(instance_id)
        self._book_node(instance_id)

    def devices_withheld(self, instance_id: str, devices: Mapping[str, str]) -> None:
        """Nothing of these of a node's devices is given to anybody, for these reasons, for now.

        Who has something of one keeps it until its trial has ended; all others may be given
        (again).
        """
        node = self._ledger.nodes.get(instance_id)
        if node is None:
            return
        self._ledger.withhold(instance_id, devices)
        for part in list(node.parts.values()):
            self._take_withheld(part)
        self._book_node(instance_id)

    def node_drained(self, instance_id: str, grace_s: float | None = None) -> None:
        """A node is to be emptied: trials run to their end there, or give way within a grace."""
        node = self._ledger.nodes.get(instance_id)
        if node is None:
            return
        node.is_draining = True
        for part in list(node.parts.values()):
            self._empty(part, grace_s)
        self._ledger.refresh(instance_id)
        self._book_node(instance_id)

    def node_resumed(self, instance_id: str) -> None:
        """A node that was to be emptied is used again."""
        node = self._ledger.nodes.get(instance_id)
        if node is not None and node.is_draining:
            node.is_draining = False
            self._ledger.refresh(instance_id)
            self._book_node(instance_id)

    # --- experiments ------------------------------------------------------------------------------

    def experiment_added(
        self, name: str, owner: str, priority: int = 0, order: float = 0.0
    ) -> None:
        """An experiment begins; of an owner's that have as much the lowest order is next."""
        if name not in self._members:
            self._members.add(ShareMember(name, owner, priority, order))
            self._is_changed = True

    def expect(self, name: str) -> None:
        """This one ran before this allotter did: first it says what it holds."""
        if name in self._members:
            self._members[name].is_expected = True
            self._members.expected[name] = None

    def experiment_restarted(self, name: str) -> None:
        """It may not have got the last offers."""
        if name in self._members:
            for part in self._members[name].parts.values():
                part.say_again()
                self._ledger.changed(part)
            self._is_changed = True

    def experiment_paused(self, name: str, grace_s: float | None = None) -> None:
        """It is to have nothing until it is resumed; trials give way where there is a grace."""
        if name in self._members:
            member = self._members[name]
            member.is_paused = True
            for part in list(member.parts.values()):
                self._empty(part, grace_s)
            self._members.review(member, self._now)

    def experiment_resumed(self, name: str) -> None:
        """It may have something again."""
        if name in self._members:
            self._members[name].is_paused = False
            self._members.review(self._members[name], self._now)
            self._is_changed = True

    def experiment_gone(self, name: str) -> None:
        """It is over: nothing of it runs anywhere, and what it had is free."""
        if name not in self._members:
            return
        member = self._members[name]
        for part in member.parts.values():
            self._members.book_part(part, counts=False)
            self._ledger.forget(part)
        self._ledger.forget_numbers(name)
        self._members.remove(name)
        self._is_changed = True

    def usage(self, name: str, usage: OfferUsage) -> None:
        """What an experiment says that it knows, holds and wants."""
        if name not in self._members:
            return
        member = self._members[name]
        if member.is_expected:
            self._adopt(member, usage)
        self._catch_up(member, usage)
        for instance_id, part in list(member.parts.items()):
            node = self._ledger.nodes.get(instance_id)
            if node is None or node.is_lost or instance_id not in usage.seen:
                continue  # as long as it takes a node for lost it says nothing about it
            held = usage.held.get(instance_id, ResourceAmounts())
            if part.report(usage.seen[instance_id], held, self._now):
                for kept, gone in part.swap(node.are_alike):
                    self._claims.move(instance_id, kept.amounts, gone.amounts)
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
        self._members.review(member, self._now)
        self._is_changed = True

    # --- offers and reports -----------------------------------------------------------------------

    def offers(self) -> list[tuple[str, NodeOffered]]:
        """What is to be sent, to which experiment; lowered offers come first."""
        if self._is_changed or self._now >= self._looked_at + _POLL_INTERVAL_S:
            self._looked_at = self._now
            self._members.settle()
            self._idling.run(self._now)
            self._isolation.run(self._now)
            self._granting.run(self._now)
            self._clearing.run(self._now)
            self._granting.settle_claims(self._now)
            self._members.settle()
            self._is_changed = False
        return [(part.experiment, part.next_offer()) for part in self._ledger.take_stale()]

    def why(self, name: str, request: dict[str, float]) -> list[str]:
        """Why a trial of this experiment with this request waits, in sentences."""
        return self._explainer.why(name, request)

    def snapshot(self) -> list[NodeAllocation]:
        """All nodes: what they have, what is free, who has the rest."""
        return self._explainer.snapshot()

    def accounts(self) -> list[OwnerAccount]:
        """What owners hold, and what they are entitled to."""
        return self._explainer.accounts()

    def waiting(self) -> dict[str, dict[str, int]]:
        """How many more trials experiments would have begin, by what such a trial needs."""
        return self._explainer.waiting()

    # --- helpers ----------------------------------------------------------------------------------

    def _adopt(self, member: ShareMember, usage: OfferUsage) -> None:
        """Take over what another allotter offered."""
        member.is_expected = False
        self._members.expected.pop(member.name, None)
        # In the order in which it said them: that of a set is another one in each process.
        for instance_id in dict.fromkeys((*usage.seen, *usage.held)):
            if instance_id in member.parts or not usage.seen.get(instance_id, 1):
                continue  # nothing was ever offered there
            part = self._ledger.part(member.name, instance_id)
            member.parts[instance_id] = part
            held = usage.held.get(instance_id, ResourceAmounts())
            part.adopt(usage.seen.get(instance_id, 0), held, self._now)
            self._ledger.changed(part)
            self._book(part)

    def _catch_up(self, member: ShareMember, usage: OfferUsage) -> None:
        """A node that was away when this allotter began: another one's offers of it still hold."""
        for instance_id, seen in usage.seen.items():
            is_there = instance_id in self._ledger.nodes
            if is_there and seen > self._ledger.last_offer(member.name, instance_id):
                part = self._ledger.part(member.name, instance_id)
                member.parts[instance_id] = part
                part.count_from(seen)
                self._ledger.changed(part)
                self._book(part)

    def _take_spare(self, member: ShareMember) -> None:
        """What it neither holds nor wants is not offered any longer; the newest goes first."""
        if member.idle[()]:
            self._name_spare(member)
        for grant in member.idle_grants():
            if grant.part.instance_id in member.excluded.get(grant.request, ()):
                self._ledger.remove(grant)  # it is to have the same elsewhere
                self._book(grant.part)
        for request, idle in list(member.idle.items()):
            spare = idle - (0 if member.is_paused else member.wants.get(request, 0))
            if spare > 0:
                grants = [one for one in member.idle_grants() if one.request == request]
                for grant in sorted(grants, key=lambda one: -one.at)[:spare]:
                    self._ledger.remove(grant)
                    self._book(grant.part)

    def _name_spare(self, member: ShareMember) -> None:
        """What trials left of slots that were given for larger ones may do for smaller ones."""
        for grant in member.idle_grants():
            node = self._ledger.nodes.get(grant.part.instance_id)
            if not grant.request and not (node is not None and node.alone_for):
                for request in member.wants:
                    amounts = self._ledger.capacity.estimate(request)
                    if amounts and amounts.resources == grant.amounts.resources:
                        grant.request = request
                        self._book(grant.part)
                        break

    def _take_withheld(self, part: NodePart) -> None:
        """What is empty of devices that are withheld is of no use to whom it was given.

        Only what the experiment knows and does not use, or does not know: of all else nobody can
        say yet whether a trial is in it.
        """
        withheld = self._ledger.nodes[part.instance_id].withheld
        for grant in list(part.grants):
            is_empty = grant.idle_since is not None or not grant.n
            if is_empty and grant.amounts.devices.keys() & withheld:
                self._ledger.remove(grant)
                self._book(part)

    def _empty(self, part: NodePart, grace_s: float | None) -> None:
        for grant in list(part.grants):
            self._ledger.remove(grant, grace_s)
        if grace_s is not None:
            self._ledger.hurry(part, grace_s)
        self._book(part)

    def _book_node(self, instance_id: str) -> None:
        """A node came, went or changed: its parts count or do not; all wants are looked at anew."""
        self._members.totals = self._ledger.totals()
        for part in self._ledger.nodes[instance_id].parts.values():
            self._book(part)
        for member in self._members:
            self._members.review(member, self._now)
        self._is_changed = True

    def _book(self, part: NodePart) -> None:
        node = self._ledger.nodes.get(part.instance_id)
        self._members.book_part(part, counts=node is not None and not node.is_lost)
        self._members.review(self._members[part.experiment], self._now)
