"""`OrphanReaper`: kills the processes that a dead forkserver leaves to the node, a subreaper.

When a forkserver is killed, the kernel kills its trial processes. All processes that they leave
behind become children of the node, in any session or group. Hence the rule: *a child that the node
did not start belonged to a dead forkserver*. The node kills it, its children become the node's in
turn, and the last look finds none, or only *stuck* ones that do not end: see
`tunemq_workers.processes.killed_trees`. These are reaped when they end after all.

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

from tunemq_shared.system.processes import children_of, signal_group
from tunemq_workers.processes import real_time
from tunemq_workers.processes.killed_trees import KilledTree, is_zombie, stuck_text
from tunemq_workers.runtime.reactor import Reactor, Timer, cancel

#: Shortest and longest pause between two looks: there is no event for a new orphan.
_PAUSES_S: Final = (0.002, 1.0)
#: For how long one look searches for new orphans, and then reaps those that it has killed.
_LOOK_S: Final = 0.05
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
        self._waiting: list[Callable[[Collection[int]], object]] = []
        self._next: Timer | None = None
        self._quiet_looks = 0
        self._pause_s = _PAUSES_S[0]
        #: Those of the last look.
        self._found = set[int]()
        self._immune: set[int] = set()
        self._tree = KilledTree()
        #: Orphans that nothing waits for any more.
        self._stuck: set[int] = set()

    def sweep(self, when_gone: Callable[[Collection[int]], object]) -> None:
        """Kill every orphan; call ``when_gone`` when none is left, never before this returns.

        Its argument are those that do not end, usually none.
        """
        self._waiting.append(when_gone)
        self._quiet_looks, self._pause_s = 0, _PAUSES_S[0]
        cancel(self._next)
        self._next = self._reactor.after(0.0, self._look)

    def kill_now(self, within_s: float) -> None:
        """Kill all orphans at the node's end, and return when none is left, or after some time."""
        deadline = time.monotonic() + within_s
        while (orphans := self._kill_all()) - self._reap(orphans) and time.monotonic() < deadline:
            time.sleep(_PAUSES_S[0])  # they need time to end

    def _look(self) -> None:
        self._next = None
        orphans = self._kill_all()
        orphans -= self._reap(orphans)
        self._stuck &= orphans
        orphans -= self._stuck
        self._quiet_looks = 0 if orphans else self._quiet_looks + 1
        is_over = self._quiet_looks >= _QUIET_LOOKS
        if is_over:
            self._immune.clear()
            self._say_gone(())
        elif orphans and self._tree.is_stuck(orphans) and self._immune.isdisjoint(orphans):
            self._stuck |= orphans
            self._say_gone(orphans | self._tree.living)
        # Those of the last look need time to end; new ones may fork the next ones meanwhile.
        is_slow = is_over or (bool(orphans) and orphans == self._found)
        self._pause_s = min(2 * self._pause_s, _PAUSES_S[1]) if is_slow else _PAUSES_S[0]
        self._found = orphans
        if self._next is None and (self._stuck or not is_over):
            self._next = self._reactor.after(self._pause_s, self._look)

    def _say_gone(self, stuck: Collection[int]) -> None:
        if stuck:
            _log.warning("orphans.stuck text=%r", stuck_text(stuck))
        gone, self._waiting = self._waiting, []
        for call in gone:
            call(stuck)

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
                if os.waitpid(pid, os.WNOHANG)[0] == 0 and is_zombie(pid):
                    traced.add(pid)
            if time.monotonic() > deadline:
                break
        return traced


def _group_of(pid: int) -> int | None:
    """Return the group of a process; None if it does not exist."""
    with suppress(ProcessLookupError):
        return os.getpgid(pid)
    return None
