"""`DeviceUse`: how much a trial used its GPUs."""

from __future__ import annotations

from collections.abc import Iterable

import msgspec


class DeviceUse(msgspec.Struct, frozen=True, array_like=True):
    """What a trial used of one GPU, or of one part of a GPU (MIG); sampled every few seconds.

    Attributes:
        uuid: The device.
        model: Its name, as its driver reports it.
        seconds: How long the trial had it, all attempts together.
        share: The trial's share of it, such as 0.5; if that changed, the mean over time.
        utilisation: The fraction of the time, 0 to 1, in which the device was busy, for any trial;
            None if unknown.
        memory_peak: The largest sampled device memory of the trial, in bytes; None if unknown.
        energy_j: The device's energy in that time, times ``share``, in joules; None if unknown.
    """

    uuid: str
    model: str = ""
    seconds: float = 0.0
    share: float = 1.0
    utilisation: float | None = None
    memory_peak: float | None = None
    energy_j: float | None = None


def add_up(known: Iterable[DeviceUse], more: Iterable[DeviceUse]) -> tuple[DeviceUse, ...]:
    """Sum the use per device, in the order in which devices first appear."""
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
    """The weighted mean of (value, weight) pairs; unweighted if all weights are 0."""
    weight = sum(seconds for _, seconds in weighted)
    if not weight:
        return sum(value for value, _ in weighted) / len(weighted)
    return sum(value * seconds for value, seconds in weighted) / weight
