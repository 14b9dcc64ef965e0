"""This machine's name, address and resources."""

from __future__ import annotations

import math
import os
import socket
from contextlib import suppress

from tunemq_workers.system.cgroup_limits import Cgroup


def hostname() -> str:
    """Return the machine's host name."""
    return socket.gethostname()


def node_ip(towards: str = "") -> str:
    """Return the local address of a connection to ``towards``; 127.0.0.1 without one.

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
    """Return the CPUs that this process may use: its affinity, limited by its group's quota."""
    allowed = float(len(os.sched_getaffinity(0)))
    quota = Cgroup().cpus()
    return allowed if quota is None else max(1.0, min(allowed, math.floor(quota)))


def memory_bytes() -> int:
    """Return the bytes of memory that this process may use, limited by its control group."""
    total = os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
    limit = Cgroup().memory_bytes()
    return total if limit is None else min(total, limit)


def memory_free_bytes() -> float | None:
    """Return how much of `memory_bytes` is still available, in bytes; None if unknown."""
    free: float | None = None
    with suppress(OSError, ValueError, IndexError), open("/proc/meminfo", encoding="ascii") as file:
        line = file.read().split("MemAvailable:")[1].split("\n")[0]
        free = float(line.split()[0]) * 1024
    left = Cgroup().memory_left_bytes()
    if left is None:
        return free
    return float(left) if free is None else min(free, float(left))


def offered(cpu_count: float | None, others: dict[str, float]) -> dict[str, float]:
    """Return the resources that a node announces; given values replace measured ones."""
    found = {"cpu": cpus() if cpu_count is None else cpu_count, "memory": float(memory_bytes())}
    return {**found, **others}
