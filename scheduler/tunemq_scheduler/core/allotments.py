"""What a farm lets an experiment have of its nodes, what it holds of it, and what it would like.

A farm offers each experiment a part of each node (`tunemq_shared.protocol.messages.NodeOffered`);
the experiment says what it makes of that, whenever it changed (`OfferUsage`).
"""

from __future__ import annotations

from typing import Final

import msgspec

from tunemq_shared.protocol.message_limits import Amount, Count

#: Asks for the whole of a node, for a trial that may kill it (`SlotDemand.is_alone`).
WHOLE_NODE: Final = {"alone": 1.0}


class ResourceAmounts(msgspec.Struct, frozen=True, array_like=True):
    """An amount of a node: resources by name, and of which GPUs, by UUID, how much."""

    resources: dict[str, Amount] = {}
    devices: dict[str, Amount] = {}


class SlotDemand(msgspec.Struct, frozen=True, array_like=True):
    """So many slots for the same request would be used at once; best on the ``preferred`` node.

    ``preferred`` is an instance, empty where any node is as good. ``excluded`` are those of
    which it would make no use. ``is_alone``: a trial that may kill its node; it runs only where no
    other trial does, of any experiment.
    """

    request: dict[str, Amount]
    count: Count
    preferred: str = ""
    excluded: tuple[str, ...] = ()
    is_alone: bool = False


class OfferUsage(msgspec.Struct, frozen=True, array_like=True):
    """What an experiment makes of what it was offered.

    Attributes:
        seen: the newest offer (`NodeOffered.n`) of each node that it knows of; 0 before the first.
        held: what its hosts hold of each node; nodes of which it holds nothing are left out.
        wants: what it would hold beside that, what is to come first first.
        alone: the nodes on which it runs a trial that may kill them.
    """

    seen: dict[str, Count] = {}
    held: dict[str, ResourceAmounts] = {}
    wants: tuple[SlotDemand, ...] = ()
    alone: tuple[str, ...] = ()
