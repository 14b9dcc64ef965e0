"""Requests of trials, amounts of resources, and what slots cost.

A slot costs its GPUs if it has any, else its share of the dominant resource.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from typing import Final

from tunemq_scheduler.core.shared_amounts import WHOLE_NODE, ResourceAmounts
from tunemq_shared.trainable.resource_names import ACCELERATOR_TYPE, GPU, GPU_MEMORY

CPU: Final = "cpu"
MEMORY: Final = "memory"

#: Stands in metrics for further custom resources.
OTHER: Final = "other"

#: Names and amounts, sorted.
SlotRequest = tuple[tuple[str, float], ...]

#: The most requests about which something is remembered.
MOST_REQUESTS: Final = 4096

#: Stands for a whole node, which a suspect trial gets.
ALONE: Final[SlotRequest] = tuple(WHOLE_NODE.items())


def request_of(amounts: Mapping[str, float]) -> SlotRequest:
    """Return the request for these amounts."""
    return tuple(sorted((name, amount) for name, amount in amounts.items() if amount > 0))


def amounts_of(request: SlotRequest, devices: Mapping[str, float]) -> ResourceAmounts:
    """Return what a trial takes of a node with these devices."""
    resources = {
        name: amount
        for name, amount in request
        if name != GPU_MEMORY and not name.startswith(ACCELERATOR_TYPE)
    }
    if devices:
        resources[GPU] = round(sum(devices.values()), 9)
    return ResourceAmounts(resources, dict(devices))


def kinds_of(request: SlotRequest) -> tuple[str, ...]:
    """Return the kinds of resources that it needs: ``gpu``, else ``cpu``; and custom ones."""
    names = {name for name, _ in request}
    models = {name for name in names if name.startswith(ACCELERATOR_TYPE)}
    first = GPU if models or not names.isdisjoint({GPU, GPU_MEMORY}) else CPU
    return first, *sorted(names - {CPU, MEMORY, GPU, GPU_MEMORY})


def in_words(request: SlotRequest) -> str:
    """Return the request as people write it."""
    return ", ".join(f"{name}={amount:g}" for name, amount in request) or "nothing"


# --- amounts --------------------------------------------------------------------------------------

#: Sums of fractions, such as 0.1 ten times, must still fit into 1.
TOLERANCE: Final = 1e-9

NOTHING: Final = ResourceAmounts()


def plus(one: ResourceAmounts, other: ResourceAmounts) -> ResourceAmounts:
    """Return the sum of both."""
    return _combined(one, other, _add)


def minus(one: ResourceAmounts, other: ResourceAmounts) -> ResourceAmounts:
    """Return the difference; no amount is below zero."""
    return _combined(one, other, _subtract)


def most(one: ResourceAmounts, other: ResourceAmounts) -> ResourceAmounts:
    """Return the larger amount of each resource."""
    return _combined(one, other, max)


def least(one: ResourceAmounts, other: ResourceAmounts) -> ResourceAmounts:
    """Return the smaller amount of each resource."""
    return _combined(one, other, min)


def total(parts: Iterable[ResourceAmounts]) -> ResourceAmounts:
    """Return the sum of all."""
    resources: dict[str, float] = {}
    devices: dict[str, float] = {}
    for part in parts:
        for name, amount in part.resources.items():
            resources[name] = resources.get(name, 0.0) + amount
        for uuid, share in part.devices.items():
            devices[uuid] = devices.get(uuid, 0.0) + share
    return ResourceAmounts(_rounded(resources), _rounded(devices))


def of_devices(amounts: ResourceAmounts, devices: Iterable[str]) -> ResourceAmounts:
    """Return the part that belongs to these devices."""
    shares = {uuid: amounts.devices[uuid] for uuid in devices if amounts.devices.get(uuid)}
    return ResourceAmounts({GPU: round(sum(shares.values()), 9)}, shares) if shares else NOTHING


def covers(whole: ResourceAmounts, part: ResourceAmounts) -> bool:
    """Return whether the part is within the whole."""
    return covers_resources(whole.resources, part.resources) and covers_resources(
        whole.devices, part.devices
    )


def is_nothing(amounts: ResourceAmounts) -> bool:
    """Return whether all amounts are zero."""
    return not any(amounts.resources.values()) and not any(amounts.devices.values())


def covers_resources(whole: Mapping[str, float], part: Mapping[str, float]) -> bool:
    """Return whether each amount is within the whole."""
    return all(amount <= whole.get(name, 0.0) + TOLERANCE for name, amount in part.items())


def _add(one: float, other: float) -> float:
    return round(one + other, 9)


def _subtract(one: float, other: float) -> float:
    return max(0.0, round(one - other, 9))


def _combined(
    one: ResourceAmounts, other: ResourceAmounts, how: Callable[[float, float], float]
) -> ResourceAmounts:
    return ResourceAmounts(
        _merged(one.resources, other.resources, how), _merged(one.devices, other.devices, how)
    )


def _merged(
    one: Mapping[str, float], other: Mapping[str, float], how: Callable[[float, float], float]
) -> dict[str, float]:
    """Combine amounts, and omit zeros."""
    merged = {name: how(amount, other.get(name, 0.0)) for name, amount in one.items()}
    for name, amount in other.items():
        if name not in merged:
            merged[name] = how(0.0, amount)
    return {name: amount for name, amount in merged.items() if amount > TOLERANCE}


def _rounded(sums: Mapping[str, float]) -> dict[str, float]:
    return {name: round(amount, 9) for name, amount in sums.items() if amount > TOLERANCE}


# --- costs ----------------------------------------------------------------------------------------

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
            _add_to(self.others, amounts.resources, times)

    def merge(self, other: ResourceLoad, sign: int) -> None:
        """Add or subtract another load."""
        self.gpus = round(self.gpus + sign * other.gpus, 6)
        _add_to(self.others, other.others, sign)

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


def _add_to(sums: dict[str, float], amounts: Mapping[str, float], times: float) -> None:
    for name, amount in amounts.items():
        sums[name] = round(sums.get(name, 0.0) + amount * times, 6)
