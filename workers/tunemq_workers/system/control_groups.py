"""`Cgroup`: what the kernel allows this process, by its control group and those above it.

A container's group is the root of what it sees; a service's, or that of a batch system's job, is
somewhere below, and each group on the way up may allow less than those within.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import suppress
from typing import Final

_ROOT: Final = "/sys/fs/cgroup"
_ABOUT: Final = "/proc/self/cgroup"


class Cgroup:
    """That of this process, by both versions of the kernel's interface.

    Args:
        root: where the kernel shows control groups.
        about: the file that says which is this process's.
    """

    def __init__(self, root: str = _ROOT, about: str = _ABOUT) -> None:
        self._root = root
        #: By controller, the groups from this process's own upwards; "" for all, in version 2.
        self._folders = {"": [root]}
        with suppress(OSError), open(about, encoding="utf-8", errors="surrogateescape") as groups:
            for line in groups:
                _, controllers, path = line.rstrip("\n").split(":", 2)
                for controller in controllers.split(","):
                    top = f"{root}/{controller}" if controller else root
                    self._folders[controller] = [top + part for part in _upwards(path)]

    def memory_bytes(self) -> int | None:
        """How much memory all processes of the group may use; None where nothing limits it."""
        return min((limit for limit, _ in self._memory()), default=None)

    def memory_left_bytes(self) -> int | None:
        """How much of that is not in use, or in use for files that nobody needs; None as above."""
        return min((limit - used for limit, used in self._memory()), default=None)

    def cpus(self) -> float | None:
        """How many processors' time the group gets; None where nothing limits it."""
        found = []
        for folder in self._folders[""]:
            with suppress(OSError, ValueError):
                quota, period = _read(f"{folder}/cpu.max").split()
                found.append(int(quota) / int(period))
        for folder in self._folders.get("cpu", ()):
            with suppress(OSError, ValueError):
                quota = _read(f"{folder}/cpu.cfs_quota_us")
                if int(quota) > 0:
                    found.append(int(quota) / int(_read(f"{folder}/cpu.cfs_period_us")))
        return min(found, default=None)

    def _memory(self) -> Iterator[tuple[int, int]]:
        """Of each group with a limit: that, and what is in use and cannot be had at once."""
        names = {
            "": ("memory.max", "memory.current", "inactive_file"),
            "memory": (
                "memory.limit_in_bytes",
                "memory.usage_in_bytes",
                "total_inactive_file",  # the groups below, too, as the other two
            ),
        }
        for controller, (limit, used, cached) in names.items():
            for folder in self._folders.get(controller, ()):
                with suppress(OSError, ValueError):  # "max", too
                    in_use = int(_read(f"{folder}/{used}")) - _stat(folder, cached)
                    yield int(_read(f"{folder}/{limit}")), max(0, in_use)


def _upwards(path: str) -> Iterator[str]:
    """A path below the root, and all above it; where a container hides the path, its root."""
    while path not in {"", "/"}:
        yield path
        path = path.rpartition("/")[0]
    yield ""


def _stat(folder: str, name: str) -> int:
    """A line of a group's ``memory.stat``; 0 where there is none."""
    with suppress(OSError, ValueError):
        for line in _read(f"{folder}/memory.stat").splitlines():
            key, _, value = line.partition(" ")
            if key == name:
                return int(value)
    return 0


def _read(file: str) -> str:
    with open(file, encoding="ascii") as lines:
        return lines.read().strip()
