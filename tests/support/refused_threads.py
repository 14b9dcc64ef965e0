"""Have the kernel refuse new threads to this process, as a container does at its limit."""

from __future__ import annotations

import contextlib
import resource
import threading
from collections.abc import Iterator
from pathlib import Path

_STACK = 2**30


@contextlib.contextmanager
def threads_refused() -> Iterator[None]:
    """Leave no address space for the stack of a further thread."""
    soft, hard = resource.getrlimit(resource.RLIMIT_AS)
    pages = int(Path("/proc/self/statm").read_text().split()[0])
    before = threading.stack_size(_STACK)  # larger than any that the C library keeps for reuse
    limit = pages * resource.getpagesize() + _STACK // 2
    resource.setrlimit(resource.RLIMIT_AS, (limit, hard))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_AS, (soft, hard))
        threading.stack_size(before)
