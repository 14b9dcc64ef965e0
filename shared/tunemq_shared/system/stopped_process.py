"""Notices child processes that are stopped: a trial of the same user can send SIGSTOP to them.

Such a process answers nothing and does not end, so whoever waits for it would wait for ever.
"""

from __future__ import annotations

import os
from typing import Final

from tunemq_shared.system.processes import stat_of

#: Between two looks at a process.
POLL_INTERVAL_S: Final = 5.0
#: A debugger may stop a process for one look.
_LOOKS: Final = 2
#: By a signal, and by a debugger.
_STATES: Final = frozenset({b"T", b"t"})


class StoppedProcessDetector:
    """Counts the looks in a row at which a process was stopped."""

    def __init__(self) -> None:
        self._looks = 0

    def look(self, pid: int) -> bool:
        """Whether the process was stopped at several looks, `POLL_INTERVAL_S` seconds apart."""
        self._looks = self._looks + 1 if _is_stopped(pid) else 0
        return self._looks >= _LOOKS


def _is_stopped(pid: int) -> bool:
    if stat := stat_of(pid):
        return stat[0] in _STATES
    return _is_stopped_child(pid)  # it has ended, or /proc hides it


def _is_stopped_child(pid: int) -> bool:
    """Whether a child of this process is stopped by a signal, as the kernel tells its parent."""
    try:
        stop = os.waitid(os.P_PID, pid, os.WSTOPPED | os.WNOHANG | os.WNOWAIT)
    except OSError:  # it has ended, or is no child
        return False
    return stop is not None
