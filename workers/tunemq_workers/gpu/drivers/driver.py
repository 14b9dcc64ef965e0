"""What a node asks of its GPUs' driver."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol

from tunemq_shared.health.node_metrics import GpuMetrics
from tunemq_shared.protocol.messages import Gpu


@dataclass(frozen=True, slots=True)
class PhysicalGpu:
    """A GPU as it is built in.

    Attributes:
        gpu: itself.
        parts: its MIG devices, where it is in MIG mode: then nothing can use it as a whole.
    """

    gpu: Gpu
    parts: tuple[Gpu, ...] | None = None

    @property
    def usable(self) -> tuple[Gpu, ...]:
        """What of it can be used."""
        return (self.gpu,) if self.parts is None else self.parts


@dataclass(frozen=True, slots=True)
class GpuProcess:
    """A process that has something on a device.

    Attributes:
        pid: as the driver counts, which is not as a container does.
        memory: bytes of the device's; None where the driver does not say.
        name: of its program; empty where nobody knows.
    """

    pid: int
    memory: float | None = None
    name: str = ""


@dataclass(frozen=True, slots=True)
class Xid:
    """An error of a device, by the driver's number; see `tunemq_workers.gpu.drivers.xids`."""

    uuid: str
    number: int


class GpuDriver(Protocol):
    """Knows the GPUs of this machine; calls may take a while, and may come from any thread.

    A device is what can be used: a GPU, or of one in MIG mode each of its MIG devices. What the
    driver, or a device, does not say is None or empty, and so is what is asked of a device that is
    lost or that nobody knows.
    """

    #: How often to ask what they do.
    period_s: float

    def physical(self) -> list[PhysicalGpu]:
        """All of them, in the driver's order.

        Raises:
            OSError: it does not say.
        """

    def gpu_metrics(self) -> list[GpuMetrics]:
        """What each device does now; a lost one is left out.

        Raises:
            OSError: it does not say.
        """

    def memory_used(self, uuid: str) -> float | None:
        """Bytes in use, by whomever; as far as can be told without what the driver reserves."""

    def holders(self, uuid: str) -> list[GpuProcess]:
        """The processes that have something on a device."""

    def energy(self, uuid: str) -> float | None:
        """Joules since some moment, of which only differences mean something.

        Of a MIG device: its GPU's, by its part of the memory.
        """

    def health(self) -> dict[str, str]:
        """The devices that must not be used, and why: short, for people."""

    def xids(self, timeout_s: float) -> list[Xid]:
        """What has happened since the last call; waits so long for the first.

        What concerns a whole GPU in MIG mode is told of each of its devices. For one thread at a
        time.
        """


def devices(driver: GpuDriver) -> list[Gpu]:
    """All that can be used.

    Raises:
        OSError: the driver does not say.
    """
    return [device for gpu in driver.physical() for device in gpu.usable]
