"""`Cgroup`: the limits that this process's control group and its ancestors impose.

In a container the group is the root of the visible tree. In a service or a batch job it is further
down, and each ancestor may have a lower limit.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import suppress
from typing import Final

_ROOT: Final = "/sys/fs/cgroup"
_ABOUT: Final = "/proc/self/cgroup"


def group_paths(about: str = _ABOUT) -> dict[str, str]:
    """Return the path of this process's group for each controller; the key "" is version 2's."""
    paths: dict[str, str] = {}
    with suppress(OSError), open(about, encoding="utf-8", errors="surrogateescape") as groups:
        for line in groups:
            _, controllers, path = line.rstrip("\n").split(":", 2)
            paths |= dict.fromkeys(controllers.split(","), path)
    return paths


def read_value(file: str) -> str:
    """Return the content of a file of the kernel, without the line's end."""
    with open(file, encoding="ascii") as lines:
        return lines.read().strip()


class Cgroup:
    """This process's control group, in both versions of the kernel's interface.

    Args:
        root: the mount point of the control groups.
        about: the file that names this process's groups.
    """

    def __init__(self, root: str = _ROOT, about: str = _ABOUT) -> None:
        self._root = root
        #: By controller, the paths from this process's group upwards; key "" in version 2.
        self._folders = {"": [root]}
        for controller, path in group_paths(about).items():
            top = f"{root}/{controller}" if controller else root
            self._folders[controller] = [top + part for part in _upwards(path)]

    def memory_bytes(self) -> int | None:
        """Return the memory limit of the group in bytes; None if there is none."""
        return min((limit for limit, _ in self._memory()), default=None)

    def memory_left_bytes(self) -> int | None:
        """Return the bytes that are free or hold inactive file pages; None if unlimited."""
        return min((limit - used for limit, used in self._memory()), default=None)

    def cpus(self) -> float | None:
        """Return the number of CPUs whose time the group may use; None if there is no limit."""
        found = []
        for folder in self._folders[""]:
            with suppress(OSError, ValueError):
                quota, period = read_value(f"{folder}/cpu.max").split()
                found.append(int(quota) / int(period))
        for folder in self._folders.get("cpu", ()):
            with suppress(OSError, ValueError):
                quota = read_value(f"{folder}/cpu.cfs_quota_us")
                if int(quota) > 0:
                    found.append(int(quota) / int(read_value(f"{folder}/cpu.cfs_period_us")))
        return min(found, default=None)

    def _memory(self) -> Iterator[tuple[int, int]]:
        """Yield (limit, non-reclaimable use) in bytes for each group with a limit."""
        names = {
            "": ("memory.max", "memory.current", "inactive_file"),
            "memory": (
                "memory.limit_in_bytes",
                "memory.usage_in_bytes",
                "total_inactive_file",  # includes the groups below, as the other two do
            ),
        }
        for controller, (limit, used, cached) in names.items():
            for folder in self._folders.get(controller, ()):
                with suppress(OSError, ValueError):  # also for "max"
                    in_use = int(read_value(f"{folder}/{used}")) - _stat(folder, cached)
                    yield int(read_value(f"{folder}/{limit}")), max(0, in_use)


def _upwards(path: str) -> Iterator[str]:
    """Yield a path below the root and its ancestors; a container may hide all but its root."""
    while path not in {"", "/"}:
        yield path
        path = path.rpartition("/")[0]
    yield ""


def _stat(folder: str, name: str) -> int:
    """Return a value of a group's ``memory.stat``; 0 if it is missing."""
    with suppress(OSError, ValueError):
        for line in read_value(f"{folder}/memory.stat").splitlines():
            key, _, value = line.partition(" ")
            if key == name:
                return int(value)
    return 0
