"""What the driver of this machine's GPUs says: by NVML where its bindings are, else by nvidia-smi.

Nothing here touches CUDA: a process that has opened a device could not fork hosts any more, and
would hold some of its memory.
"""

from __future__ import annotations

import importlib
import logging
import shutil
import subprocess
from collections.abc import Callable, Iterator
from typing import Any, Final, Protocol, TypeVar

from tunemq_shared.errors import ConfigError
from tunemq_shared.messages import Gpu
from tunemq_shared.vitals import GpuVitals

#: A driver that nobody uses loads itself for every question, which takes seconds where there are
#: many GPUs.
_ANSWERS_WITHIN_S: Final = 10.0
_MIB: Final = 2.0**20

_log = logging.getLogger(__name__)
T = TypeVar("T")


class Driver(Protocol):
    """Knows the GPUs of this machine; calls may take a while."""

    #: How often to ask what they do.
    period_s: float

    def gpus(self) -> list[Gpu]:
        """All of them, in the driver's order.

        Raises:
            OSError: it does not say.
        """

    def vitals(self) -> list[GpuVitals]:
        """What each does now.

        Raises:
            OSError: it does not say.
        """


def open_driver() -> Driver | None:
    """The driver; None where there is none that works.

    Raises:
        ConfigError: it does not answer.
    """
    for kind in (Nvml, NvidiaSmi):
        try:
            return kind()
        except (ImportError, OSError) as problem:
            _log.info("gpus.not_asked by=%s problem=%r", kind.__name__, str(problem))
    return None


class Nvml:
    """By NVIDIA's management library, in this process.

    Raises:
        ImportError: its bindings (``nvidia-ml-py``) are not installed.
        OSError: the library is not there, or finds no driver.
    """

    period_s = 2.0

    def __init__(self) -> None:
        self._nvml: Any = importlib.import_module("pynvml")
        self._call(self._nvml.nvmlInit)

    def gpus(self) -> list[Gpu]:
        """See `Driver`."""
        nvml = self._nvml
        return [
            Gpu(
                _text(self._call(nvml.nvmlDeviceGetUUID, handle)),
                _text(self._call(nvml.nvmlDeviceGetName, handle)),
                float(self._call(nvml.nvmlDeviceGetMemoryInfo, handle).total),
            )
            for handle in self._handles()
        ]

    def vitals(self) -> list[GpuVitals]:
        """See `Driver`."""
        nvml = self._nvml
        return [
            GpuVitals(
                _text(self._call(nvml.nvmlDeviceGetUUID, handle)),
                self._if_known(lambda h: nvml.nvmlDeviceGetUtilizationRates(h).gpu / 100, handle),
                self._if_known(lambda h: float(nvml.nvmlDeviceGetMemoryInfo(h).used), handle),
            )
            for handle in self._handles()
        ]

    def _handles(self) -> Iterator[Any]:
        for index in range(self._call(self._nvml.nvmlDeviceGetCount)):
            yield self._call(self._nvml.nvmlDeviceGetHandleByIndex, index)

    def _call(self, function: Callable[..., T], *arguments: Any) -> T:
        try:
            return function(*arguments)
        except self._nvml.NVMLError as error:
            raise OSError(f"NVML: {error}") from error

    def _if_known(self, function: Callable[[Any], float], handle: Any) -> float | None:
        """Some of what is asked devices do not say, such as parts of one."""
        try:
            return self._call(function, handle)
        except OSError:
            return None


class NvidiaSmi:
    """By the program ``nvidia-smi``.

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
        self._gpus = [
            Gpu(uuid, model, (_number(memory) or 0.0) * _MIB)
            for uuid, model, memory in self._ask("uuid", "name", "memory.total")
        ]

    def gpus(self) -> list[Gpu]:
        """See `Driver`."""
        return self._gpus

    def vitals(self) -> list[GpuVitals]:
        """See `Driver`."""
        found: list[GpuVitals] = []
        for uuid, busy, used in self._ask("uuid", "utilization.gpu", "memory.used"):
            percent, mib = _number(busy), _number(used)
            found.append(
                GpuVitals(
                    uuid,
                    None if percent is None else percent / 100,
                    None if mib is None else mib * _MIB,
                )
            )
        return found

    def _ask(self, *fields: str) -> list[list[str]]:
        line = [self._program, f"--query-gpu={','.join(fields)}", "--format=csv,noheader,nounits"]
        try:
            done = subprocess.run(
                line,
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
        rows = [[part.strip() for part in row.split(",")] for row in done.stdout.splitlines()]
        return [row for row in rows if len(row) == len(fields)]


def _number(text: str) -> float | None:
    """What nvidia-smi says, which may be ``[N/A]``."""
    try:
        return float(text)
    except ValueError:
        return None


def _text(said: str | bytes) -> str:
    """Older bindings answer in bytes."""
    return said.decode(errors="replace") if isinstance(said, bytes) else said
