"""`GpuDriver`: the interface of a GPU driver."""

from __future__ import annotations

from typing import Protocol

import msgspec

from tunemq_shared.base.byte_sizes import show_bytes
from tunemq_shared.health.node_metrics import GpuMetrics
from tunemq_shared.protocol.messages import Gpu


class PhysicalGpu(msgspec.Struct, frozen=True):
    """A GPU as built into the machine.

    Attributes:
        gpu: the whole GPU.
        parts: its MIG devices in MIG mode, in which the whole GPU is not usable; else None.
    """

    gpu: Gpu
    parts: tuple[Gpu, ...] | None = None

    @property
    def usable(self) -> tuple[Gpu, ...]:
        """The usable devices: the whole GPU, or its MIG devices."""
        return (self.gpu,) if self.parts is None else self.parts


class GpuProcess(msgspec.Struct, frozen=True):
    """A process that uses a device, and holds some of its memory.

    Attributes:
        pid: as the driver counts, which differs from the pid in a container.
        memory: bytes of the device's memory; None if the driver does not report it.
        name: its program's name; "" if unknown.
        line: its pid, its parent's, and so on, as /proc shows; () if that does not contain it.
    """

    pid: int
    memory: float | None = None
    name: str = ""
    line: tuple[int, ...] = ()

    def __str__(self) -> str:
        """Return a description for people."""
        name = "".join(filter(str.isprintable, self.name))[:40]
        who = f"process {self.pid}{f' ({name})' if name else ''}"
        return f"{who} holds {'memory' if self.memory is None else show_bytes(int(self.memory))}"


class Xid(msgspec.Struct, frozen=True):
    """An error of a device, with the driver's number; see `tunemq_workers.gpu.drivers.xids`."""

    uuid: str
    number: int


class GpuDriver(Protocol):
    """The GPUs of this machine; calls may block for a while, and may come from any thread.

    A device is a usable unit: a GPU, or each MIG device of a GPU in MIG mode. A value that the
    driver or a device does not report is None or empty; the same holds for a device that is lost or
    unknown.
    """

    #: Seconds between two requests for metrics.
    period_s: float

    def physical(self) -> list[PhysicalGpu]:
        """Return all GPUs, in the driver's order.

        Raises:
            OSError: the driver does not report them.
        """

    def gpu_metrics(self) -> list[GpuMetrics]:
        """Return the present metrics of each device that is not lost.

        Raises:
            OSError: the driver does not report them.
        """

    def memory_used(self, uuid: str) -> float | None:
        """Return the bytes that all processes use, if possible without the driver's own."""

    def holders(self, uuid: str) -> list[GpuProcess]:
        """Return the processes that use a device."""

    def energy(self, uuid: str) -> float | None:
        """Return the energy consumed since a fixed time, in joules; only differences matter.

        For a MIG device this is its GPU's energy times its part of the memory.
        """

    def health(self) -> dict[str, str]:
        """Return the devices that must not be used, with short reasons for people."""

    def xids(self, timeout_s: float) -> list[Xid]:
        """Return the errors since the last call; wait ``timeout_s`` seconds for the first one.

        An error of a whole GPU in MIG mode is returned for each of its devices. Not thread-safe.
        """


def devices(driver: GpuDriver) -> list[Gpu]:
    """Return all usable devices.

    Raises:
        OSError: the driver does not report them.
    """
    return [device for gpu in driver.physical() for device in gpu.usable]
