"""`AllocationExplainer`: explains for people why a trial waits, and who holds what."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Final

import msgspec

from tunemq_scheduler.core.placement.placement_reasons import device_set_aside
from tunemq_scheduler.core.shared_amounts import ResourceAmounts
from tunemq_scheduler.farm.allocation.allocation_state import AllocationState
from tunemq_scheduler.farm.allocation.amounts import (
    ALONE,
    CPU,
    GPUS,
    NOTHING,
    SlotRequest,
    amounts_of,
    in_words,
    is_nothing,
    kinds_of,
    pool_of,
    request_of,
)
from tunemq_scheduler.farm.allocation.members import ShareMember, take
from tunemq_shared.trainable.resource_names import GPU, GPU_MEMORY

#: The most slots or devices to name.
_TOLD: Final = 8
#: An endless search wants a million trials; this many are equivalent to any number.
_MANY: Final = 10_000


class NodeAllocation(msgspec.Struct, frozen=True):
    """A node and the experiments that hold parts of it.

    Attributes:
        state: ready, lost or draining.
        held: the most that each experiment may hold.
        reserved_for: experiments for which slots are being cleared there.
        withheld: the withheld devices, with reasons; ``aside`` is the part of them that no
            experiment holds, and is not free.
    """

    instance_id: str
    node: str
    hostname: str
    state: str
    total: ResourceAmounts
    free: ResourceAmounts
    held: dict[str, ResourceAmounts]
    reserved_for: tuple[str, ...]
    withheld: Mapping[str, str]
    aside: ResourceAmounts


class OwnerAccount(msgspec.Struct, frozen=True):
    """An owner's account, within one priority and one pool; see `ShareAccount`."""

    owner: str
    priority: int
    pool: str
    held: float
    entitled: float
    behind_s: float


