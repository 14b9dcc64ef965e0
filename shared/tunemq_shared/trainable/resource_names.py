"""Names of resources that have a special meaning."""

from __future__ import annotations

from typing import Final

GPU: Final = "gpu"
#: Bytes of a GPU's memory.
GPU_MEMORY: Final = "gpu_memory"
#: Prefix of the GPU model that a trial requires.
ACCELERATOR_TYPE: Final = "accelerator_type:"
