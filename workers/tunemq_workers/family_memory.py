"""What the processes of a trial hold in memory."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Final

from tunemq_workers.family import children_of

#: Pages that only exist in memory: a mapped file's can be dropped at any time.
_HELD: Final = frozenset({b"RssAnon:", b"RssShmem:", b"VmSwap:"})
_SHARE: Final = frozenset({b"Pss_Anon:", b"Pss_Shmem:", b"SwapPss:"})


def family_bytes(pid: int, limit: int) -> int:
    """What a host and all below it hold together, in bytes; those that have ended hold nothing.

    A sum in which pages count for each process that has them is quickly found, and enough while it
    is not above ``limit``. Else each process counts its share of those pages, which takes the
    kernel a while.
    """
    family = _family_of(pid)
    held = sum(_held(one) for one in family)
    return held if held <= limit else sum(_share(one) for one in family)


def _family_of(pid: int) -> list[int]:
    """A process and all below it: hosts adopt what their descendants leave behind."""
    family = [pid]
    for one in family:  # it grows meanwhile
        family += _or_nothing(children_of, one)
    return family


def _or_nothing(look: Callable[[int], Iterable[int]], pid: int) -> Iterable[int]:
    try:
        return look(pid)
    except OSError:  # it has just ended
        return ()


def _held(pid: int) -> int:
    return _sum_of(f"/proc/{pid}/status", _HELD)


def _share(pid: int) -> int:
    try:
        return _sum_of(f"/proc/{pid}/smaps_rollup", _SHARE, is_needed=True)
    except OSError:  # it runs as somebody else, or has just ended
        return _held(pid)


def _sum_of(path: str, names: frozenset[bytes], *, is_needed: bool = False) -> int:
    """The sum of some lines of a file of the kernel's that gives KiB, in bytes."""
    try:
        with open(path, "rb") as file:
            lines = [line.split() for line in file]
    except OSError:
        if is_needed:
            raise
        return 0
    return 1024 * sum(int(line[1]) for line in lines if line and line[0] in names)
