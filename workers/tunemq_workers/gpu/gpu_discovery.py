"""Choose the GPUs that a node offers: those that exist, are visible, and match ``--gpus``."""

from __future__ import annotations

import logging
import re
from collections.abc import Callable, Iterable, Sequence
from typing import Final

import msgspec

from tunemq_shared.base.errors import ConfigError
from tunemq_shared.protocol.messages import Gpu
from tunemq_workers.gpu.drivers.gpu_types import PhysicalGpu
from tunemq_workers.gpu.drivers.nvml import NvmlDriver

#: The GPUs that CUDA programs may see; a node respects it, too.
VISIBLE: Final = "CUDA_VISIBLE_DEVICES"
_NAME: Final = re.compile(r"\d+|(GPU|MIG)-[\w./-]+")
#: A larger number is a typing error.
_MOST: Final = 64

_log = logging.getLogger(__name__)


class OfferedGpus(msgspec.Struct, frozen=True):
    """The GPUs that a node offers.

    Attributes:
        gpus: the GPUs with their UUIDs; empty if these are unknown.
        number: how many; if ``gpus`` is empty, each trial sees all of them.
        driver: reports their state; None if there is none.
    """

    gpus: tuple[Gpu, ...] = ()
    number: int = 0
    driver: NvmlDriver | None = None


def offered_gpus(
    option: str | None, visible: str | None, open_driver: Callable[[], NvmlDriver | None]
) -> OfferedGpus:
    """Return the GPUs to offer.

    Args:
        option: ``--gpus``: a number, or UUIDs and indices with commas between them; None: all.
        visible: ``CUDA_VISIBLE_DEVICES``; None if it is not set.
        open_driver: opens the driver; called only if it is needed.

    Raises:
        ConfigError: the option does not fit this machine; the message lists its GPUs.
    """
    wanted = None if option is None else _wanted(option)
    if wanted == 0 or (wanted is None and visible is not None and not visible.strip()):
        return OfferedGpus()
    driver = open_driver()
    there = _all(driver)
    seen = there if visible is None else _visible(visible, there)
    if wanted is None:
        chosen = _devices(seen)
    elif isinstance(wanted, int):
        if not there:
            return OfferedGpus(number=wanted)
        if wanted > len(_devices(seen)):
            raise ConfigError(f"--gpus is {wanted}, and {_listed(seen)}.")
        chosen = _devices(seen)[:wanted]
    elif not there:  # without a driver the names cannot be checked
        chosen = [Gpu(name) for name in wanted]
    else:
        chosen = [_named(name, seen) for name in wanted]
    twice = {gpu.uuid for gpu in chosen if sum(gpu.uuid == one.uuid for one in chosen) > 1}
    if twice:
        raise ConfigError(f"--gpus names {', '.join(sorted(twice))} twice; name each once.")
    return OfferedGpus(tuple(chosen), len(chosen), driver)


def _wanted(option: str) -> int | list[str]:
    if option.isascii() and option.isdecimal():
        if int(option) > _MOST:
            raise ConfigError(f"--gpus is {option}; a machine has {_MOST} at most.")
        return int(option)
    names = [name.strip() for name in option.split(",")]
    if len(names) > 1 and not names[-1]:  # "1," names the GPU with index 1
        del names[-1]
    wrong = next((name for name in names if not _NAME.fullmatch(name)), None)
    if wrong is not None:
        raise ConfigError(
            f"--gpus is {option!r}; give a number, such as 2, or UUIDs or indices with commas"
            " between them, such as 0,1."
        )
    return names


def _all(driver: NvmlDriver | None) -> list[PhysicalGpu]:
    if driver is None:
        return []
    try:
        return driver.physical()
    except OSError as problem:
        _log.warning("gpus.not_found problem=%r", str(problem))
        return []


def _visible(text: str, there: Sequence[PhysicalGpu]) -> list[PhysicalGpu]:
    """Return the GPUs that CUDA would show; as in CUDA, an unknown entry ends the list."""
    found: list[PhysicalGpu] = []
    for entry in filter(None, (part.strip() for part in text.split(","))):
        gpu = _find(entry, there)
        if gpu is None:
            break
        _refuse_split(VISIBLE, gpu)
        found.append(gpu)
    return found


def _named(name: str, seen: Sequence[PhysicalGpu]) -> Gpu:
    found = _find(name, seen)
    if found is None:
        raise ConfigError(f"--gpus names {name}, and {_listed(seen)}.")
    _refuse_split("--gpus", found)
    return found.gpu


def _refuse_split(who: str, found: PhysicalGpu) -> None:
    if found.parts is None:
        return
    if not found.parts:
        advice = "and has no MIG devices: make some (nvidia-smi mig), or end the mode"
    else:
        parts = ", ".join(_text(part) for part in found.parts)
        advice = f"where nothing can use it as a whole; name MIG devices of it: {parts}"
    raise ConfigError(f"{who} names {found.gpu.uuid}, which is in MIG mode, {advice}.")


def _find(name: str, among: Sequence[PhysicalGpu]) -> PhysicalGpu | None:
    """Find a GPU or MIG device by index, UUID or unique prefix of the UUID; else None.

    Indices count whole GPUs in nvidia-smi's order, or in the order of ``among``.
    """
    if name.isascii() and name.isdecimal():
        return among[int(name)] if int(name) < len(among) else None
    parts = [PhysicalGpu(part) for gpu in among for part in gpu.parts or ()]
    matches = [one for one in (*among, *parts) if one.gpu.uuid.startswith(name)]
    return matches[0] if len(matches) == 1 else None


def _devices(gpus: Iterable[PhysicalGpu]) -> list[Gpu]:
    """Return the usable devices: whole GPUs, or their MIG devices."""
    return [device for gpu in gpus for device in gpu.usable]


def _listed(gpus: Iterable[PhysicalGpu]) -> str:
    listed = ", ".join(_text(device) for device in _devices(gpus))
    return f"there are: {listed}" if listed else f"there is none (see {VISIBLE})"


def _text(gpu: Gpu) -> str:
    return f"{gpu.uuid} ({gpu.model})"
