"""Finds out that what a trial raised means that memory ran out: the process's, or a GPU's.

Libraries are known by the names of their exceptions and by what these say, so that none has to be
imported.
"""

from __future__ import annotations

import os
from collections.abc import Iterator
from typing import Final

#: Kinds of a TrialFailed.
MEMORY: Final = "memory"
CUDA_MEMORY: Final = "cuda_memory"

#: Classes by the first part of their module's name: ``torch.OutOfMemoryError`` and
#: ``torch.cuda.OutOfMemoryError``, ``cupy.cuda.memory.OutOfMemoryError``.
_CLASSES: Final = frozenset({("torch", "OutOfMemoryError"), ("cupy", "OutOfMemoryError")})

#: TensorFlow's, of any device, which its message names.
_NAMES_THE_DEVICE: Final = ("tensorflow", "ResourceExhaustedError")

#: What only the driver, or who asks it, says. PyTorch, its C++ parts, Numba, CuPy, XGBoost and
#: TensorFlow pass it on in exceptions of many classes.
_OF_THE_DEVICE: Final = (
    "CUDA out of memory",
    "HIP out of memory",
    "XPU out of memory",
    "CUDA error: out of memory",
    "HIP error: out of memory",
    "cudaMalloc failed: out of memory",
    "Cuda failure 'out of memory'",
    "Cuda failure 2 'out of memory'",
    "out_of_memory: CUDA error",
    "cudaErrorMemoryAllocation",
    "hipErrorOutOfMemory",
    "CUDA_ERROR_OUT_OF_MEMORY",
    "CUBLAS_STATUS_ALLOC_FAILED",
    "CUDNN_STATUS_ALLOC_FAILED",
)
#: What XLA says, of a GPU's memory and of the machine's alike.
_OF_EITHER: Final = (
    "RESOURCE_EXHAUSTED: Out of memory",
    "RESOURCE_EXHAUSTED: Failed to allocate request",
)
#: What TensorFlow says, with the name of the device behind it.
_OF_A_NAMED_ONE: Final = ("OOM when allocating tensor", "device:GPU")
#: What those raise who have started a process that has failed: subprocess, concurrent.futures,
#: torch.multiprocessing, torchrun, DataLoaders, and TuneMQ of a trial that is a program.
_OF_A_CHILD: Final = (
    "CalledProcessError",
    "BrokenProcessPool",
    "ProcessExitedException",
    "ProcessRaisedException",
    "ChildFailedError",
    "DataLoader worker",
    "ExecutableFailed",
)
#: PyTorch's of the machine's.
_OF_THE_MACHINE: Final = "DefaultCPUAllocator: can't allocate memory"


def kind_of(error: BaseException) -> str:
    """``cuda_memory`` or ``memory`` where ``error``, or what caused it, says so; else empty."""
    for one in _causes(error):
        if kind := _kind_of_one(one):
            return kind
    return ""


def says_cuda_memory(printed: str) -> bool:
    """Whether one of these lines says that the memory of a GPU ran out.

    They are of a trial that has a GPU; a child of its process printed them, such as a rank of
    torchrun or a worker of a DataLoader, for else the trial's own error would say so.
    """
    return any(
        _says_device(line)
        or any(words in line for words in _OF_EITHER)
        or all(words in line for words in _OF_A_NAMED_ONE)
        for line in printed.splitlines()
    )


def is_of_a_child(error: str) -> bool:
    """Whether an error, in one line, says no more than that a child of the process has failed."""
    return any(words in error for words in _OF_A_CHILD)


def _says_device(text: str) -> bool:
    return any(words in text for words in _OF_THE_DEVICE)


def _causes(error: BaseException) -> Iterator[BaseException]:
    """The error, what it was raised from, what that was raised from, and so on."""
    seen: set[int] = set()
    cause: BaseException | None = error
    while cause is not None and id(cause) not in seen:
        seen.add(id(cause))
        yield cause
        cause = cause.__cause__


def _kind_of_one(error: BaseException) -> str:
    if isinstance(error, MemoryError):  # CuPy's is one too
        return CUDA_MEMORY if _is_of_the_device(error) else MEMORY
    if not isinstance(error, Exception):
        return ""
    if _is_of_the_device(error):
        return CUDA_MEMORY
    said = _said(error)
    if any(words in said for words in _OF_EITHER):
        return CUDA_MEMORY if os.environ.get("CUDA_VISIBLE_DEVICES") != "" else MEMORY
    if _NAMES_THE_DEVICE in _names(error):
        return CUDA_MEMORY if "device:GPU" in said else MEMORY
    return MEMORY if _OF_THE_MACHINE in said else ""


def _is_of_the_device(error: Exception) -> bool:
    if _names(error) & _CLASSES:
        return True
    return _says_device(_said(error))


def _names(error: Exception) -> set[tuple[str, str]]:
    """The classes of an exception: the package of each, and its name."""
    return {(kind.__module__.partition(".")[0], kind.__name__) for kind in type(error).__mro__}


def _said(error: Exception) -> str:
    try:
        return str(error)
    except Exception:  # noqa: BLE001  a user's __str__ may raise anything; it is no memory error
        return ""
