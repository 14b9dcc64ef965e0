"""Access to this machine's GPU driver through NVML (``nvidia-ml-py``, the extra ``gpu``).

Nothing here uses CUDA: a process that has opened a device could not fork trial processes any more,
and would hold some of its memory.
"""

from __future__ import annotations

import logging
import os
from typing import Final

from tunemq_shared.base.errors import ConfigError
from tunemq_workers.gpu.drivers.driver import GpuDriver, GpuProcess, PhysicalGpu, Xid, devices
from tunemq_workers.gpu.drivers.nvml import NvmlDriver

__all__ = [
    "GpuDriver",
    "GpuProcess",
    "NvmlDriver",
    "PhysicalGpu",
    "Xid",
    "devices",
    "open_driver",
]

#: NVIDIA's driver creates this file when it is loaded.
_DRIVER: Final = "/dev/nvidiactl"

_log = logging.getLogger(__name__)


def open_driver() -> GpuDriver | None:
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
