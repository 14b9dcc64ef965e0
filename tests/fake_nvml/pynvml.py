"""Stands in for NVIDIA's bindings where there is no GPU: with their names, arguments and errors.

A process uses it that has this folder first on its PYTHONPATH. What it says stands in the JSON file
that TUNEMQ_FAKE_NVML names, read at each call, so that a test changes it while nodes run
(`tests.support.fake_gpus`):

    {"devices": [{
        "uuid": "GPU-a", "name": "NVIDIA H100 80GB HBM3", "memory": 8e10, "reserved": 6e8,
        "used": 0,                  bytes, beside what the holders have
        "holders": {"1234": 1e9},   process to bytes (null: the driver does not say how many)
        "keeps_memory": false,      what dead holders had stays used
        "utilisation": 0,           per cent
        "energy_mj": 0,             null: not supported
        "power_mw": 0,              null: not supported
        "ecc_uncorrected": 0,       null: not supported
        "remapped": [0, 0, 0, 0],   null: not supported
        "lost": false,
        "parts": null | [{"uuid": "MIG-1", "name": ..., "memory": ..., "instance": 1, ...}]}],
     "xids": [{"uuid": "GPU-a", "number": 79, "instance": null}, ...],
     "lacks": ["nvmlDeviceGetRemappedRows", ...]}     functions that the driver does not have

Processes hold memory, too, by files in the folder ``<JSON file>.held``, named
``<process>@<UUID>`` and with the number of bytes inside. Who waits for XIDs makes the file
``<JSON file>.listening``; ``<JSON file>.asked`` has a byte for each question about energy.
"""

# ruff: noqa: N802, N803, N815, N816
from __future__ import annotations

import json
import os
import string
import sys
import time
from pathlib import Path
from typing import Any, Self

NVML_ERROR_UNINITIALIZED = 1
NVML_ERROR_INVALID_ARGUMENT = 2
NVML_ERROR_NOT_SUPPORTED = 3
NVML_ERROR_NO_PERMISSION = 4
NVML_ERROR_NOT_FOUND = 6
NVML_ERROR_DRIVER_NOT_LOADED = 9
NVML_ERROR_TIMEOUT = 10
NVML_ERROR_LIBRARY_NOT_FOUND = 12
NVML_ERROR_FUNCTION_NOT_FOUND = 13
NVML_ERROR_GPU_IS_LOST = 15
NVML_ERROR_RESET_REQUIRED = 16
NVML_ERROR_UNKNOWN = 999

NVML_DEVICE_MIG_DISABLE = 0
NVML_DEVICE_MIG_ENABLE = 1
NVML_MEMORY_ERROR_TYPE_CORRECTED = 0
NVML_MEMORY_ERROR_TYPE_UNCORRECTED = 1
NVML_VOLATILE_ECC = 0
NVML_AGGREGATE_ECC = 1
nvmlEventTypeXidCriticalError = 8
nvmlMemory_v2 = 0x02000028

_ALL_INSTANCES = 0xFFFFFFFF
_VARIABLE = "TUNEMQ_FAKE_NVML"


class NVMLLibraryMismatchError(Exception):
    """The driver is older than the bindings; no `NVMLError`, as there."""


class NVMLError(Exception):
    """Raised for an error code; as in NVML, each code has its own class."""

    _valClassMapping: dict[int, type] = {}  # noqa: RUF012
    value: int

    def __new__(cls, value: int) -> Self:
        kind = NVMLError._valClassMapping.get(value, cls) if cls is NVMLError else cls
        made = Exception.__new__(kind)
        made.value = value
        return made

    def __str__(self) -> str:
        return f"error {self.value}"


def _make_classes() -> None:
    module = sys.modules[__name__]
    for name in [name for name in dir(module) if name.startswith("NVML_ERROR_")]:
        words = string.capwords(name.removeprefix("NVML_ERROR_"), "_").replace("_", "")
        value = getattr(module, name)

        def new(cls: type, *_: object, value: int = value) -> NVMLError:
            return NVMLError.__new__(cls, value)

        made = type(f"NVMLError_{words}", (NVMLError,), {"__new__": new})
        NVMLError._valClassMapping[value] = made
        setattr(module, made.__name__, made)


_make_classes()


class _Struct:
    """As a ctypes structure: only attributes."""

    def __init__(self, **fields: Any) -> None:
        self.__dict__.update(fields)


class _Handle:
    """Opaque; of a device, or of a part of one."""

    def __init__(self, uuid: str, parent: str | None = None) -> None:
        self._uuid, self._parent = uuid, parent


class _EventSet:
    def __init__(self) -> None:
        self.uuids: set[str] = set()
        self.heard = 0


