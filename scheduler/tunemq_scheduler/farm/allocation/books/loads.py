"""`ResourceLoad`: the cost of slots, in GPUs if they have any, else in the dominant resource."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Final

from tunemq_scheduler.core.allotments import ResourceAmounts
from tunemq_shared.trainable.resource_names import GPU

#: The pools: one accounts for slots with GPUs, the other for all others.
GPUS: Final = "gpus"
OTHERS: Final = "others"
POOLS: Final = (GPUS, OTHERS)


class ResourceLoad:
    """A sum of slots: the GPUs of those with GPUs, and the resources of all others."""

    __slots__ = ("gpus", "others")

    def __init__(self) -> None:
        self.gpus = 0.0
        self.others: dict[str, float] = {}

    def __bool__(self) -> bool:
        return self.gpus > 0 or any(amount > 0 for amount in self.others.values())

    def add(self, amounts: ResourceAmounts, times: float = 1.0) -> None:
        """Add slots."""
        gpus = amounts.resources.get(GPU, 0.0)
        if gpus:
            self.gpus = round(self.gpus + gpus * times, 6)
        else:
            _add(self.others, amounts.resources, times)

    def merge(self, other: ResourceLoad, sign: int) -> None:
        """Add or subtract another load."""
        self.gpus = round(self.gpus + sign * other.gpus, 6)
        _add(self.others, other.others, sign)

    def cost(self, pool: str, totals: Mapping[str, float]) -> float:
        """Return the cost in a pool; without GPUs, the dominant share of the farm's resources."""
        if pool == GPUS:
            return self.gpus
        shares = (amount / totals[name] for name, amount in self.others.items() if totals.get(name))
        return max(shares, default=0.0)


def load_of(amounts: ResourceAmounts) -> ResourceLoad:
    """Return the load of one slot."""
    load = ResourceLoad()
    load.add(amounts)
    return load


def pool_of(amounts: ResourceAmounts) -> str:
    """Return the pool that accounts for a slot."""
    return GPUS if amounts.resources.get(GPU) else OTHERS


def _add(sums: dict[str, float], amounts: Mapping[str, float], times: float) -> None:
    for name, amount in amounts.items():
        sums[name] = round(sums.get(name, 0.0) + amount * times, 6)
