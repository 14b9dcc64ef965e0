"""`SlotRequest`: what one trial asks for, as a hashable value; and what it takes."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Final

from tunemq_scheduler.core.allotments import WHOLE_NODE, ResourceAmounts
from tunemq_shared.trainable.resource_names import ACCELERATOR_TYPE, GPU, GPU_MEMORY

CPU: Final = "cpu"
MEMORY: Final = "memory"

#: Names and amounts, sorted.
SlotRequest = tuple[tuple[str, float], ...]

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
