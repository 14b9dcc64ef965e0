"""The allocator's two books, by node and by experiment, agree."""

from __future__ import annotations

from tunemq_scheduler.farm.allocation.fair_share_allocator import FairShareAllocator


def check_books(allocator: FairShareAllocator) -> None:
    """Check that each part of a node is also in the book of its experiment, which is there."""
    members = allocator._members
    for instance_id, node in allocator._ledger.nodes.items():
        for name, part in node.parts.items():
            assert name in members, f"{name} has ended, and has a part of {instance_id}"
            assert members[name].parts.get(instance_id) is part, (name, instance_id)
