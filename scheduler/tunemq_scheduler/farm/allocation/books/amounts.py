"""Arithmetic on `ResourceAmounts`: parts of a node, with their devices."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from typing import Final

from tunemq_scheduler.core.allotments import ResourceAmounts
from tunemq_shared.trainable.resource_names import GPU

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
    return _covers(whole.resources, part.resources) and _covers(whole.devices, part.devices)


def is_nothing(amounts: ResourceAmounts) -> bool:
    """Return whether all amounts are zero."""
    return not any(amounts.resources.values()) and not any(amounts.devices.values())


def _covers(whole: Mapping[str, float], part: Mapping[str, float]) -> bool:
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
