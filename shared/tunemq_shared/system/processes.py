"""Information from /proc about processes: their parents, states and ends.

It imports little: the watchdog of an embedded farm uses it before a script's first result.
"""

from __future__ import annotations

import os
import select
import signal
from collections.abc import Iterator
from contextlib import suppress
from functools import cache


def children_of(pid: int, proc: str = "/proc") -> list[int]:
    """List the children of a process, zombies included.

    The kernel's own list (CONFIG_PROC_CHILDREN) may lack some while others are ending: call it
    again after every end of a child. Without that list, it checks every process. The children of a
    process that /proc hides are unknown.
    """
    if not _has_lists(proc):
        return [child for child in all_pids(proc) if parent_of(child, proc) == pid]
    children: list[int] = []
    with suppress(FileNotFoundError, PermissionError, ProcessLookupError):  # ended, or hidden
        for thread in os.listdir(f"{proc}/{pid}/task"):
            with (
                suppress(FileNotFoundError, ProcessLookupError),  # this thread has ended
                open(f"{proc}/{pid}/task/{thread}/children", "rb") as file,
            ):
                children += map(int, file.read().split())
    return children


@cache
def _has_lists(proc: str) -> bool:
    """Whether the kernel lists the children of each thread, tested with this one."""
    return os.path.exists(f"{proc}/thread-self/children")


def all_pids(proc: str = "/proc") -> Iterator[int]:
    """Iterate over the processes that /proc shows."""
    return (int(name) for name in os.listdir(proc) if name.isdigit())


def parent_of(pid: int, proc: str = "/proc") -> int | None:
    """The parent of a process; None if the process does not exist."""
    stat = stat_of(pid, proc)
    return int(stat[1]) if stat else None


def stat_of(pid: int, proc: str = "/proc") -> list[bytes]:
    """The fields of ``/proc/PID/stat`` from the state on; empty if it cannot be read."""
    try:
        with open(f"{proc}/{pid}/stat", "rb") as file:
            # The name, in parentheses, may contain anything.
            return file.read().rpartition(b")")[2].split()
    except OSError:  # it has just ended
        return []


def is_readable(descriptor: int, within_s: float = 0.0) -> bool:
    """Whether a descriptor becomes readable in this time; a pidfd does when its process ends."""
    poller = select.poll()
    poller.register(descriptor, select.POLLIN)
    return bool(poller.poll(max(0.0, 1000 * within_s)))


def signal_group(group: int, number: int) -> None:
    """Send a signal to every member of a process group that exists and is ours."""
    # No such group: its members have ended. Not permitted: no member is ours.
    with suppress(ProcessLookupError, PermissionError):
        os.killpg(group, number)


def signal_name(number: int) -> str:
    """The name of a signal, such as SIGKILL; ``signal 40`` if it has none."""
    try:
        return signal.Signals(number).name
    except ValueError:
        return f"signal {number}"
