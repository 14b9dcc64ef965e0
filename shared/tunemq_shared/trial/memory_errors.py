"""Recognise exceptions that mean out of memory: of the process, or of a GPU.

They are recognised by their class names and messages, so that no library has to be imported.
"""

from __future__ import annotations

import os
from collections.abc import Iterator
from typing import Final

#: Kinds of a TrialFailed.
MEMORY: Final = "memory"
CUDA_MEMORY: Final = "cuda_memory"

#: Classes by the top-level package of their module: ``torch.OutOfMemoryError`` and
#: ``torch.cuda.OutOfMemoryError``, ``cupy.cuda.memory.OutOfMemoryError``.
_CLASSES: Final = frozenset({("torch", "OutOfMemoryError"), ("cupy", "OutOfMemoryError")})

#: TensorFlow's class for any device; its message names the device.
_NAMES_THE_DEVICE: Final = ("tensorflow", "ResourceExhaustedError")

#: Messages about a GPU only. PyTorch, its C++ parts, Numba, CuPy, XGBoost and TensorFlow repeat
#: the driver's message in exceptions of many classes.
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
#: XLA's messages, for a GPU's memory and the machine's alike.
_OF_EITHER: Final = (
    "RESOURCE_EXHAUSTED: Out of memory",
    "RESOURCE_EXHAUSTED: Failed to allocate request",
)
#: TensorFlow's message, followed by the name of the device.
_OF_A_NAMED_ONE: Final = ("OOM when allocating tensor", "device:GPU")
#: Errors about a failed child process: of subprocess, concurrent.futures, torch.multiprocessing,
#: torchrun, DataLoaders, and TuneMQ itself for a trial that is a program.
_OF_A_CHILD: Final = (
    "CalledProcessError",
    "BrokenProcessPool",
    "ProcessExitedException",
    "ProcessRaisedException",
    "ChildFailedError",
    "DataLoader worker",
    "ExecutableFailed",
)
#: PyTorch's message about the machine's memory.
_OF_THE_MACHINE: Final = "DefaultCPUAllocator: can't allocate memory"


def kind_of(error: BaseException) -> str:
    """``cuda_memory`` or ``memory`` if ``error`` or one of its causes means that; else empty."""
    for one in _causes(error):
        if kind := _kind_of_one(one):
            return kind
    return ""


def says_cuda_memory(printed: str) -> bool:
    """Whether one of these lines says that a GPU ran out of memory.

    ``printed`` is the output of a trial with a GPU whose own error does not say so: a child of its
    process printed the line, such as a rank of torchrun or a worker of a DataLoader.
    """
    return any(
        _says_device(line)
        or any(words in line for words in _OF_EITHER)
        or all(words in line for words in _OF_A_NAMED_ONE)
        for line in printed.splitlines()
    )


def is_of_a_child(error: str) -> bool:
    """Whether an error, in one line, only says that a child process failed."""
    return any(words in error for words in _OF_A_CHILD)


def _says_device(text: str) -> bool:
    return any(words in text for words in _OF_THE_DEVICE)


def _causes(error: BaseException) -> Iterator[BaseException]:
    """Iterate over the error and its chain of causes."""
    seen: set[int] = set()
    cause: BaseException | None = error
    while cause is not None and id(cause) not in seen:
        seen.add(id(cause))
        yield cause
        cause = cause.__cause__


def _kind_of_one(error: BaseException) -> str:
    if isinstance(error, MemoryError):  # CuPy's error derives from it
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
    """The classes of an exception: the top-level package and the name of each."""
    return {(kind.__module__.partition(".")[0], kind.__name__) for kind in type(error).__mro__}


def _said(error: Exception) -> str:
    try:
        return str(error)
    except Exception:  # noqa: BLE001  a user's __str__ may raise anything: not a memory error
        return ""
