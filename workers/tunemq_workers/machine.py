"""What this machine is called and what it offers."""

from __future__ import annotations

import math
import os
import socket
from contextlib import suppress
from typing import Final

_CGROUP: Final = "/sys/fs/cgroup"


def hostname() -> str:
    """The machine's name."""
    return socket.gethostname()


def node_ip(towards: str = "") -> str:
    """The address from which this machine speaks to the host ``towards``; 127.0.0.1 without one.

    Nothing is sent: the kernel only chooses a route.
    """
    if towards:
        with suppress(OSError):
            family, _, _, _, address = socket.getaddrinfo(towards, 9, type=socket.SOCK_DGRAM)[0]
            with socket.socket(family, socket.SOCK_DGRAM) as sock:
                sock.connect(address)
                return str(sock.getsockname()[0])
    return "127.0.0.1"


def cpus() -> float:
    """Processors that this process may use: its affinity, cut by its container's quota."""
    allowed = float(len(os.sched_getaffinity(0)))
    with suppress(OSError, ValueError):
        quota, period = _read(f"{_CGROUP}/cpu.max").split()
        if quota != "max":
            return max(1.0, min(allowed, math.floor(int(quota) / int(period))))
    return allowed


def memory_bytes() -> int:
    """Memory that this process may use: the machine's, cut by its container's limit."""
    total = os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
    with suppress(OSError, ValueError):
        return min(total, int(_read(f"{_CGROUP}/memory.max")))
    return total


def memory_free_bytes() -> float | None:
    """Memory that may still be used, of what `memory_bytes` says; None where nobody says."""
    free: float | None = None
    with suppress(OSError, ValueError, IndexError):
        line = _read("/proc/meminfo").split("MemAvailable:")[1].split("\n")[0]
        free = float(line.split()[0]) * 1024
    with suppress(OSError, ValueError):
        left = float(int(_read(f"{_CGROUP}/memory.max")) - int(_read(f"{_CGROUP}/memory.current")))
        free = left if free is None else min(free, left)
    return free


def offered(cpu_count: float | None, others: dict[str, float]) -> dict[str, float]:
    """The resources that a node announces; what is given stands above what was found."""
    found = {"cpu": cpus() if cpu_count is None else cpu_count, "memory": float(memory_bytes())}
    return {**found, **others}


def _read(path: str) -> str:
    with open(path, encoding="ascii") as file:
        return file.read().strip()
