"""`NvmlDriver`: the GPU driver through NVIDIA's management library."""

from __future__ import annotations

import importlib
import logging
import os
import time
from collections.abc import Iterator
from typing import Any, Final

import msgspec

from tunemq_shared.base.errors import ConfigError
from tunemq_shared.health.node_metrics import GpuMetrics
from tunemq_shared.protocol.messages import Gpu
from tunemq_workers.gpu.drivers.gpu_types import GpuProcess, PhysicalGpu, Xid

_EACH_KIND_OF_PROCESS: Final = (
    "nvmlDeviceGetComputeRunningProcesses",
    "nvmlDeviceGetGraphicsRunningProcesses",
    "nvmlDeviceGetMPSComputeRunningProcesses",
)
#: Means all GPU instances where a GPU instance's number is expected.
_ALL_INSTANCES: Final = 0xFFFFFFFF
#: Limit per call, as a lost GPU may report errors without end; the next call returns the rest.
_MOST_XIDS: Final = 64

#: NVIDIA's driver creates this file when it is loaded.
_DRIVER: Final = "/dev/nvidiactl"

_log = logging.getLogger(__name__)


class _Device(msgspec.Struct, frozen=True):
    """A usable device; ``card`` is its GPU's handle, ``instance`` a MIG device's number there."""

    gpu: Gpu
    handle: Any
    card: Any
    share: float = 1.0
    instance: int | None = None


class _Card(msgspec.Struct):
    physical: PhysicalGpu
    handle: Any
    devices: list[_Device]


class _Energy(msgspec.Struct):
    """Integrate the power of a GPU that has no energy counter."""

    at: float
    watts: float
    joules: float = 0.0

    def add(self, watts: float) -> float:
        now = time.monotonic()
        self.joules += (watts + self.watts) / 2 * (now - self.at)
        self.at, self.watts = now, watts
        return self.joules