# --- what the file says ---------------------------------------------------------------------------


def _file() -> Path:
    path = os.environ.get(_VARIABLE)
    if path is None:
        raise NVMLError(NVML_ERROR_LIBRARY_NOT_FOUND)
    return Path(path)


def _world() -> dict[str, Any]:
    try:
        said: dict[str, Any] = json.loads(_file().read_text())
    except FileNotFoundError:
        raise NVMLError(NVML_ERROR_DRIVER_NOT_LOADED) from None
    return said


def _device(handle: _Handle, function: str) -> dict[str, Any]:
    """Return the description of a device, or of a part, which has its GPU's state."""
    said = _world()
    if function in said.get("lacks", ()):
        raise NVMLError(NVML_ERROR_FUNCTION_NOT_FOUND)
    outer = handle._parent or handle._uuid
    found = next((one for one in said["devices"] if one["uuid"] == outer), None)
    if found is None:
        raise NVMLError(NVML_ERROR_INVALID_ARGUMENT)
    if found.get("lost"):
        raise NVMLError(NVML_ERROR_GPU_IS_LOST)
    if handle._parent is None:
        return dict(found)
    part = next((one for one in found["parts"] or () if one["uuid"] == handle._uuid), None)
    if part is None:
        raise NVMLError(NVML_ERROR_NOT_FOUND)
    return dict(part)


def _holders(device: dict[str, Any]) -> dict[int, float | None]:
    """The processes on a device that are there."""
    return {pid: bytes_ for pid, bytes_ in _all_holders(device).items() if _lives(pid)}


def _all_holders(device: dict[str, Any]) -> dict[int, float | None]:
    found: dict[int, float | None] = {
        int(pid): bytes_ for pid, bytes_ in (device.get("holders") or {}).items()
    }
    for file in Path(f"{_file()}.held").glob(f"*@{device['uuid']}"):
        found[int(file.name.partition("@")[0])] = float(file.read_text() or 0)
    return found


def _lives(pid: int) -> bool:
    try:
        stat = Path(f"/proc/{pid}/stat").read_text()
    except OSError:
        return False
    return stat.rpartition(")")[2].split()[0] not in {"Z", "X"}


def _used(device: dict[str, Any]) -> int:
    holders = _all_holders(device) if device.get("keeps_memory") else _holders(device)
    return int(device.get("used", 0) + sum(bytes_ or 0 for bytes_ in holders.values()))


def _supported(value: Any) -> Any:
    if value is None:
        raise NVMLError(NVML_ERROR_NOT_SUPPORTED)
    return value


# --- the functions, named and called as there -----------------------------------------------------


def nvmlInit() -> None:
    _world()


def nvmlShutdown() -> None:
    pass


def nvmlDeviceGetCount() -> int:
    return len(_world()["devices"])


def nvmlDeviceGetHandleByIndex(index: int) -> _Handle:
    device = _world()["devices"][index]
    if device.get("lost"):
        raise NVMLError(NVML_ERROR_GPU_IS_LOST)
    return _Handle(device["uuid"])


def nvmlDeviceGetUUID(handle: _Handle) -> str:
    _device(handle, "nvmlDeviceGetUUID")
    return handle._uuid


def nvmlDeviceGetName(handle: _Handle) -> str:
    return str(_device(handle, "nvmlDeviceGetName")["name"])


def nvmlDeviceGetMemoryInfo(handle: _Handle, version: int | None = None) -> _Struct:
    name = "nvmlDeviceGetMemoryInfo_v2" if version else "nvmlDeviceGetMemoryInfo"
    device = _device(handle, name)
    total, reserved, used = int(device["memory"]), int(device.get("reserved", 0)), _used(device)
    free = total - reserved - used
    if version:
        return _Struct(version=version, total=total, reserved=reserved, free=free, used=used)
    return _Struct(total=total, free=free, used=used + reserved)


def nvmlDeviceGetUtilizationRates(handle: _Handle) -> _Struct:
    device = _device(handle, "nvmlDeviceGetUtilizationRates")
    if device.get("parts") is not None:
        raise NVMLError(NVML_ERROR_NOT_SUPPORTED)
    return _Struct(gpu=_supported(device.get("utilisation")), memory=0)


def _running(handle: _Handle, name: str) -> list[_Struct]:
    return [
        _Struct(pid=pid, usedGpuMemory=None if bytes_ is None else int(bytes_))
        for pid, bytes_ in _holders(_device(handle, name)).items()
    ]


def nvmlDeviceGetComputeRunningProcesses(handle: _Handle) -> list[_Struct]:
    return _running(handle, "nvmlDeviceGetComputeRunningProcesses")


