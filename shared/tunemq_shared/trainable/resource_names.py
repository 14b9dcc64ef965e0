"""The names of resources that mean more than an amount."""

from __future__ import annotations

from typing import Final

GPU: Final = "gpu"
#: Bytes of a device.
GPU_MEMORY: Final = "gpu_memory"
#: Before the model that a trial's GPUs have to be of.
ACCELERATOR_TYPE: Final = "accelerator_type:"