class NvmlDriver:
    """The GPUs of this machine; calls may block for a while, and may come from any thread.

    A device is a usable unit: a GPU, or each MIG device of a GPU in MIG mode. A value that the
    driver or a device does not report is None or empty; the same holds for a device that is lost or
    unknown.

    Raises:
        ImportError: its bindings (``nvidia-ml-py``) are not installed.
        OSError: the library is missing or finds no driver.
    """

    #: Seconds between two requests for metrics.
    period_s = 2.0

    def __init__(self) -> None:
        self._nvml: Any = importlib.import_module("pynvml")
        # If the driver is older than the bindings, some functions raise errors other than
        # NVMLError. Older bindings lack some functions, and some fail to decode names that are not
        # UTF-8.
        mismatch = getattr(self._nvml, "NVMLLibraryMismatchError", self._nvml.NVMLError)
        self._errors: tuple[type[Exception], ...] = (
            self._nvml.NVMLError,
            mismatch,
            AttributeError,
            ValueError,
        )
        self._call("nvmlInit")
        self._cards = list(self._poll())
        self._devices = {device.gpu.uuid: device for card in self._cards for device in card.devices}
        self._energies: dict[str, _Energy] = {}
        self._events: Any = None

    def physical(self) -> list[PhysicalGpu]:
        """Return the GPUs that existed when this object was created, in the driver's order."""
        return [card.physical for card in self._cards]

    def gpu_metrics(self) -> list[GpuMetrics]:
        """Return the present metrics of each device that is not lost.

        Raises:
            OSError: the driver does not report them.
        """
        self._call("nvmlDeviceGetCount")  # fails if the driver, not just one device, is silent
        found = []
        for uuid, device in self._devices.items():
            used, busy = self.memory_used(uuid), self._busy(device)
            if used is not None or busy is not None:
                found.append(GpuMetrics(uuid, busy, used))
        return found

    def memory_used(self, uuid: str) -> float | None:
        """Return the bytes that all processes use, if possible without the driver's own."""
        device = self._devices.get(uuid)
        if device is None:
            return None
        info = None
        if (version := getattr(self._nvml, "nvmlMemory_v2", None)) is not None:
            info = self._ask("nvmlDeviceGetMemoryInfo", device.handle, version)
        if info is None:  # an older driver; its own memory counts as used
            info = self._ask("nvmlDeviceGetMemoryInfo", device.handle)
        return None if info is None else float(info.used)

    def holders(self, uuid: str) -> list[GpuProcess]:
        """Return the processes that use a device."""
        device = self._devices.get(uuid)
        if device is None:
            return []
        memory: dict[int, float | None] = {}
        for function in _EACH_KIND_OF_PROCESS:
            for one in self._ask(function, device.handle) or ():
                known = memory.get(one.pid)
                used = None if one.usedGpuMemory is None else float(one.usedGpuMemory)
                # A process that computes and draws is listed twice, each time with all its memory.
                memory[one.pid] = used if known is None else max(known, used or 0.0)
        return [GpuProcess(pid, used, self._name(pid)) for pid, used in memory.items()]

    def energy(self, uuid: str) -> float | None:
        """Return the energy consumed since a fixed time, in joules; only differences matter.

        For a MIG device this is its GPU's energy times its part of the memory.
        """
        device = self._devices.get(uuid)
        if device is None:
            return None
        counted = self._ask("nvmlDeviceGetTotalEnergyConsumption", device.card)
        joules = self._summed(uuid, device) if counted is None else counted / 1000
        return None if joules is None else joules * device.share

    def health(self) -> dict[str, str]:
        """Return the devices that must not be used, with short reasons for people."""
        found: dict[str, str] = {}
        for card in self._cards:
            trouble = self._trouble(card.handle)
            for device in card.devices:
                is_part = device.instance is not None
                reason = trouble or (self._has_left(device) if is_part else None)
                if reason:
                    found[device.gpu.uuid] = reason
        return found

    def xids(self, timeout_s: float) -> list[Xid]:
        """Return the errors since the last call; wait ``timeout_s`` seconds for the first one.

        An error of a whole GPU in MIG mode is returned for each of its devices. Not thread-safe.
        """
        if self._events is None:
            self._events = self._subscribed()
        if self._events is None:
            time.sleep(timeout_s)
            return []
        found: list[Xid] = []
        wait_ms = int(timeout_s * 1000)
        for _ in range(_MOST_XIDS):
            try:
                event = self._nvml.nvmlEventSetWait_v2(self._events, wait_ms)
            except self._errors as problem:
                if wait_ms and getattr(problem, "value", 0) != self._nvml.NVML_ERROR_TIMEOUT:
                    time.sleep(timeout_s)  # it failed at once, so the caller would spin
                break
            found += self._concerned(event)
            wait_ms = 0
        return found

    # --- discovery --------------------------------------------------------------------------------

    def _poll(self) -> Iterator[_Card]:
        for index in range(self._call("nvmlDeviceGetCount")):
            try:
                handle = self._call("nvmlDeviceGetHandleByIndex", index)
                gpu = self._gpu(handle)
            except OSError as problem:
                _log.warning("gpu.left_out index=%d problem=%r", index, str(problem))
                continue
            mode = self._ask("nvmlDeviceGetMigMode", handle)
            if mode is None or mode[0] != self._nvml.NVML_DEVICE_MIG_ENABLE:
                yield _Card(PhysicalGpu(gpu), handle, [_Device(gpu, handle, handle)])
                continue
            parts = list(self._parts(handle, gpu))
            yield _Card(PhysicalGpu(gpu, tuple(part.gpu for part in parts)), handle, parts)

    def _parts(self, card: Any, whole: Gpu) -> Iterator[_Device]:
        for index in range(self._ask("nvmlDeviceGetMaxMigDeviceCount", card) or 0):
            handle = self._ask("nvmlDeviceGetMigDeviceHandleByIndex", card, index)
            if handle is None:  # no MIG device exists there
                continue
            try:
                gpu = self._gpu(handle)
            except OSError as problem:
                _log.warning("gpu.part_left_out of=%s problem=%r", whole.uuid, str(problem))
                continue
            instance = self._ask("nvmlDeviceGetGpuInstanceId", handle)
            share = gpu.memory / whole.memory if whole.memory else 0.0
            number = _ALL_INSTANCES if instance is None else instance
            yield _Device(gpu, handle, card, share, number)

    def _gpu(self, handle: Any) -> Gpu:
        return Gpu(
            _text(self._call("nvmlDeviceGetUUID", handle)),
            _text(self._call("nvmlDeviceGetName", handle)),
            float(self._call("nvmlDeviceGetMemoryInfo", handle).total),
        )

    # --- metrics and health -----------------------------------------------------------------------

    def _busy(self, device: _Device) -> float | None:
        rates = self._ask("nvmlDeviceGetUtilizationRates", device.handle)
        if rates is None and device.instance is not None:
            rates = self._ask("nvmlDeviceGetUtilizationRates", device.card)
        return None if rates is None else rates.gpu / 100

    def _summed(self, uuid: str, device: _Device) -> float | None:
        milliwatts = self._ask("nvmlDeviceGetPowerUsage", device.card)
        if milliwatts is None:
            return None
        watts = milliwatts / 1000
        known = self._energies.setdefault(uuid, _Energy(time.monotonic(), watts))
        return known.add(watts)

    def _trouble(self, handle: Any) -> str | None:
        nvml = self._nvml
        code = self._error("nvmlDeviceGetMemoryInfo", handle)
        if code == nvml.NVML_ERROR_GPU_IS_LOST:
            return "the driver has lost it; it may have fallen off the bus"
        if code == nvml.NVML_ERROR_RESET_REQUIRED:
            return "it needs a reset"
        kinds = nvml.NVML_MEMORY_ERROR_TYPE_UNCORRECTED, nvml.NVML_VOLATILE_ECC
        if self._ask("nvmlDeviceGetTotalEccErrors", handle, *kinds):
            return "uncorrected memory errors (ECC) since its last reset"
        rows = self._ask("nvmlDeviceGetRemappedRows", handle)
        # A row that only waits to be remapped is not used any more.
        if rows is not None and rows[3]:
            return "a faulty memory row could not be remapped"
        return None

    def _has_left(self, part: _Device) -> str | None:
        gone = {self._nvml.NVML_ERROR_NOT_FOUND, self._nvml.NVML_ERROR_INVALID_ARGUMENT}
        code = self._error("nvmlDeviceGetMemoryInfo", part.handle)
        return "this MIG device is not there any more" if code in gone else None

    def _name(self, pid: int) -> str:
        try:
            with open(f"/proc/{pid}/comm", encoding="utf-8", errors="replace") as file:
                return file.read().strip()
        except OSError:  # another user's process, or one outside this container
            said = self._ask("nvmlSystemGetProcessName", pid)
            return "" if said is None else _text(said).rpartition("/")[2]

    # --- errors (XIDs) ----------------------------------------------------------------------------

    def _subscribed(self) -> Any:
        events = self._ask("nvmlEventSetCreate")
        if events is None:
            return None
        kind = self._nvml.nvmlEventTypeXidCriticalError
        for card in self._cards:
            code = self._error("nvmlDeviceRegisterEvents", card.handle, kind, events)
            if code is not None:
                uuid = card.physical.gpu.uuid
                _log.info("gpu.no_xids uuid=%s code=%s", uuid, code)
        return events

    def _concerned(self, event: Any) -> Iterator[Xid]:
        """Yield an event's XID for each device that it concerns."""
        number = int(event.eventData)
        said = self._ask("nvmlDeviceGetUUID", event.device)
        uuid = "" if said is None else _text(said)
        card = next((card for card in self._cards if card.physical.gpu.uuid == uuid), None)
        if card is None:  # a lost GPU may not report its UUID; `health` covers it
            _log.warning("gpu.xid_of_unknown uuid=%r number=%d", uuid, number)
            return
        for device in card.devices:
            is_all = _ALL_INSTANCES in {event.gpuInstanceId, device.instance}
            if is_all or device.instance in {None, event.gpuInstanceId}:
                yield Xid(device.gpu.uuid, number)

    # --- calls ------------------------------------------------------------------------------------

    def _call(self, function: str, *arguments: Any) -> Any:
        try:
            return getattr(self._nvml, function)(*arguments)
        except self._errors as error:
            raise OSError(f"NVML: {function}: {error}") from error

    def _ask(self, function: str, *arguments: Any) -> Any:
        """Return the driver's answer; None if the driver or the device has none."""
        try:
            return getattr(self._nvml, function)(*arguments)
        except self._errors:
            return None

    def _error(self, function: str, *arguments: Any) -> int | None:
        """Return the error code of a call; None if it succeeds."""
        try:
            getattr(self._nvml, function)(*arguments)
        except self._errors as error:
            return int(getattr(error, "value", self._nvml.NVML_ERROR_UNKNOWN))
        return None


def _text(said: str | bytes) -> str:
    """Decode bytes, which older bindings return."""
    return said.decode(errors="replace") if isinstance(said, bytes) else said


def open_driver() -> NvmlDriver | None:
    """Open the driver; return None if this machine has no working one.

    Raises:
        ConfigError: the driver exists, but nvidia-ml-py is not installed.
    """
    try:
        return NvmlDriver()
    except ImportError as problem:
        if os.path.exists(_DRIVER):
            raise ConfigError(
                "this machine has NVIDIA's driver, and nvidia-ml-py, by which it is asked, is not"
                " installed: pip install nvidia-ml-py; or offer no GPUs: --gpus 0."
            ) from problem
        _log.info("gpus.not_asked problem=%r", str(problem))
    except OSError as problem:
        _log.info("gpus.not_asked problem=%r", str(problem))
    return None
