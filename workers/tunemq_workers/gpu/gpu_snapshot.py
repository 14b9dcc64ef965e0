"""`GpuSnapshot`: the state of a node's GPUs at one time, with the processes that hold memory.

Drivers report pids of the machine's initial pid namespace, which mean nothing in a container. So a
process is *seen* only if ``/proc`` contains it; of others only their memory is known.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Final

import msgspec

from tunemq_shared.system.processes import parent_of
from tunemq_workers.gpu.drivers.driver import GpuProcess, Xid
from tunemq_workers.gpu.drivers.nvml import NvmlDriver

#: Number of holders that a message names, largest first.
_NAMED: Final = 3


class DeviceSnapshot(msgspec.Struct, frozen=True):
    """The state of one device; None means unknown.

    Attributes:
        used: memory in use by all processes, in bytes.
        holdings: the processes that hold memory.
        energy: energy consumed since some fixed time, in joules.
    """

    used: float | None = None
    holdings: tuple[GpuProcess, ...] = ()
    energy: float | None = None


class GpuSnapshot(msgspec.Struct, frozen=True):
    """The state of a node's devices.

    Attributes:
        asked_at: monotonic time of the request, in seconds; the snapshot reflects at least that
            time.
        devices: by UUID.
        unusable: the devices that must not be used, and why.
        xids: errors that the driver reported since the previous snapshot.
    """

    asked_at: float
    devices: Mapping[str, DeviceSnapshot] = {}
    unusable: Mapping[str, str] = {}
    xids: tuple[Xid, ...] = ()


def look_at(driver: NvmlDriver, uuids: frozenset[str], asked_at: float) -> GpuSnapshot:
    """Ask the driver about these devices; blocks as long as the driver does."""
    devices: dict[str, DeviceSnapshot] = {}
    for uuid in uuids:
        used, holders = driver.memory_used(uuid), driver.holders(uuid)
        seen = (msgspec.structs.replace(one, line=tuple(_line_of(one.pid))) for one in holders)
        devices[uuid] = DeviceSnapshot(used, tuple(seen), driver.energy(uuid))
    unusable = {uuid: why for uuid, why in driver.health().items() if uuid in uuids}
    return GpuSnapshot(asked_at, devices, unusable, tuple(driver.xids(0.0)))


def in_words(holdings: list[GpuProcess]) -> str:
    """Describe the largest holders for people."""
    largest = sorted(holdings, key=lambda one: one.memory or 0.0, reverse=True)
    more = f" and {len(largest) - _NAMED} more" if len(largest) > _NAMED else ""
    return ", ".join(map(str, largest[:_NAMED])) + more


def _line_of(pid: int | None) -> Iterator[int]:
    while pid and (parent := parent_of(pid)) is not None:
        yield pid
        pid = parent
