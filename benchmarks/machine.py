"""A short description of the machine, so that readers can compare figures."""

from __future__ import annotations

import os
import platform

import psutil


def describe() -> str:
    """Cores, memory, kernel, Python; and how busy it was before."""
    memory = psutil.virtual_memory().total / 2**30
    kernel = ".".join(platform.release().split(".")[:2])
    busy = os.getloadavg()[0]
    return (
        f"{os.cpu_count()} cores, {memory:.0f} GiB, {platform.system()} {kernel}, "
        f"Python {platform.python_version()}, load {busy:.1f} at the start"
    )
