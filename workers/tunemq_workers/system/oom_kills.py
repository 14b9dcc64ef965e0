"""Whether the kernel has lately killed a process because memory ran out."""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import suppress
from typing import Final

from tunemq_workers.runtime.checkpoint_interfaces import Timers

#: Between two readings. A kill counts as late for one to two of these, in which even a large
#: process has ended.
PERIOD_S: Final = 30.0

_ROOT: Final = "/sys/fs/cgroup"


class OomKills:
    """Reads the kernel's counter: that of this process's own control group, else the machine's.

    Args:
        timers: for the readings.
        files: the first of them that has the counter is read; by default they are looked for.
    """

    def __init__(self, timers: Timers, files: Sequence[str] | None = None) -> None:
        self._timers = timers
        candidates = _files() if files is None else files
        self._file = next((file for file in candidates if _read(file) is not None), None)
        self._before = self._latest = self._count()

    def start(self) -> None:
        """Read from now on, if there is anything to read."""
        if self._file is not None:
            self._timers.after(PERIOD_S, self._read_again)

    def is_recent(self) -> bool:
        """Whether there was one in the last seconds."""
        return self._count() > self._before

    def _read_again(self) -> None:
        self._before, self._latest = self._latest, self._count()
        self._timers.after(PERIOD_S, self._read_again)

    def _count(self) -> int:
        return (_read(self._file) if self._file is not None else None) or 0


def _files() -> list[str]:
    """Where the counter may be; the machine's counts what other people's containers did, too."""
    files = []
    with suppress(OSError), open("/proc/self/cgroup", encoding="utf-8") as groups:
        for line in groups:
            _, controllers, path = line.rstrip("\n").split(":", 2)
            # In a container the path may be as it is outside, where this one's root is elsewhere.
            for folder in (path, ""):
                if not controllers:
                    files.append(f"{_ROOT}{folder}/memory.events")
                elif controllers == "memory":
                    files.append(f"{_ROOT}/memory{folder}/memory.oom_control")
    return [*files, "/proc/vmstat"]


def _read(file: str) -> int | None:
    with suppress(OSError), open(file, encoding="ascii") as lines:
        for line in lines:
            name, _, number = line.partition(" ")
            if name == "oom_kill":
                return int(number)
    return None