def nvmlDeviceGetGraphicsRunningProcesses(handle: _Handle) -> list[_Struct]:
    _device(handle, "nvmlDeviceGetGraphicsRunningProcesses")
    return []


def nvmlDeviceGetMPSComputeRunningProcesses(handle: _Handle) -> list[_Struct]:
    _device(handle, "nvmlDeviceGetMPSComputeRunningProcesses")
    raise NVMLLibraryMismatchError("the driver does not have this function")


def nvmlSystemGetProcessName(pid: int) -> str:
    if not _lives(pid):
        raise NVMLError(NVML_ERROR_NOT_FOUND)
    try:
        return Path(f"/proc/{pid}/comm").read_text().strip()
    except OSError:  # it has ended since
        raise NVMLError(NVML_ERROR_NOT_FOUND) from None


def nvmlDeviceGetMigMode(device: _Handle) -> list[int]:
    said = _device(device, "nvmlDeviceGetMigMode")
    if "parts" not in said:
        raise NVMLError(NVML_ERROR_NOT_SUPPORTED)
    mode = NVML_DEVICE_MIG_DISABLE if said["parts"] is None else NVML_DEVICE_MIG_ENABLE
    return [mode, mode]


def nvmlDeviceGetMaxMigDeviceCount(device: _Handle) -> int:
    _device(device, "nvmlDeviceGetMaxMigDeviceCount")
    return 7


def nvmlDeviceGetMigDeviceHandleByIndex(device: _Handle, index: int) -> _Handle:
    parts = _device(device, "nvmlDeviceGetMigDeviceHandleByIndex").get("parts") or []
    if index >= len(parts):
        raise NVMLError(NVML_ERROR_NOT_FOUND)
    return _Handle(parts[index]["uuid"], device._uuid)


def nvmlDeviceGetGpuInstanceId(device: _Handle) -> int:
    return int(_device(device, "nvmlDeviceGetGpuInstanceId")["instance"])


def nvmlDeviceGetTotalEccErrors(handle: _Handle, errorType: int, counterType: int) -> int:
    device = _device(handle, "nvmlDeviceGetTotalEccErrors")
    is_asked = (errorType, counterType) == (NVML_MEMORY_ERROR_TYPE_UNCORRECTED, NVML_VOLATILE_ECC)
    return int(_supported(device.get("ecc_uncorrected"))) if is_asked else 0


def nvmlDeviceGetRemappedRows(device: _Handle) -> tuple[int, ...]:
    return tuple(_supported(_device(device, "nvmlDeviceGetRemappedRows").get("remapped")))


def nvmlDeviceGetTotalEnergyConsumption(handle: _Handle) -> int:
    with Path(f"{_file()}.asked").open("ab") as file:
        file.write(b".")
    return int(_supported(_device(handle, "nvmlDeviceGetTotalEnergyConsumption").get("energy_mj")))


def nvmlDeviceGetPowerUsage(handle: _Handle) -> int:
    return int(_supported(_device(handle, "nvmlDeviceGetPowerUsage").get("power_mw")))


def nvmlEventSetCreate() -> _EventSet:
    return _EventSet()


def nvmlDeviceRegisterEvents(handle: _Handle, eventTypes: int, eventSet: _EventSet) -> None:
    _device(handle, "nvmlDeviceRegisterEvents")
    if handle._parent is not None:
        raise NVMLError(NVML_ERROR_NOT_SUPPORTED)
    if eventTypes & nvmlEventTypeXidCriticalError:
        eventSet.uuids.add(handle._uuid)


def nvmlEventSetWait_v2(eventSet: _EventSet, timeoutms: int) -> _Struct:
    Path(f"{_file()}.listening").touch()
    until = time.monotonic() + timeoutms / 1000
    while not (notices := _next_xid(eventSet)):
        if time.monotonic() > until:
            raise NVMLError(NVML_ERROR_TIMEOUT)
        time.sleep(0.01)  # as the driver would wait
    return notices


def _next_xid(events: _EventSet) -> _Struct | None:
    for xid in _world().get("xids", [])[events.heard :]:
        events.heard += 1
        if xid["uuid"] in events.uuids:
            instance = xid.get("instance")
            return _Struct(
                device=_Handle(xid["uuid"]),
                eventType=nvmlEventTypeXidCriticalError,
                eventData=xid["number"],
                gpuInstanceId=_ALL_INSTANCES if instance is None else instance,
                computeInstanceId=_ALL_INSTANCES,
            )
    return None


def nvmlEventSetFree(eventSet: _EventSet) -> None:
    eventSet.uuids.clear()
