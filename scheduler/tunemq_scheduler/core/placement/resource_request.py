"""What a request asks of a node: amounts, and GPUs, which are taken one by one.

A whole GPU is one that nobody has anything of; a fraction is a share of one device, never of two.
``gpu_memory`` is bytes of a device: beside ``gpu`` each device must have so much in all, without it
that share of one device is taken. ``accelerator_type:<MODEL>``: only such devices will do. Who asks
for several gets no parts of GPUs (MIG): a process of CUDA's can use one of those at a time.
"""

from __future__ import annotations

import functools
import math
import re
from collections.abc import Mapping, Sequence
from typing import Final, NamedTuple

from tunemq_shared.trainable.resource_names import ACCELERATOR_TYPE, GPU, GPU_MEMORY

#: Sums of fractions such as 0.1 ten times must still fit into 1.
TOLERANCE: Final = 1e-9
#: Shares are whole multiples of this, so that giving back leaves nothing behind.
_DIGITS: Final = 9
#: Less than anybody may ask for, if it is nothing.
WITHHELD: Final = -1.0
#: So many requests are kept in the form in which they are compared.
_REMEMBERED: Final = 4096


class DeviceShare(NamedTuple):
    """A GPU of a node; ``share`` is how much of it is free, `WITHHELD` where it is not to be used.

    ``is_part``: it is a MIG device, which is no GPU's whole.
    """

    model: str
    memory: float
    share: float
    is_part: bool = False


class ResourceRequest(NamedTuple):
    """A request in the form in which it is compared with what is free.

    Attributes:
        amounts: what is a plain amount, by name.
        gpus: how many whole devices.
        share: of one device; 0 where none is shared.
        memory: so many bytes of each device, or of the one that is shared where ``share`` is 0.
        model: which devices will do; empty where all do.
        takes_device: whether something of a GPU is taken.
        names_device: whether there has to be one.
    """

    amounts: dict[str, float]
    gpus: int
    share: float
    memory: float
    model: str
    takes_device: bool
    names_device: bool

    def will_do(self, device: DeviceShare) -> bool:
        """Whether a device, were it free, is such a one."""
        if device.is_part and self.gpus > 1:
            return False
        return device.memory + TOLERANCE >= self.memory and is_model(device.model, self.model)

    def part_of(self, device: DeviceShare) -> float:
        """How much of a device that will do is taken, where so many bytes of it are asked for."""
        # Rounded down: as many parts of a device as there are must fit into it.
        return round(math.floor(self.memory / device.memory * 1e9) / 1e9, _DIGITS)


def needs_of(request: Mapping[str, float]) -> ResourceRequest:
    """The request in the form in which it is compared."""
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
    """Which of a node's devices are taken, by their places, and how much of each.

    Those that would have least left over, then those with least memory, then the first. None where
    they do not suffice.
    """
    # Most requests take any device: nothing is called for each of them.
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
    """Whether a device of this model is what ``wanted`` says.

    That is the model's whole name, or words of it that follow one another: ``A100`` and ``rtx
    3090`` are, ``A10`` is not, of "NVIDIA A100-SXM4-80GB" and "NVIDIA GeForce RTX 3090".
    """
    if not wanted or model == wanted:
        return True
    words = _words(wanted)
    return bool(words) and f" {words} " in f" {_words(model)} "


def _words(text: str) -> str:
    return " ".join(re.findall(r"\w+", text.casefold()))
