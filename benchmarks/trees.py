"""The resources of a process and all its descendants."""

from __future__ import annotations

import contextlib
import time
from dataclasses import dataclass

import psutil


@dataclass(frozen=True)
class Footprint:
    """Of a whole tree: memory in MiB, CPU in percent of one core."""

    processes: int
    pss: float
    rss: float
    cpu: float


def footprint(pid: int, seconds: float) -> Footprint:
    """Watch a tree for so long; memory as it is at the end."""
    before = {process.pid: _cpu(process) for process in _tree(pid)}
    time.sleep(seconds)
    pss = rss = cpu = 0.0
    tree = _tree(pid)
    for process in tree:
        with contextlib.suppress(psutil.NoSuchProcess):
            memory = process.memory_full_info()
            pss, rss = pss + memory.pss / 2**20, rss + memory.rss / 2**20
            cpu += _cpu(process) - before.get(process.pid, 0.0)
    return Footprint(len(tree), pss, rss, 100 * cpu / seconds)


def _tree(pid: int) -> list[psutil.Process]:
    top = psutil.Process(pid)
    return [top, *top.children(recursive=True)]


def _cpu(process: psutil.Process) -> float:
    try:
        times = process.cpu_times()
    except psutil.NoSuchProcess:
        return 0.0
    return float(times.user + times.system)
