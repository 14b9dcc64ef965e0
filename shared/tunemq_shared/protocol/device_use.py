"""What trials use of the GPUs that they have."""

from __future__ import annotations

from collections.abc import Iterable

import msgspec


class DeviceUse(msgspec.Struct, frozen=True, array_like=True):
    """What a trial used of one GPU, or of one part of a GPU (MIG); looked at every few seconds.

    Attributes:
        uuid: which one.
        model: its name, as its driver says.
        seconds: how long the trial had it, all its attempts together.
        share: of it that the trial had, such as 0.5; where that changed, the mean over the time.
        utilisation: the part of the time, from 0 to 1, in which the device did something, for
            whichever trial; None where nobody knows.
        memory_peak: the most of the device's memory that was seen in the trial's hands, in bytes;
            None where nobody knows.
        energy_j: what the device took meanwhile, times ``share``, in joules; None where nobody
            knows.
    """

    uuid: str
    model: str = ""
    seconds: float = 0.0
    share: float = 1.0
    utilisation: float | None = None
    memory_peak: float | None = None
    energy_j: float | None = None


def add_up(known: Iterable[DeviceUse], more: Iterable[DeviceUse]) -> tuple[DeviceUse, ...]:
    """What was used in all, a device each, in the order in which they were first used."""
    total: dict[str, DeviceUse] = {}
    for use in (*known, *more):
        total[use.uuid] = _sum(total[use.uuid], use) if use.uuid in total else use
    return tuple(total.values())


def _sum(one: DeviceUse, other: DeviceUse) -> DeviceUse:
    shares = [(one.share, one.seconds), (other.share, other.seconds)]
    busy = [(use.utilisation, use.seconds) for use in (one, other) if use.utilisation is not None]
    peaks = [use.memory_peak for use in (one, other) if use.memory_peak is not None]
    energies = [use.energy_j for use in (one, other) if use.energy_j is not None]
    return DeviceUse(
        one.uuid,
        one.model or other.model,
        one.seconds + other.seconds,
        _mean(shares),
        _mean(busy) if busy else None,
        max(peaks, default=None),
        sum(energies) if energies else None,
    )


def _mean(weighted: list[tuple[float, float]]) -> float:
    """Of values with their weights; without weights, of the values."""
    weight = sum(seconds for _, seconds in weighted)
    if not weight:
        return sum(value for value, _ in weighted) / len(weighted)
    return sum(value * seconds for value, seconds in weighted) / weight
