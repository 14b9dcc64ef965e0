"""What the driver of GPUs says: devices, the processes that use them, and errors."""

from __future__ import annotations

import msgspec

from tunemq_shared.base.byte_sizes import show_bytes
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