class AllocationExplainer:
    """Produces explanations; changes nothing."""

    def __init__(self, state: AllocationState) -> None:
        self._state, self._ledger, self._members = state, state.ledger, state.members

    def snapshot(self) -> list[NodeAllocation]:
        """Return all nodes."""
        found: list[NodeAllocation] = []
        for instance_id, node in self._ledger.nodes.items():
            held = {name: part.taken for name, part in node.parts.items()}
            claimed = {claim.member.name: None for claim in self._state.claims_on(instance_id)}
            found.append(
                NodeAllocation(
                    instance_id,
                    node.joined.node,
                    node.joined.hostname,
                    node.state,
                    node.total,
                    node.free,
                    {name: amounts for name, amounts in held.items() if not is_nothing(amounts)},
                    tuple(claimed),
                    node.withheld,
                    node.aside,
                )
            )
        return found

    def accounts(self) -> list[OwnerAccount]:
        """Return all accounts, as last settled."""
        return [
            OwnerAccount(owner, priority, pool, one.held, one.entitled, one.behind_s)
            for (priority, owner), book in self._members.books.items()
            for pool, one in book.accounts.items()
        ]

    def waiting(self) -> dict[str, dict[str, int]]:
        """Return how many more trials each experiment would start, by `kinds_of`.

        This counts only as many as the owner's quota allows, because nodes would not help the
        others.
        """
        found: dict[str, dict[str, int]] = {}
        left: dict[str, dict[str, float]] = {}
        for member in sorted(self._members, key=lambda one: -one.priority):
            owner = member.owner
            if owner not in left:
                left[owner] = self._members.quotas.left(owner)
            found[member.name] = kinds = {CPU: 0, GPU: 0}
            for request in member.wants:
                if request == ALONE:
                    continue
                missing = min(member.missing(request), _MANY)
                if missing and left[owner]:
                    missing = take(left[owner], self._takes(owner, request), missing)
                for kind in map(member.named_kind, kinds_of(request)):
                    kinds[kind] = kinds.get(kind, 0) + missing
        return found

    def why(self, name: str, asked: dict[str, float]) -> list[str]:
        """Explain why a trial of an experiment waits; the most important reason comes first."""
        if name not in self._members:
            return [f"the farm has no experiment {name!r}"]
        member, request = self._members[name], request_of(asked)
        if request == ALONE:
            return self._isolated(member)
        never = self._ledger.placement.why_never(asked)
        if never is not None:
            return [f"{never}; it waits until a node has it"]
        if member.is_paused:
            return [f"experiment {name} is paused"]
        if self._members.expected:
            others = ", ".join(sorted(self._members.expected))
            hints = filter(None, self._members.expected.values())
            return [
                f"the scheduler has restarted and first waits for reports from {others}",
                *hints,
            ]
        if member.idle[request] and not member.missing(request):
            what = in_words(request)
            return [f"a slot for {what} is offered to {name}, which has started no trial in it"]
        reasons = [*self._quota(member, request), *self._claimed(member, request)]
        not_now = self._ledger.placement.why_not_now(asked)
        shunned = member.excluded.get(request)
        if not_now is None and shunned and self._ledger.placement.fit(asked, "", shunned) is None:
            return [*reasons, f"only nodes that exclude it have {in_words(request)} free"]
        if not_now is None and not reasons:
            return [f"{in_words(request)} is free and is offered next"]
        if not_now is not None:
            reasons += [not_now, *self._drained(), *self._withheld(asked), *self._reserved(member)]
        return [*reasons, *self._turn(member, request)]

    def _drained(self) -> list[str]:
        nodes = self._ledger.nodes.values()
        names = [one.joined.node for one in nodes if one.is_draining]
        if not names:
            return []
        told = ", ".join(names[:_TOLD]) + (" and others" if len(names) > _TOLD else "")
        drained = f"{len(names)} of {len(nodes)} nodes are drained ({told})"
        return [f"{drained}; tunemq nodes resume NAME lets one run trials again"]

    def _reserved(self, member: ShareMember) -> list[str]:
        """Say which nodes run a trial alone, or will, that may have crashed others."""
        nodes = [one for one in self._ledger.nodes.values() if one.alone_for != member.name]
        kept = [
            f"the node {one.joined.node} runs a trial of {one.alone_for} alone"
            for one in nodes
            if one.alone_for
        ]
        return kept[:_TOLD]

    def _isolated(self, member: ShareMember) -> list[str]:
        found = ["its nodes were lost while it ran, so it runs alone on its next node"]
        for instance_id, node in self._ledger.nodes.items():
            if node.alone_for == member.name and instance_id not in member.alone:
                others = ", ".join(sorted(one for one, part in node.parts.items() if part.leaving))
                waits = f", once {others} has freed it" if others else ""
                return [*found, f"node {node.joined.node} is reserved for it{waits}"]
        if member.is_paused:
            return [*found, f"experiment {member.name} is paused"]
        return [
            *found,
            "no node can hold it that is not reserved for another such trial",
        ]

    def _takes(self, owner: str, request: SlotRequest) -> ResourceAmounts:
        """Return what a trial takes, even if no node yet could hold it."""
        estimate = self._ledger.estimate(request)
        if estimate is not None:
            return estimate
        asked = dict(request)
        # The share of a GPU for this memory is unknown; it is at most the quota.
        is_part = GPU_MEMORY in asked and GPU not in asked
        share = min(1.0, self._members.quotas.of(owner).get(GPU) or 1.0)
        return amounts_of(request, {"": share} if is_part else {})

    def _quota(self, member: ShareMember, request: SlotRequest) -> list[str]:
        amounts = self._ledger.estimate(request)
        resource = self._members.quotas.hit(member.owner, amounts) if amounts else ""
        if not resource:
            return []
        most = self._members.quotas.of(member.owner)[resource]
        used = self._members.quotas.held.get(member.owner, {}).get(resource, 0.0)
        return [f"the quota of {member.owner} is {resource}={most:g}, of which {used:g} is used"]

    def _withheld(self, asked: dict[str, float]) -> list[str]:
        found = self._ledger.placement.withheld_from(asked)
        nodes = self._ledger.nodes
        told = [
            device_set_aside(nodes[one].joined.node, uuid, why) for one, uuid, why in found[:_TOLD]
        ]
        return told if len(found) <= _TOLD else [*told, f"and {len(found) - _TOLD} more GPUs"]

    def _claimed(self, member: ShareMember, request: SlotRequest) -> list[str]:
        found: list[str] = []
        for claim in self._state.claims:
            node = self._ledger.nodes[claim.instance_id].joined.node
            givers = ", ".join(sorted({part.experiment for part in claim.givers}))
            whose = f", once {givers} has freed it" if givers else ""
            if claim.member is member and claim.request == request:
                found.append(f"a slot on {node} is being cleared for it{whose}")
            elif claim.member.priority >= member.priority:
                what = in_words(claim.request)
                found.append(f"{what} on {node} is reserved for {claim.member.name}{whose}")
        return found[:_TOLD]

    def _turn(self, member: ShareMember, request: SlotRequest) -> list[str]:
        amounts = self._ledger.estimate(request) or NOTHING
        pool = pool_of(amounts)
        found: list[str] = []
        first = [one.name for one in self._members if one.since and one.priority > member.priority]
        if first:
            found.append(f"{len(first)} experiments of a higher priority wait, such as {first[0]}")
        unit = "GPUs" if pool == GPUS else "of the farm"
        mine = self._members.account(member.priority, member.owner, pool)
        for (priority, owner), book in self._members.books.items():
            if priority != member.priority or owner == member.owner:
                continue
            account = book.accounts[pool]
            if account.has_waiting and account.standing < mine.standing:
                found.append(
                    f"{owner} comes first: it holds {account.held:g} {unit} of its share of "
                    f"{account.entitled:g}; {member.owner} holds {mine.held:g} of "
                    f"{mine.entitled:g}"
                )
        place = (self._members.coming(member, pool), member.order)
        before = [
            one.name
            for one in self._members
            if one.since
            and (one.owner, one.priority) == (member.owner, member.priority)
            and (self._members.coming(one, pool), one.order) < place
        ]
        if before:
            found.append(
                f"{len(before)} other experiments of {member.owner} come first, such as {before[0]}"
            )
        return found
