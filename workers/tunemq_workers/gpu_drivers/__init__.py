"""What the driver of this machine's GPUs says: by NVML where its bindings are, else by nvidia-smi.

Nothing here touches CUDA: a process that has opened a device could not fork hosts any more, and
would hold some of its memory.
"""

from __future__ import annotations

import logging

from tunemq_workers.gpu_drivers.driver import Driver, Holder, PhysicalGpu, Xid, devices
from tunemq_workers.gpu_drivers.nvidia_smi import NvidiaSmi
from tunemq_workers.gpu_drivers.nvml import Nvml

__all__ = [
    "Driver",
    "Holder",
    "NvidiaSmi",
    "Nvml",
    "PhysicalGpu",
    "Xid",
    "devices",
    "open_driver",
]

_log = logging.getLogger(__name__)


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
