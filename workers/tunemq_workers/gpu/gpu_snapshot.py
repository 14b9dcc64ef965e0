"""What is seen of the GPUs of a node at one time: who holds how much of each, and what is wrong.

Drivers name processes by their pids in the machine's first pid namespace. In a container these say
nothing, so that a process is *seen* only where it stands in ``/proc``; of others no more is known
than what they hold.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from typing import Final

from tunemq_shared.base.byte_sizes import show_bytes
from tunemq_shared.system.processes import parent_of
from tunemq_workers.gpu.drivers import GpuDriver, GpuProcess, Xid

#: So many holders are named; who has the most comes first.
_NAMED: Final = 3


@dataclass(frozen=True, slots=True)
class GpuMemoryHolder:
    """A process that holds memory of a device.

    Attributes:
        memory: in bytes; None where the driver does not say.
        line: its pid, its parent's, and so on; empty where it cannot be seen.
    """

    pid: int
    name: str = ""
    memory: float | None = None
    line: tuple[int, ...] = ()

    def __str__(self) -> str:
        """What people are told of it."""
        name = "".join(filter(str.isprintable, self.name))[:40]
        who = f"process {self.pid}{f' ({name})' if name else ''}"
        return f"{who} holds {'memory' if self.memory is None else show_bytes(int(self.memory))}"


@dataclass(frozen=True, slots=True)
class DeviceSnapshot:
    """One device; None where nobody says.

    Attributes:
        used: what is held of it by whomever, in bytes.
        holdings: the processes that hold some.
        energy: what it has taken since some moment, in joules.
    """

    used: float | None = None
    holdings: tuple[GpuMemoryHolder, ...] = ()
    energy: float | None = None


@dataclass(frozen=True, slots=True)
class GpuSnapshot:
    """All devices of a node.

    Attributes:
        asked_at: when the driver was asked, by the monotonic clock: it knows what was before.
        devices: by UUID.
        unusable: those that must not be used, and why.
        xids: what the driver has complained of since the look before.
    """

    asked_at: float
    devices: Mapping[str, DeviceSnapshot] = field(default_factory=dict)
    unusable: Mapping[str, str] = field(default_factory=dict)
    xids: tuple[Xid, ...] = ()


def look_at(driver: GpuDriver, uuids: frozenset[str], asked_at: float) -> GpuSnapshot:
    """Ask the driver about these devices; takes as long as the driver does."""
    devices = {
        uuid: DeviceSnapshot(
            driver.memory_used(uuid),
            tuple(_holding(holder) for holder in driver.holders(uuid)),
            driver.energy(uuid),
        )
        for uuid in uuids
    }
    unusable = {uuid: why for uuid, why in driver.health().items() if uuid in uuids}
    return GpuSnapshot(asked_at, devices, unusable, tuple(driver.xids(0.0)))


def in_words(holdings: list[GpuMemoryHolder]) -> str:
    """Who holds the most, for people."""
    largest = sorted(holdings, key=lambda one: one.memory or 0.0, reverse=True)
    more = f" and {len(largest) - _NAMED} more" if len(largest) > _NAMED else ""
    return ", ".join(map(str, largest[:_NAMED])) + more


def _holding(holder: GpuProcess) -> GpuMemoryHolder:
    return GpuMemoryHolder(holder.pid, holder.name, holder.memory, tuple(_line_of(holder.pid)))


def _line_of(pid: int | None) -> Iterator[int]:
    while pid and (parent := parent_of(pid)) is not None:
        yield pid
        pid = parent
