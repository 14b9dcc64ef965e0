"""`OomKills`: find out whether the kernel recently killed a process for lack of memory."""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import suppress
from typing import Final

from tunemq_workers.runtime.reactor import Reactor
from tunemq_workers.system.cgroup_limits import group_paths

#: Seconds between two readings. A kill counts as recent for one to two periods, in which even a
#: large process has ended.
PERIOD_S: Final = 30.0

_ROOT: Final = "/sys/fs/cgroup"


class OomKills:
    """Read the kernel's counter of this process's control group, or else of the machine.

    Args:
        timers: schedules the readings.
        files: candidate files, of which the first one with the counter is read; default: those of
            this process's control group, then the machine's.
    """

    def __init__(self, timers: Reactor, files: Sequence[str] | None = None) -> None:
        self._timers = timers
        candidates = _files() if files is None else files
        self._file = next((file for file in candidates if _read(file) is not None), None)
        self._before = self._latest = self._count()

    def start(self) -> None:
        """Read periodically from now on, if there is a counter."""
        if self._file is not None:
            self._timers.after(PERIOD_S, self._read_again)

    def is_recent(self) -> bool:
        """Return whether a kill happened within the last one to two periods."""
        return self._count() > self._before

    def _read_again(self) -> None:
        self._before, self._latest = self._latest, self._count()
        self._timers.after(PERIOD_S, self._read_again)

    def _count(self) -> int:
        return (_read(self._file) if self._file is not None else None) or 0


def _files() -> list[str]:
    """Return the files that may have the counter; the machine's counts all containers."""
    paths = group_paths()
    # In a container the path may be the one outside, while the group's files are at the root.
    v2 = [f"{_ROOT}{folder}/memory.events" for folder in (paths[""], "")] if "" in paths else []
    path = paths.get("memory")
    v1 = [] if path is None else [f"{_ROOT}/memory{at}/memory.oom_control" for at in (path, "")]
    return [*v1, *v2, "/proc/vmstat"]


def _read(file: str) -> int | None:
    with suppress(OSError), open(file, encoding="ascii") as lines:
        for line in lines:
            name, _, number = line.partition(" ")
            if name == "oom_kill":
                return int(number)
    return None
