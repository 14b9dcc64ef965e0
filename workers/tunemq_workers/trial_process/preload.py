"""Preloads modules in a forkserver, and checks that forked children can run with them.

A library that has started threads, opened the GPU or run an OpenMP region leaves a state with which
a forked child hangs or fails, for no reason that its user could see. So after each module the
forkserver checks its own threads and GPU files, and a forked *probe* runs a BLAS and an OpenMP
region.
"""

from __future__ import annotations

import ctypes
import importlib
import os
import re
import signal
import sys
from collections.abc import Callable, Sequence
from typing import Final

from tunemq_shared.system.process_attributes import die_with_parent
from tunemq_shared.system.processes import is_readable, signal_name
from tunemq_workers.trial_process import thread_limits

#: A probe that takes longer counts as hanging.
PROBE_DEADLINE_S: Final = 5.0

_OPENMP: Final = re.compile(r"/(libgomp|libomp|libiomp)[^/]*$")
_PROBE_THREADS: Final = 2
_PROBE_FAILED: Final = 3


class PreloadFailed(Exception):
    """Forked children cannot run after the import of ``module``."""

    def __init__(self, module: str, reason: str) -> None:
        self.module, self.reason = module, reason
        super().__init__(f"{module}: {reason}")


def preload(
    modules: Sequence[str],
    *,
    announce: Callable[[str], None],
    warn: Callable[[str], None],
    deadline_s: float = PROBE_DEADLINE_S,
) -> tuple[str, ...]:
    """Import ``modules`` one after another; return those that could be imported.

    Args:
        modules: Their names.
        announce: Called with the name of each before its import.
        warn: Called with a message for each that fails; the others are still imported.
        deadline_s: How long a probe may take, in seconds.

    Raises:
        PreloadFailed: after the last import, forked children cannot run.
    """
    loaded = []
    for module in modules:
        announce(module)
        try:
            importlib.import_module(module)
        except BaseException as error:  # noqa: BLE001 - any user code runs here; `warn` reports it
            warn(
                f"{module} could not be preloaded ({type(error).__name__}: {error}); each trial "
                "imports it itself."
            )
        else:
            loaded.append(module)
        reason = why_children_cannot_run(deadline_s)
        if reason is not None:
            raise PreloadFailed(module, reason)
    return tuple(loaded)


def why_children_cannot_run(deadline_s: float = PROBE_DEADLINE_S) -> str | None:
    """Return why children forked now might hang or fail; None if a probe ran without error."""
    if (count := len(os.listdir("/proc/self/task"))) > 1:
        return f"it runs {count - 1} thread{'s' * (count > 2)} besides the main one"
    if _has_gpu_open():
        return "it has opened the GPU, which a forked child then cannot use"
    return _probe(deadline_s)


def _has_gpu_open() -> bool:
    """Return whether the CUDA driver is initialised: GPU devices are mapped or open."""
    with open("/proc/self/maps", "rb") as file:
        if b" /dev/nvidia" in file.read():
            return True
    for fd in os.listdir("/proc/self/fd"):
        try:
            if os.readlink(f"/proc/self/fd/{fd}").startswith("/dev/nvidia"):
                return True
        except FileNotFoundError:  # the descriptor of this directory listing
            continue
    return False


def _probe(deadline_s: float) -> str | None:
    me = os.getpid()
    child = os.fork()
    if child == 0:
        # Whatever happens here, only the exit code matters, and no cleanup of the parent may run.
        try:
            die_with_parent(me)
            _run_regions()
            os._exit(0)
        finally:
            os._exit(_PROBE_FAILED)
    fd = os.pidfd_open(child)
    try:
        ended = is_readable(fd, deadline_s)
    finally:
        os.close(fd)
    if not ended:
        os.kill(child, signal.SIGKILL)
    _, status = os.waitpid(child, 0)
    if not ended:
        return (
            f"a forked child that ran a BLAS and an OpenMP region hung for {deadline_s:g} s "
            "(it probably ran one itself while it was imported)"
        )
    code = os.waitstatus_to_exitcode(status)
    if code < 0:
        return f"a forked child died of {signal_name(-code)} in a BLAS or OpenMP region"
    return None if code == 0 else "a forked child failed in a BLAS or OpenMP region"


def _run_regions() -> None:
    """Run a matrix product and an empty region of each OpenMP runtime, with two threads."""
    libraries = thread_limits.LoadedLibraries()
    libraries.limit(_PROBE_THREADS, {})
    if (numpy := sys.modules.get("numpy")) is not None:
        square = numpy.ones((256, 256))
        square @ square
    for path in thread_limits.mapped_libraries():
        if _OPENMP.search(path) is None:
            continue
        library = ctypes.CDLL(path)
        # The LLVM and Intel runtimes have GNU's entry point as well. Its body may be any C
        # function: this one takes no argument and returns at once.
        if hasattr(library, "GOMP_parallel"):
            body = ctypes.cast(ctypes.CDLL(None).sched_yield, ctypes.c_void_p)
            library.GOMP_parallel(body, None, ctypes.c_uint(_PROBE_THREADS), ctypes.c_uint(0))
