"""Explains failed placement: the resource, the most that is free, the most there is."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import NamedTuple

from tunemq_scheduler.core.placement.placement_node import PlacementNode
from tunemq_scheduler.core.placement.resource_request import (
    TOLERANCE,
    DeviceShare,
    ResourceRequest,
    needs_of,
)
from tunemq_shared.base.byte_sizes import show_bytes
from tunemq_shared.trainable.resource_names import GPU, GPU_MEMORY


class _RequestPart(NamedTuple):
    """One resource of a request.

    Attributes:
        name: the resource's name in messages.
        amount: the requested amount.
        largest: returns the most that a node with these free amounts and devices has of it.
        show: formats an amount for users.
    """

    name: str
    amount: float
    largest: Callable[[Mapping[str, float], Sequence[DeviceShare]], float]
    show: Callable[[float], str]


def why_never(nodes: Iterable[PlacementNode], request: Mapping[str, float]) -> str | None:
    """Explain why none of these nodes could hold the request even if empty; None if one could."""
    needs = needs_of(request)
    nodes = list(nodes)
    if any(node.could_hold(needs) for node in nodes):
        return None
    for part in _parts(needs):
        most = max((_there(part, node) for node in nodes), default=0.0)
        if part.amount > most + TOLERANCE:
            return (
                f"a trial requests {part.name}={part.show(part.amount)}; the most on any node "
                f"is {part.show(most)}{_about_parts(nodes, needs)}"
            )
    return f"a trial requests {_listed(needs)}, and no single node has all of it"


def why_not_now(
    nodes: Iterable[PlacementNode], usable: Sequence[PlacementNode], request: Mapping[str, float]
) -> str:
    """Explain why none of the ``usable`` nodes among these has room for the request."""
    nodes = list(nodes)
    never = why_never(nodes, request)
    if never is not None:
        return never
    needs = needs_of(request)
    for part in _parts(needs):
        most = max((part.largest(node.free, node.devices) for node in usable), default=0.0)
        if part.amount > most + TOLERANCE:
            there = max(_there(part, node) for node in nodes)
            return (
                f"a trial requests {part.name}={part.show(part.amount)}; the most that is free "
                f"on any node is {part.show(max(0.0, most))}, of {part.show(there)} at "
                f"most{_about_parts(nodes, needs)}"
            )
    return f"a trial requests {_listed(needs)}, and no single node has all of it free"


def device_set_aside(node: str, uuid: str, why: str) -> str:
    """Format the message that a GPU is withheld."""
    return f"GPU {uuid} of node {node} is set aside" + (f": {why}" if why else "")


def _there(part: _RequestPart, node: PlacementNode) -> float:
    return part.largest(node.total, node.all_devices())


def _about_parts(nodes: Iterable[PlacementNode], needs: ResourceRequest) -> str:
    """Explain why a request for several GPUs cannot use MIG devices."""
    if needs.gpus > 1 and any(one.is_part for node in nodes for one in node.all_devices()):
        return " (MIG parts of GPUs are not counted: a trial can use no more than one of them)"
    return ""


def _parts(needs: ResourceRequest) -> list[_RequestPart]:
    parts = [_amount(name, amount) for name, amount in needs.amounts.items()]
    if not needs.names_device:
        return parts
    which = f" of {needs.model}" if needs.model else ""
    if needs.memory:
        parts.append(_memory(f"{GPU_MEMORY}{which}", needs))
    elif which:
        parts.append(
            _RequestPart(GPU + which, 1.0, lambda _free, all_: _suitable(all_, needs), _plain)
        )
    if needs.gpus:
        parts.append(
            _RequestPart(GPU + which, needs.gpus, lambda _free, all_: _whole(all_, needs), _plain)
        )
    elif needs.takes_device:
        parts.append(_fraction(GPU + which, needs))
    return parts


def _amount(name: str, amount: float) -> _RequestPart:
    show = _bytes if name == "memory" else _plain
    return _RequestPart(name, amount, lambda free, _all: free.get(name, 0.0), show)


def _memory(name: str, needs: ResourceRequest) -> _RequestPart:
    """Return the part about the memory of devices."""
    of_model = needs._replace(memory=0.0)

    def largest(_free: Mapping[str, float], devices: Sequence[DeviceShare]) -> float:
        return max((one.memory for one in devices if of_model.will_do(one)), default=0.0)

    return _RequestPart(name, needs.memory, largest, _bytes)


def _fraction(name: str, needs: ResourceRequest) -> _RequestPart:
    """Return the part about a share of one device; in bytes if the request is in bytes."""
    of_share = bool(needs.share)

    def largest(_free: Mapping[str, float], devices: Sequence[DeviceShare]) -> float:
        fit = (one for one in devices if needs.will_do(one))
        return max((one.share if of_share else one.share * one.memory for one in fit), default=0.0)

    if of_share:
        return _RequestPart(name, needs.share, largest, _plain)
    return _RequestPart(
        f"{GPU_MEMORY}{name.removeprefix(GPU)}", needs.memory * (1 - 1e-8), largest, _bytes
    )


def _suitable(devices: Sequence[DeviceShare], needs: ResourceRequest) -> float:
    return float(sum(needs.will_do(one) and one.share > -TOLERANCE for one in devices))


def _whole(devices: Sequence[DeviceShare], needs: ResourceRequest) -> float:
    return float(sum(needs.will_do(one) and one.share >= 1 - TOLERANCE for one in devices))


def _listed(needs: ResourceRequest) -> str:
    return ", ".join(f"{part.name}={part.show(part.amount)}" for part in _parts(needs))


def _plain(amount: float) -> str:
    return f"{amount:g}"


def _bytes(amount: float) -> str:
    return show_bytes(round(amount))
