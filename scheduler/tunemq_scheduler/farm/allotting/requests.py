"""`Request`: what one trial asks for, as something that can stand in a set; and what it takes."""

from __future__ import annotations

from collections.abc import Mapping

from tunemq_shared.allotments import Amounts
from tunemq_shared.resource_names import ACCELERATOR_TYPE, GPU, GPU_MEMORY

#: Names and amounts, sorted.
Request = tuple[tuple[str, float], ...]


def request_of(amounts: Mapping[str, float]) -> Request:
    """The request for these amounts."""
    return tuple(sorted((name, amount) for name, amount in amounts.items() if amount > 0))


def amounts_of(request: Request, devices: Mapping[str, float]) -> Amounts:
    """What a trial takes of a node where it gets these devices."""
    resources = {
        name: amount
        for name, amount in request
        if name != GPU_MEMORY and not name.startswith(ACCELERATOR_TYPE)
    }
    if devices:
        resources[GPU] = round(sum(devices.values()), 9)
    return Amounts(resources, dict(devices))


def in_words(request: Request) -> str:
    """As people write it."""
    return ", ".join(f"{name}={amount:g}" for name, amount in request) or "nothing"
