"""`OrphanReaper`: kills the processes that a dead forkserver leaves to the node, a subreaper.

When a forkserver is killed, the kernel kills its trial processes. All processes that they leave
behind become children of the node, in any session or group. Hence the rule: *a child that the node
did not start belonged to a dead forkserver*. The node kills it, its children become the node's in
turn, and the last look finds none.

Orphans that fork and exit without end are a race: a look repeats itself while it finds new ones,
for as long as the node's loop can wait, and with real-time priority if permitted.

Short-lived processes that the node runs, in any thread, share the node's process group. No orphan
does: a forkserver starts in another session or group.
"""

from __future__ import annotations

import logging
import os
import signal
import time
from collections.abc import Callable, Collection
from contextlib import suppress
from typing import Final

from tunemq_shared.system.processes import children_of, signal_group, stat_of
from tunemq_workers.processes import real_time
from tunemq_workers.runtime.reactor import Reactor

#: Shortest and longest pause between two looks: there is no event for a new orphan.
_PAUSES_S: Final = (0.002, 1.0)
#: For how long one look searches for new orphans, and then reaps those that it has killed.
_LOOK_S: Final = 0.05
#: The position of the number of threads in /proc/<pid>/stat, from the state on.
_THREADS: Final = 17
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
        #: Those of the last look.
        self._found = set[int]()
        self._immune: set[int] = set()

    def sweep(self, when_gone: Callable[[], object]) -> None:
        """Kill every orphan; call ``when_gone`` when none is left, never before this returns."""
        if not self._waiting:
            self._reactor.after(0.0, self._look)
        self._waiting.append(when_gone)
        self._quiet_looks, self._pause_s = 0, _PAUSES_S[0]

    def _look(self) -> None:
        orphans = self._kill_all()
        orphans -= self._reap(orphans)
        self._quiet_looks = 0 if orphans else self._quiet_looks + 1
        if self._quiet_looks >= _QUIET_LOOKS:
            gone, self._waiting = self._waiting, []
            self._immune.clear()
            for call in gone:
                call()
            return
        # Those of the last look need time to end; new ones may fork the next ones meanwhile.
        is_slow = bool(orphans) and orphans <= self._found
        self._pause_s = min(2 * self._pause_s, _PAUSES_S[1]) if is_slow else _PAUSES_S[0]
        self._found = orphans
        self._reactor.after(self._pause_s, self._look)

    def _kill_all(self) -> set[int]:
        """Kill all orphans, the youngest first, until no new one is found or time has passed."""
        found = set[int]()
        # A group is signalled once: it may have thousands of members.
        done = {None, os.getpgrp(), *map(_group_of, self._own)}
        deadline = time.monotonic() + _LOOK_S
        is_hurried = False
        try:
            while new := self._orphans_but(found):
                if not is_hurried:
                    is_hurried = True
                    real_time.take_priority()
                for pid in new:
                    self._kill(pid, done)
                found.update(new)
                if time.monotonic() > deadline:
                    break
        finally:
            if is_hurried:
                real_time.give_up_priority()
        return found

    def _orphans_but(self, found: Collection[int]) -> list[int]:
        """Return the orphans that are not among those found, the youngest first."""
        ours = {None, os.getpgrp()}
        return [
            pid
            for pid in reversed(children_of(os.getpid()))
            if pid not in found and pid not in self._own and _group_of(pid) not in ours
        ]

    def _kill(self, pid: int, done: set[int | None]) -> None:
        """Kill an orphan, and its group if that is not done."""
        # Its pid cannot be reused before it is reaped.
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
            if group is not None and group not in done:
                done.add(group)
                signal_group(group, signal.SIGKILL)

    @staticmethod
    def _reap(orphans: Collection[int]) -> set[int]:
        """Reap those that have ended, as many as time permits.

        Returns:
            Those that have ended and that only another process, which traces them, can reap. What
            they left was given to the node when they ended.
        """
        traced = set[int]()
        deadline = time.monotonic() + _LOOK_S
        for pid in orphans:
            with suppress(ChildProcessError):
                if os.waitpid(pid, os.WNOHANG)[0] == 0 and _is_zombie(pid):
                    traced.add(pid)
            if time.monotonic() > deadline:
                break
        return traced


def _is_zombie(pid: int) -> bool:
    """Whether all threads of a child have ended, although it is not reaped."""
    stat = stat_of(pid)
    return bool(stat) and stat[0] == b"Z" and int(stat[_THREADS]) == 1


def _group_of(pid: int) -> int | None:
    """Return the group of a process; None if it does not exist."""
    with suppress(ProcessLookupError):
        return os.getpgid(pid)
    return None
