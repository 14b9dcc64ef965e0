"""Detect stopped child processes: a trial of the same user can send SIGSTOP to them.

A stopped process answers nothing and does not end, so that its parent could wait for ever.
"""

from __future__ import annotations

import os
from typing import Final

from tunemq_shared.system.processes import stat_of

#: Seconds between two checks of a process.
POLL_INTERVAL_S: Final = 5.0
#: How many checks in a row must agree: a debugger may stop a process briefly.
_LOOKS: Final = 2
#: States of a process that a signal or a debugger stopped.
_STATES: Final = frozenset({b"T", b"t"})


class StoppedProcessDetector:
    """Counts consecutive checks at which a process was stopped."""

    def __init__(self) -> None:
        self._looks = 0

    def look(self, pid: int) -> bool:
        """Check the process; True if several checks, `POLL_INTERVAL_S` seconds apart, agree."""
        self._looks = self._looks + 1 if _is_stopped(pid) else 0
        return self._looks >= _LOOKS


def _is_stopped(pid: int) -> bool:
    if stat := stat_of(pid):
        return stat[0] in _STATES
    return _is_stopped_child(pid)  # it has ended, or /proc hides it


def _is_stopped_child(pid: int) -> bool:
    """Whether a signal stopped a child of this process, by the kernel's report to its parent."""
    try:
        stop = os.waitid(os.P_PID, pid, os.WSTOPPED | os.WNOHANG | os.WNOWAIT)
    except OSError:  # it has ended, or is no child
        return False
    return stop is not None
