"""What a forkserver that was killed leaves to the node, its next subreaper.

Its hosts die with it, by the kernel's hand, and all that they and it leave behind becomes children
of the node, whatever its session or group. Hence the node's rule: *a child that is not the node's
own belonged to a dead forkserver*. It is killed; its children become the node's in turn; the last
look finds nobody.

What the node runs for a moment, in any thread, shares the process group of the node.
No orphan does: a forkserver has a session or a group of its own.
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

#: Between two looks; there is no event for "an orphan has arrived".
_PAUSES_S: Final = (0.002, 1.0)
#: How often in a row no orphan must be seen before there is none: the kernel's list may leave one
#: out while another process ends.
_QUIET_LOOKS: Final = 3

_log = logging.getLogger(__name__)


class OrphanReaper:
    """Kills and reaps children that are not the node's own. Owned by the node's loop.

    Args:
        reactor: for pauses between looks.
        own: the pids of the node's own children, kept up to date by those who start them.
    """

    def __init__(self, reactor: Reactor, own: Collection[int]) -> None:
        self._reactor, self._own = reactor, own
        self._waiting: list[Callable[[], None]] = []
        self._quiet_looks = 0
        self._pause_s = _PAUSES_S[0]
        self._immune: set[int] = set()

    def sweep(self, when_gone: Callable[[], None]) -> None:
        """Kill every orphan, and call ``when_gone`` when none is left; never at once."""
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
        """Kill an orphan and its group, and wait for it if it has ended."""
        # Until it is waited for, its pid is nobody else's.
        spared = {os.getpgrp(), *map(_group_of, self._own)}
        group = _group_of(pid)
        try:
            os.kill(pid, signal.SIGKILL)
        except PermissionError:  # it runs as another user
            if pid not in self._immune:
                self._immune.add(pid)
                _log.error("orphan.immune pid=%d", pid)
        except ProcessLookupError:  # another thread has waited for it
            return
        else:
            if group is not None and group not in spared:
                signal_group(group, signal.SIGKILL)
        with suppress(ChildProcessError):
            os.waitpid(pid, os.WNOHANG)


def _group_of(pid: int) -> int | None:
    """The group of a process; None if it is not there."""
    with suppress(ProcessLookupError):
        return os.getpgid(pid)
    return None
