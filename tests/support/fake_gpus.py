"""Fake GPUs: nodes read a test's description of them through the bindings in `fake_nvml`."""

from __future__ import annotations

import json
import os
import sys
import threading
from pathlib import Path
from typing import Any

import pytest

from tunemq_workers.gpu.gpu_locks import FOLDERS, ROOT_FOLDER

FOLDER = str(Path(__file__).parents[1] / "fake_nvml")
H100 = "NVIDIA H100 80GB HBM3"


def gpu(uuid: str, name: str = H100, memory: float = 80e9, **said: Any) -> dict[str, Any]:
    """A GPU; ``said`` are further fields, see the head of ``fake_nvml/pynvml.py``."""
    begin = {
        "uuid": uuid,
        "name": name,
        "memory": memory,
        "reserved": 6e8,
        "used": 0,
        "holders": {},
        "keeps_memory": False,
        "utilisation": 0,
        "energy_mj": 0,
        "power_mw": None,
        "ecc_uncorrected": 0,
        "remapped": [0, 0, 0, 0],
        "lost": False,
        "parts": None,
    }
    return begin | said


def part(
    uuid: str, instance: int, profile: str = "1g.10gb", memory: float = 10e9, **said: Any
) -> dict[str, Any]:
    """A MIG device, for the ``parts`` of a `gpu`."""
    begin = {
        "uuid": uuid,
        "name": f"{H100} MIG {profile}",
        "memory": memory,
        "instance": instance,
        "used": 0,
        "holders": {},
        "keeps_memory": False,
    }
    return begin | said


class FakeGpus:
    """The GPUs of a machine, in a JSON file that nodes read at each call.

    Args:
        file: the JSON file.
        devices: by `gpu`.
    """

    def __init__(self, file: Path, devices: list[dict[str, Any]]) -> None:
        self.file = file
        self._said: dict[str, Any] = {"devices": devices, "xids": [], "lacks": []}
        self._lock = threading.Lock()
        self._write()

    def environment(self) -> dict[str, str]:
        """The environment variables with which a node's process sees the fake GPUs."""
        rest = os.environ.get("PYTHONPATH")
        path = FOLDER if not rest else f"{FOLDER}{os.pathsep}{rest}"
        return {"PYTHONPATH": path, "TUNEMQ_FAKE_NVML": str(self.file)}

    def install(self, monkeypatch: pytest.MonkeyPatch) -> None:
        """Have this process see them, and the nodes that it starts."""
        for name, value in self.environment().items():
            monkeypatch.setenv(name, value)
        monkeypatch.delitem(sys.modules, "pynvml", raising=False)
        monkeypatch.syspath_prepend(FOLDER)

    def change(self, uuid: str, **said: Any) -> None:
        """Change fields of a device or of a part."""
        with self._lock:
            self._find(uuid).update(said)
            self._write()

    def hold(self, uuid: str, pid: int, memory: float | None) -> None:
        """Let a process hold `memory` bytes of a device; None: size not reported."""
        with self._lock:
            self._find(uuid)["holders"][str(pid)] = memory
            self._write()

    def release(self, uuid: str, pid: int) -> None:
        """Have a process hold nothing more of a device."""
        with self._lock:
            del self._find(uuid)["holders"][str(pid)]
            self._write()

    def xid(self, uuid: str, number: int, instance: int | None = None) -> None:
        """An error of a GPU; of one part of it where ``instance`` is given."""
        with self._lock:
            self._said["xids"].append({"uuid": uuid, "number": number, "instance": instance})
            self._write()

    def lack(self, *functions: str) -> None:
        """Have the driver not know these functions."""
        with self._lock:
            self._said["lacks"] = list(functions)
            self._write()

    def is_listening(self) -> bool:
        """Whether a process waits for XIDs."""
        return Path(f"{self.file}.listening").exists()

    def energy_questions(self) -> int:
        """How often a device's energy was asked for, the last value that a snapshot reads."""
        asked = Path(f"{self.file}.asked")
        return asked.stat().st_size if asked.exists() else 0

    def _find(self, uuid: str) -> dict[str, Any]:
        devices = self._said["devices"]
        parts = [one for device in devices for one in device["parts"] or ()]
        return next(one for one in [*devices, *parts] if one["uuid"] == uuid)

    def _write(self) -> None:
        new = self.file.with_suffix(".new")
        new.write_text(json.dumps(self._said))
        new.replace(self.file)


def remove_locks(*uuids: str) -> None:
    """Remove the lock files of these devices."""
    for folder in FOLDERS:
        for uuid in uuids:
            for part in ("", ROOT_FOLDER):
                Path(folder, part, f"tunemq-gpu-{uuid}.lock").unlink(missing_ok=True)


def take_memory(file: str | Path, uuid: str, size: float, pid: int | None = None) -> None:
    """Let this process, or process `pid`, hold `size` bytes of a device until it ends.

    For code in a trial: several trials may call it at the same time.
    """
    folder = Path(f"{file}.held")
    folder.mkdir(exist_ok=True)
    held = folder / f"{pid or os.getpid()}@{uuid}"
    new = held.with_name(f"{held.name}.new")  # nodes read files whose names end with a UUID
    new.write_text(str(size))
    new.replace(held)
