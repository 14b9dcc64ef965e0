"""The driver by its program ``nvidia-smi``, where its bindings for Python are missing."""

from __future__ import annotations

import math
import re
import shutil
import subprocess
import time
from typing import Final

from tunemq_shared.errors import ConfigError
from tunemq_shared.messages import Gpu
from tunemq_shared.vitals import GpuVitals
from tunemq_workers.gpu_drivers.driver import Holder, PhysicalGpu, Xid

#: A driver that nobody uses loads itself for every question, which takes seconds where there are
#: many GPUs.
_ANSWERS_WITHIN_S: Final = 10.0
#: What it has said of all devices answers who asks about each of them, until `refresh`.
_HOLDS_FOR_S: Final = 2.0
_MIB: Final = 2.0**20
#: Lines of ``nvidia-smi -L``, of a GPU and of a MIG device.
_GPU_LINE: Final = re.compile(r"GPU \d+: .*\(UUID: (GPU-[^)\s]+)\)")
_PART_LINE: Final = re.compile(r"\s+MIG (\S+)\s+Device\s+\d+: \(UUID: (MIG-[^)\s]+)\)")
#: Of a profile, such as ``1g.10gb`` or ``1c.2g.20gb+me``.
_PROFILE_GB: Final = re.compile(r"\.(\d+)gb")


class NvidiaSmi:
    """By the program ``nvidia-smi``.

    Of MIG devices it tells little beside that they are there.

    Raises:
        OSError: it is not there, or finds no driver.
        ConfigError: it does not answer.
    """

    period_s = 15.0

    def __init__(self) -> None:
        program = shutil.which("nvidia-smi")
        if program is None:
            raise FileNotFoundError("there is no nvidia-smi")
        self._program = program
        self._answers: dict[str, tuple[float, list[list[str]]]] = {}
        self._physical = self._look()

    def physical(self) -> list[PhysicalGpu]:
        """See `Driver`: those that there were when this was made."""
        return self._physical

    def refresh(self) -> None:
        """See `Driver`."""
        self._answers.clear()

    def vitals(self) -> list[GpuVitals]:
        """See `Driver`."""
        return [
            GpuVitals(
                uuid,
                None if (percent := _number(busy)) is None else percent / 100,
                _bytes(used),
            )
            for uuid, busy, used in self._query("gpu", "uuid", "utilization.gpu", "memory.used")
        ]

    def memory_used(self, uuid: str) -> float | None:
        """See `Driver`."""
        rows = self._try("gpu", "uuid", "memory.used")
        return next((_bytes(used) for one, used in rows if one == uuid), None)

    def holders(self, uuid: str) -> list[Holder]:
        """See `Driver`: those that compute."""
        rows = self._try("compute-apps", "gpu_uuid", "pid", "used_memory", "process_name")
        return [
            Holder(int(pid), _bytes(used), name.rpartition("/")[2])
            for one, pid, used, name in rows
            if one == uuid and pid.isdecimal()
        ]

    def energy(self, _uuid: str) -> float | None:
        """See `Driver`: it is asked too seldom to add up the power."""
        return None

    def health(self) -> dict[str, str]:
        """See `Driver`."""
        found: dict[str, str] = {}
        rows = self._try("gpu", "uuid", "ecc.errors.uncorrected.volatile.total")
        bad = {uuid for uuid, errors in rows if _number(errors)}
        for gpu in self._physical:
            if gpu.gpu.uuid in bad:
                reason = "uncorrected memory errors (ECC) since its last reset"
                found |= {device.uuid: reason for device in gpu.usable}
        return found

    def xids(self, timeout_s: float) -> list[Xid]:
        """See `Driver`: it does not tell of them."""
        time.sleep(timeout_s)
        return []

    def _look(self) -> list[PhysicalGpu]:
        fields = "uuid", "name", "memory.total"
        rows = self._try("gpu", *fields, "mig.mode.current")
        if not rows:  # an older one does not know the mode
            rows = [[*row, ""] for row in self._query("gpu", *fields)]
        parts = self._parts() if any(row[3] == "Enabled" for row in rows) else {}
        found = []
        for uuid, model, memory, mode in rows:
            gpu = Gpu(uuid, model, _bytes(memory) or 0.0)
            if mode != "Enabled":
                found.append(PhysicalGpu(gpu))
                continue
            of_it = tuple(
                Gpu(part, f"{model} MIG {profile}", _profile_bytes(profile))
                for profile, part in parts.get(uuid, ())
            )
            found.append(PhysicalGpu(gpu, of_it))
        return found

    def _parts(self) -> dict[str, list[tuple[str, str]]]:
        """Of each GPU the profiles and UUIDs of its MIG devices."""
        found: dict[str, list[tuple[str, str]]] = {}
        of_it: list[tuple[str, str]] = []
        for line in self._run("-L").splitlines():
            if (whole := _GPU_LINE.match(line)) is not None:
                of_it = found.setdefault(whole[1], [])
            elif (part := _PART_LINE.match(line)) is not None:
                of_it.append((part[1], part[2]))
        return found

    def _try(self, what: str, *fields: str) -> list[list[str]]:
        try:
            return self._query(what, *fields)
        except (OSError, ConfigError):  # an older one may not know a field
            return []

    def _query(self, what: str, *fields: str) -> list[list[str]]:
        query = f"--query-{what}={','.join(fields)}"
        at, rows = self._answers.get(query, (-math.inf, []))
        if time.monotonic() - at > _HOLDS_FOR_S:
            said = self._run(query, "--format=csv,noheader,nounits")
            all_rows = [[part.strip() for part in row.split(",")] for row in said.splitlines()]
            rows = [row for row in all_rows if len(row) == len(fields)]
            self._answers[query] = time.monotonic(), rows
        return rows

    def _run(self, *arguments: str) -> str:
        try:
            done = subprocess.run(
                [self._program, *arguments],
                stdin=subprocess.DEVNULL,
                capture_output=True,
                text=True,
                errors="replace",
                timeout=_ANSWERS_WITHIN_S,
                check=False,
            )
        except subprocess.TimeoutExpired as error:
            raise ConfigError(
                f"{self._program} does not answer within {_ANSWERS_WITHIN_S:g} s: mend the driver,"
                " or say what GPUs to offer (--gpus 0: none)."
            ) from error
        if done.returncode:
            said = (done.stderr or done.stdout).strip().partition("\n")[0]
            raise OSError(f"nvidia-smi ended with {done.returncode}: {said}")
        return done.stdout


def _number(text: str) -> float | None:
    """What nvidia-smi says, which may be ``[N/A]``."""
    try:
        return float(text)
    except ValueError:
        return None


def _bytes(mib: str) -> float | None:
    number = _number(mib)
    return None if number is None else number * _MIB


def _profile_bytes(profile: str) -> float:
    """The memory that a profile's name promises, which is rounded."""
    said = _PROFILE_GB.search(profile)
    return 0.0 if said is None else float(said[1]) * 2.0**30
