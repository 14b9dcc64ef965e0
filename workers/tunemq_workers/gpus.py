"""Which GPUs a node offers: those that there are, that it may see, and that it was told to."""

from __future__ import annotations

import logging
import re
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import Final

from tunemq_shared.errors import ConfigError
from tunemq_shared.messages import Gpu
from tunemq_workers.gpu_drivers import Driver

#: What CUDA programs may see; a node keeps to it, too.
VISIBLE: Final = "CUDA_VISIBLE_DEVICES"
#: A part of a GPU. The driver does not list them, and whoever names one is believed.
_PART: Final = "MIG-"
_NAME: Final = re.compile(r"\d+|[A-Za-z][\w./-]*")
#: More are a slip of the hand.
_MOST: Final = 64

_log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class OfferedGpus:
    """What a node offers.

    Attributes:
        gpus: those that it knows one by one.
        number: how many; where ``gpus`` is empty they have no names, and trials see all of them.
        driver: says what they do, where there is one.
    """

    gpus: tuple[Gpu, ...] = ()
    number: int = 0
    driver: Driver | None = None


def offered_gpus(
    option: str | None, visible: str | None, open_driver: Callable[[], Driver | None]
) -> OfferedGpus:
    """The GPUs to offer.

    Args:
        option: ``--gpus``: a number, or UUIDs and indices with commas between them; None: all.
        visible: ``CUDA_VISIBLE_DEVICES``; None where it is not set.
        open_driver: asked only where it matters.

    Raises:
        ConfigError: the option is of no use here; says what there is.
    """
    wanted = None if option is None else _wanted(option)
    if wanted == 0:
        return OfferedGpus()
    driver = open_driver()
    there = _all(driver)
    seen = there if visible is None else _visible(visible, there)
    if wanted is None:
        chosen = seen
    elif isinstance(wanted, int):
        if not there:
            return OfferedGpus(number=wanted)
        if wanted > len(seen):
            raise ConfigError(f"--gpus is {wanted}, and {_listed(seen)}.")
        chosen = seen[:wanted]
    elif not there:  # nobody knows better
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
    if len(names) > 1 and not names[-1]:  # "1," is the one with the index 1
        del names[-1]
    wrong = next((name for name in names if not _NAME.fullmatch(name)), None)
    if wrong is not None:
        raise ConfigError(
            f"--gpus is {option!r}; give a number, such as 2, or UUIDs or indices with commas"
            " between them, such as 0,1."
        )
    return names


def _all(driver: Driver | None) -> list[Gpu]:
    if driver is None:
        return []
    try:
        return driver.gpus()
    except OSError as problem:
        _log.warning("gpus.not_found problem=%r", str(problem))
        return []


def _visible(text: str, there: Sequence[Gpu]) -> list[Gpu]:
    """Those that CUDA would show; as there, an entry that names none ends the list."""
    found: list[Gpu] = []
    for entry in filter(None, (part.strip() for part in text.split(","))):
        gpu = _find(entry, there)
        if gpu is None:
            break
        found.append(gpu)
    return found


def _named(name: str, seen: Sequence[Gpu]) -> Gpu:
    gpu = _find(name, seen)
    if gpu is None:
        raise ConfigError(f"--gpus names {name}, and {_listed(seen)}.")
    return gpu


def _find(name: str, among: Sequence[Gpu]) -> Gpu | None:
    """By its index, or by its UUID or the beginning of that."""
    if name.startswith(_PART):
        return Gpu(name)
    if name.isascii() and name.isdecimal():
        return among[int(name)] if int(name) < len(among) else None
    matches = [gpu for gpu in among if gpu.uuid.startswith(name)]
    return matches[0] if len(matches) == 1 else None


def _listed(gpus: Iterable[Gpu]) -> str:
    listed = ", ".join(f"{gpu.uuid} ({gpu.model})" for gpu in gpus)
    return f"there are: {listed}" if listed else f"there is none (see {VISIBLE})"
