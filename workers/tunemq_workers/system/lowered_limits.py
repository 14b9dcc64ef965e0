"""`lowered_limits`: which limits and priorities of a process are below this one's.

A process may change those of another one of the same user (prlimit(2), setpriority(2),
sched_setscheduler(2)), also where it may not trace it.
"""

from __future__ import annotations

import math
import os
import re
from contextlib import suppress
from typing import Final

#: A line of ``/proc/PID/limits``: name, soft limit, hard limit, unit.
_LINE: Final = re.compile(r"(\S.*?)\s{2,}(unlimited|\d+)\s+(unlimited|\d+)\b")
#: A process that holds secrets lowers it itself.
_CORE: Final = "Max core file size"


def lowered_limits(pid: int) -> list[str]:
    """Return the names of limits, soft or hard, that are lower for ``pid`` than for this process.

    Core dumps do not count. A process that is gone has none.
    """
    ours, theirs = _limits_of(os.getpid()), _limits_of(pid)
    names = [
        name
        for name, limits in theirs.items()
        if any(one < own for one, own in zip(limits, ours[name], strict=True))
    ]
    with suppress(ProcessLookupError):
        policies = os.sched_getscheduler(0), os.sched_getscheduler(pid)
        if policies[1] == os.SCHED_IDLE != policies[0]:
            names.append("scheduling policy")
        if os.getpriority(os.PRIO_PROCESS, pid) > os.getpriority(os.PRIO_PROCESS, 0):
            names.append("nice value")
    return names


def _limits_of(pid: int) -> dict[str, tuple[float, float]]:
    try:
        with open(f"/proc/{pid}/limits", encoding="ascii") as file:
            lines = [_LINE.match(line) for line in file]
    except OSError:  # it has ended, or /proc hides it
        return {}
    limits = {line[1]: (_number(line[2]), _number(line[3])) for line in lines if line}
    limits.pop(_CORE, None)
    return limits


def _number(text: str) -> float:
    return math.inf if text == "unlimited" else int(text)
