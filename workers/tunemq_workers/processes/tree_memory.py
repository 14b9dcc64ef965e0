"""Measures the memory of a trial's process tree."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterable
from typing import Final

from tunemq_shared.system.processes import children_of

#: Pages that exist in memory only: those of a mapped file can be dropped at any time.
_HELD: Final = frozenset({b"RssAnon:", b"RssShmem:", b"VmSwap:"})
_SHARE: Final = frozenset({b"Pss_Anon:", b"Pss_Shmem:", b"SwapPss:"})


def tree_bytes(tree: Iterable[int], limit: int) -> int:
    """Return the bytes that these processes hold together; those that have ended hold nothing.

    A quick sum counts shared pages once per process. If that exceeds ``limit``, each process counts
    its share of those pages, which takes the kernel longer.
    """
    held = sum(_held(one) for one in tree)
    return held if held <= limit else sum(_share(one) for one in tree)


def process_tree_of(pid: int) -> list[int]:
    """Return a trial process and all below it; it is the subreaper of its descendants."""
    tree = [pid]
    for one in tree:  # it grows meanwhile
        tree += _or_nothing(children_of, one)
    return tree


def _or_nothing(look: Callable[[int], Iterable[int]], pid: int) -> Iterable[int]:
    try:
        return look(pid)
    except OSError:  # it has just ended
        return ()


def _held(pid: int) -> int:
    if held := _sum_of(f"/proc/{pid}/status", _HELD):
        return held
    # If its main thread has ended, the process shows no memory under its pid; its threads show all.
    threads = _or_nothing(_threads_of, pid)
    return max((_sum_of(f"/proc/{thread}/status", _HELD) for thread in threads), default=0)


def _threads_of(pid: int) -> list[int]:
    return [int(thread) for thread in os.listdir(f"/proc/{pid}/task")]


def _share(pid: int) -> int:
    for thread in (pid, *_or_nothing(_threads_of, pid)):
        try:
            return _sum_of(f"/proc/{thread}/smaps_rollup", _SHARE, is_needed=True)
        except OSError:  # this thread has ended, or runs as another user
            continue
    return _held(pid)


def _sum_of(path: str, names: frozenset[bytes], *, is_needed: bool = False) -> int:
    """Return the sum of some lines of a /proc file with values in KiB, in bytes."""
    try:
        with open(path, "rb") as file:
            lines = [line.split() for line in file]
    except OSError:
        if is_needed:
            raise
        return 0
    return 1024 * sum(int(line[1]) for line in lines if line and line[0] in names)
