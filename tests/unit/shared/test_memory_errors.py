"""What a trial raised is known for what it is, by names and words alone."""

from __future__ import annotations

import pytest

from tunemq_shared.memory_errors import kind_of


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
    ],
)
def test_a_gpu_whose_memory_ran_out_is_named(error):
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
def test_memory_of_the_machine_that_ran_out_is_named(error):
    assert kind_of(error) == "memory"


@pytest.mark.parametrize(("devices", "kind"), [("0", "cuda_memory"), ("", "memory")])
def test_what_xla_says_is_a_gpus_where_there_is_one(monkeypatch, devices, kind):
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", devices)
    error = XlaError("RESOURCE_EXHAUSTED: Out of memory while trying to allocate 8 bytes.")
    assert kind_of(error) == kind


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
def test_other_errors_are_none_of_these(error):
    assert kind_of(error) == ""


def test_what_an_error_was_raised_from_counts_and_what_was_handled_before_does_not():
    caused, later = ValueError("training failed"), KeyError("batch_size")
    caused.__cause__ = MemoryError()
    later.__context__ = MemoryError()
    circular = ValueError("a")
    circular.__cause__ = circular
    assert [kind_of(error) for error in (caused, later, circular)] == ["memory", "", ""]
