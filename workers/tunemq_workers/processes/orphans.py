"""`OrphanReaper`: kills the processes that a dead forkserver leaves to the node, a subreaper.

When a forkserver is killed, the kernel kills its trial processes. All processes that they leave
behind become children of the node, in any session or group. Hence the rule: *a child that the node
did not start belonged to a dead forkserver*. The node kills it, its children become the node's in
turn, and the last look finds none.

Short-lived processes that the node runs, in any thread, share the node's process group. No orphan
does: a forkserver starts in another session or group.
"""

from __future__ import annotations

import logging
import os
import signal
from collections.abc import Callable, Collection
from contextlib import suppress
from typing import Final

from tunemq_shared.system.processes import children_of, signal_group
from tunemq_workers.runtime.reactor import Reactor

#: Shortest and longest pause between two looks: there is no event for a new orphan.
_PAUSES_S: Final = (0.002, 1.0)
#: Looks in a row that must find no orphan: the kernel's list may miss one while another process
#: ends.
_QUIET_LOOKS: Final = 3

_log = logging.getLogger(__name__)


class OrphanReaper:
    """Kills and reaps children that the node did not start. Used by the node's loop only.

    Args:
        reactor: for pauses between looks.
        own: the pids of the child processes that the node started; their starters keep it up to
            date.
    """

    def __init__(self, reactor: Reactor, own: Collection[int]) -> None:
        self._reactor, self._own = reactor, own
        self._waiting: list[Callable[[], object]] = []
        self._quiet_looks = 0
        self._pause_s = _PAUSES_S[0]
        self._immune: set[int] = set()

    def sweep(self, when_gone: Callable[[], object]) -> None:
        """Kill every orphan; call ``when_gone`` when none is left, never before this returns."""
        if not self._waiting:
            self._reactor.after(0.0, self._look)
        self._waiting.append(when_gone)
        self._quiet_looks, self._pause_s = 0, _PAUSES_S[0]

    def _look(self) -> None:
        others = (pid for pid in children_of(os.getpid()) if pid not in self._own)
        orphans = [pid for pid in others if _group_of(pid) not in {None, os.getpgrp()}]
        for pid in orphans:
            self._end(pid)
        self._quiet_looks = 0 if orphans else self._quiet_looks + 1
        if self._quiet_looks >= _QUIET_LOOKS:
            gone, self._waiting = self._waiting, []
            self._immune.clear()
            for call in gone:
                call()
            return
        self._reactor.after(self._pause_s, self._look)
        if orphans:
            self._pause_s = min(2 * self._pause_s, _PAUSES_S[1])

    def _end(self, pid: int) -> None:
        """Kill an orphan and its group, and reap it if it has ended."""
        # Its pid cannot be reused before it is reaped.
        spared = {os.getpgrp(), *map(_group_of, self._own)}
        group = _group_of(pid)
        try:
            os.kill(pid, signal.SIGKILL)
        except PermissionError:  # it runs as another user
            if pid not in self._immune:
                self._immune.add(pid)
                _log.error("orphan.immune pid=%d", pid)
        except ProcessLookupError:  # another thread has reaped it
            return
        else:
            if group is not None and group not in spared:
                signal_group(group, signal.SIGKILL)
        with suppress(ChildProcessError):
            os.waitpid(pid, os.WNOHANG)


def _group_of(pid: int) -> int | None:
    """Return the group of a process; None if it does not exist."""
    with suppress(ProcessLookupError):
        return os.getpgid(pid)
    return None
