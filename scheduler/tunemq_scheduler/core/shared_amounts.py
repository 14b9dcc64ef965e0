"""Data types for sharing nodes on a farm: offered, held and wanted amounts.

A farm offers each experiment a part of each node (`tunemq_shared.protocol.messages.NodeOffered`).
The experiment reports its usage and its demand whenever they change (`OfferUsage`).
"""

from __future__ import annotations

from typing import Annotated, Final

import msgspec

from tunemq_shared.protocol.message_limits import Amount, Count, Name

#: Requests a whole node, for a trial that may crash its node (`SlotDemand.is_alone`).
WHOLE_NODE: Final = {"alone": 1.0}
#: The most resources that a trial requests.
MOST_RESOURCES: Final = 64
#: The least amount of a resource that a trial requests: amounts are rounded to six digits.
LEAST_AMOUNT: Final = 1e-6
#: The most different demands of a search that the farm knows at a time.
MOST_DEMANDS: Final = 100


class ResourceAmounts(msgspec.Struct, frozen=True, array_like=True):
    """An amount of one node: resources by name, and shares of GPUs by UUID."""

    resources: dict[str, Amount] = {}
    devices: dict[str, Amount] = {}


class SlotDemand(msgspec.Struct, frozen=True, array_like=True):
    """A demand for ``count`` slots with the same request, best on the ``preferred`` node.

    Attributes:
        preferred: a node instance; empty if all nodes are equally good.
        excluded: the node instances that the experiment would not use.
        is_alone: the trial may crash its node, so it runs only on a node without any other trial,
            of any experiment.
    """

    request: Annotated[dict[Name, Amount], msgspec.Meta(max_length=MOST_RESOURCES)]
    count: Count
    preferred: str = ""
    excluded: tuple[str, ...] = ()
    is_alone: bool = False

    @property
    def is_possible(self) -> bool:
        """Whether a trial can request this: an amount, and none that uses nothing up."""
        amounts = self.request.values()
        return any(amounts) and all(one == 0.0 or one >= LEAST_AMOUNT for one in amounts)


class OfferUsage(msgspec.Struct, frozen=True, array_like=True):
    """An experiment's response to its offers: what it uses, and what it wants in addition.

    Attributes:
        seen: the number of the newest known offer (`NodeOffered.n`) of each node; 0 before the
            first.
        held: what its trial processes hold of each node; nodes without any are left out.
        wants: its further demands, most urgent first; those beyond `MOST_DEMANDS` follow when
            some of these are met.
        alone: the nodes on which it runs a trial that may crash them.
    """

    seen: dict[str, Count] = {}
    held: dict[str, ResourceAmounts] = {}
    wants: Annotated[tuple[SlotDemand, ...], msgspec.Meta(max_length=MOST_DEMANDS)] = ()
    alone: tuple[str, ...] = ()
