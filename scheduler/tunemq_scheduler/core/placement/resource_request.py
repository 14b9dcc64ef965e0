"""Parses a resource request: plain amounts, and GPUs, which are allocated individually.

A whole GPU is one of which no trial holds a share; a fraction is a share of one device, never of
two. ``gpu_memory`` is bytes of a device: beside ``gpu`` it is the minimum size of each device,
without it that share of one device is allocated. ``accelerator_type:<MODEL>`` restricts the
devices. A request for several GPUs gets no MIG devices: a CUDA process can use only one of those at
a time.
"""

from __future__ import annotations

import functools
import math
import re
from collections.abc import Mapping, Sequence
from typing import Final, NamedTuple

from tunemq_shared.trainable.resource_names import ACCELERATOR_TYPE, GPU, GPU_MEMORY

#: Ten times a fraction such as 0.1 must still fit into 1.
TOLERANCE: Final = 1e-9
#: Shares are multiples of 10**-9, so that freeing them leaves no remainder.
_DIGITS: Final = 9
#: Less than the smallest possible request, which is 0.
WITHHELD: Final = -1.0
#: The number of parsed requests that the caches hold.
_REMEMBERED: Final = 4096


class DeviceShare(NamedTuple):
    """A GPU of a node; ``share`` is its free share, or `WITHHELD`.

    ``is_part``: it is a MIG device, not a whole GPU.
    """

    model: str
    memory: float
    share: float
    is_part: bool = False


class ResourceRequest(NamedTuple):
    """A request in the form in which it is compared with free resources.

    Attributes:
        amounts: plain amounts by name.
        gpus: the number of whole devices.
        share: the share of one device; 0 if none is shared.
        memory: the minimum bytes of each device; if no ``gpu`` is requested, the bytes of one
            device to allocate.
        model: the required device model; empty allows all.
        takes_device: whether it allocates a GPU or a share of one.
        names_device: whether it requires a node with a matching device.
    """

    amounts: dict[str, float]
    gpus: int
    share: float
    memory: float
    model: str
    takes_device: bool
    names_device: bool

    def will_do(self, device: DeviceShare) -> bool:
        """Whether a device, if free, would fit."""
        if device.is_part and self.gpus > 1:
            return False
        if self.memory and not device.memory:  # unknown
            return False
        return device.memory + TOLERANCE >= self.memory and is_model(device.model, self.model)

    def part_of(self, device: DeviceShare) -> float:
        """Return the share of a fitting device that the requested bytes need."""
        # Rounded down: parts that add up to the whole device must fit into it.
        return round(math.floor(self.memory / device.memory * 1e9) / 1e9, _DIGITS)


def needs_of(request: Mapping[str, float]) -> ResourceRequest:
    """Parse a request; the result is cached."""
    return _needs_of(tuple(request.items()))


@functools.lru_cache(_REMEMBERED)
def _needs_of(request: tuple[tuple[str, float], ...]) -> ResourceRequest:
    amounts: dict[str, float] = {}
    gpu = memory = 0.0
    model = ""
    for name, amount in request:
        if not amount:
            continue
        if name == GPU:
            gpu = amount
        elif name == GPU_MEMORY:
            memory = amount
        elif name.startswith(ACCELERATOR_TYPE):
            model = name.removeprefix(ACCELERATOR_TYPE)
        else:
            amounts[name] = amount
    whole = math.ceil(gpu - TOLERANCE) if gpu >= 1 - TOLERANCE else 0
    takes_device = bool(gpu or memory)
    return ResourceRequest(
        amounts=amounts,
        gpus=whole,
        share=0.0 if whole else gpu,
        memory=memory,
        model=model,
        takes_device=takes_device,
        names_device=takes_device or bool(model),
    )


def choose(devices: Sequence[DeviceShare], needs: ResourceRequest) -> dict[int, float] | None:
    """Choose devices of a node for a request; return their indices and the share of each.

    Devices with the least left over come first, then those with the least memory, then the first
    ones. None if they do not suffice.
    """
    # Most requests accept any device: this skips a call for each.
    needs_check = bool(needs.memory or needs.model or needs.gpus > 1)
    least = 1.0 if needs.gpus else needs.share
    able = [
        (device.share, device.memory, place)
        for place, device in enumerate(devices)
        if device.share >= least - TOLERANCE and not (needs_check and not needs.will_do(device))
    ]
    if needs.gpus:
        if len(able) < needs.gpus:
            return None
        return {place: 1.0 for _, _, place in sorted(able)[: needs.gpus]}
    if not able or not needs.takes_device:
        return {} if able else None
    if needs.share:
        return {min(able)[2]: needs.share}
    parts = [(one, needs.part_of(devices[one[2]])) for one in able]
    left = [(one[0] - part, *one[1:], part) for one, part in parts if one[0] >= part - TOLERANCE]
    if not left:
        return None
    _, _, place, part = min(left)
    return {place: part}


@functools.lru_cache(_REMEMBERED)
def is_model(model: str, wanted: str) -> bool:
    """Whether a device's model matches ``wanted``.

    It matches the whole name, or consecutive words of it: ``A100`` and ``rtx 3090`` match "NVIDIA
    A100-SXM4-80GB" and "NVIDIA GeForce RTX 3090", ``A10`` does not.
    """
    if not wanted or model == wanted:
        return True
    words = _words(wanted)
    return bool(words) and f" {words} " in f" {_words(model)} "


def _words(text: str) -> str:
    return " ".join(re.findall(r"\w+", text.casefold()))
