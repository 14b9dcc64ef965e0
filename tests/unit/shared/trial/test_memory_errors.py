"""Out-of-memory errors of trials are recognized by their names and messages alone."""

from __future__ import annotations

import pytest

from tunemq_shared.trial.memory_errors import is_of_a_child, kind_of, says_cuda_memory


def a_class(module, name, *bases):
    return type(name, bases or (RuntimeError,), {"__module__": module})


TorchError = a_class("torch", "OutOfMemoryError")
OlderTorchError = a_class("torch.cuda", "OutOfMemoryError")
CupyError = a_class("cupy.cuda.memory", "OutOfMemoryError", MemoryError)
XlaError = a_class("jaxlib.xla_extension", "XlaRuntimeError")
TensorFlowError = a_class(
    "tensorflow.python.framework.errors_impl", "ResourceExhaustedError", Exception
)


@pytest.mark.parametrize(
    "error",
    [
        TorchError("CUDA out of memory. Tried to allocate 20.00 GiB"),
        OlderTorchError("said otherwise"),
        a_class("mine", "Derived", TorchError)("x"),
        CupyError("Out of memory allocating 8,000,000,000 bytes"),
        RuntimeError("CUDA out of memory. Tried to allocate 2.00 GiB (GPU 0; 15.90 GiB total)"),
        RuntimeError("CUDA error: out of memory\nCUDA kernel errors might be reported later"),
        RuntimeError("CUDA error: CUBLAS_STATUS_ALLOC_FAILED when calling `cublasCreate(handle)`"),
        ValueError("[12:00] gpu: Memory allocation error: cudaErrorMemoryAllocation"),
        MemoryError("std::bad_alloc: CUDA error at: x.cu:1: cudaErrorMemoryAllocation out of"),
        TensorFlowError("OOM when allocating tensor on /job:localhost/device:GPU:0"),
        RuntimeError("HIP error: out of memory"),
        RuntimeError("ggml: cudaMalloc failed: out of memory"),
        RuntimeError("NCCL error ... ncclUnhandledCudaError: Cuda failure 2 'out of memory'"),
        MemoryError("std::bad_alloc: out_of_memory: CUDA error at: /rmm/mr/device.hpp"),
    ],
)
def test_gpu_memory_error_is_recognized(error):
    assert kind_of(error) == "cuda_memory"


@pytest.mark.parametrize(
    "error",
    [
        MemoryError(),
        a_class("numpy._core._exceptions", "_ArrayMemoryError", MemoryError)("Unable to allocate"),
        RuntimeError("[enforce fail] DefaultCPUAllocator: can't allocate memory: you tried"),
        TensorFlowError("OOM when allocating tensor on /job:localhost/device:CPU:0"),
    ],
)
def test_machine_memory_error_is_recognized(error):
    assert kind_of(error) == "memory"


@pytest.mark.parametrize(("devices", "kind"), [("0", "cuda_memory"), ("", "memory")])
def test_xla_memory_error_is_a_gpus_where_there_is_one(monkeypatch, devices, kind):
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", devices)
    for said in ("Out of memory while trying to allocate 8 bytes.", "Failed to allocate request"):
        assert kind_of(XlaError(f"RESOURCE_EXHAUSTED: {said}")) == kind


class Unreadable(Exception):
    def __str__(self):
        raise ValueError


@pytest.mark.parametrize(
    "error",
    [
        RuntimeError("shapes do not match"),
        a_class("mine", "OutOfMemoryError")("of ideas"),
        KeyboardInterrupt("CUDA out of memory"),
        Unreadable(),
    ],
)
def test_other_errors_are_not_memory_errors(error):
    assert kind_of(error) == ""


def test_cause_of_an_error_counts_and_an_error_handled_before_does_not():
    caused, later = ValueError("training failed"), KeyError("batch_size")
    caused.__cause__ = MemoryError()
    later.__context__ = MemoryError()
    circular = ValueError("a")
    circular.__cause__ = circular
    assert [kind_of(error) for error in (caused, later, circular)] == ["memory", "", ""]


@pytest.mark.parametrize(
    "line",
    [
        "[rank1]: torch.OutOfMemoryError: CUDA out of memory. Tried to allocate 20.00 GiB.",
        "RuntimeError: CUDA error: out of memory",
        "thrust::system_error: parallel_for failed: cudaErrorMemoryAllocation: out of memory",
        "jaxlib.xla_extension.XlaRuntimeError: RESOURCE_EXHAUSTED: Out of memory while trying",
        "ResourceExhaustedError: OOM when allocating tensor with shape[9] on /device:GPU:0 by",
    ],
)
def test_line_with_a_memory_error_is_found_among_others(line):
    assert says_cuda_memory(f"step 1\n{line}\ntorchrun: a rank has failed\n")


@pytest.mark.parametrize(
    "line",
    [
        "",
        "out of memory",
        "GPU memory: 12 GiB",
        "OOM when allocating tensor on /device:CPU:0",
        "OOM when allocating tensor\nits device:GPU:0",
    ],
)
def test_other_lines_are_not_memory_errors(line):
    assert not says_cuda_memory(line)


@pytest.mark.parametrize(
    ("error", "is_so"),
    [
        ("CalledProcessError: Command '['torchrun']' returned non-zero exit status 1.", True),
        ("ChildFailedError: train.py FAILED", True),
        ("RuntimeError: DataLoader worker (pid 7) exited unexpectedly with exit code 1.", True),
        ("ValueError: shapes do not match", False),
    ],
)
def test_error_that_only_reports_a_failed_child_is_recognized(error, is_so):
    assert is_of_a_child(error) is is_so
