"""Who belongs to a host, and how all of them are killed.

The forkserver is the hosts' parent and a subreaper; every host is a subreaper too. So what a
living host's descendants leave behind stays below that host, and when a host ends, everything
below it, whatever its session or group, becomes a child of the forkserver. Hence the rule: *a
child of the forkserver that is not a living host belonged to a dead one*. It is killed; its
children become the forkserver's in turn; the last round finds nobody. Only children that were not
waited for yet are signalled, so no pid can have been reused.

Families that fork without end are a race, and they may have left thousands of processes that have
ended and that their host did not wait for. So who lives is killed first, the youngest before all
others, who was told to end is not told again, and only when nobody new was seen is the rest done:
waiting for those that have ended, and asking who an orphan belonged to. A round in which anybody
ended is never the last. Where this process may, it
comes before all others meanwhile: an orphan that has just been forked is killed before it gets to
fork another.

One kind of orphan is left a moment: Python's resource tracker, which removes what a process has in
shared memory when that process, killed, cannot. What it does not remove takes the machine's memory
until that is started again. It ends by itself when all others of its family have ended.

A host is *gone* when none of its orphans is left. An orphan is its host's when its process group
or session is the host's, or the host's mark stands in its environment; one that shows neither
counts for every host that was dying when it turned up.
"""

from __future__ import annotations

import os
import signal
import sys
import time
from collections.abc import Container, Iterable
from contextlib import suppress
from types import FrameType
from typing import Final

from tunemq_shared.system.processes import children_of, signal_group, stat_of
from tunemq_workers.processes.forkserver_messages import (
    ForkserverReport,
    ForkserverWarned,
    ProcessExited,
    ProcessTreeGone,
)

#: A host's name stands in this variable of its environment, and of whatever it executes.
MARK: Final = "TUNEMQ_HOST"

#: The lowest of those that come before all that is scheduled as usual.
_PRIORITY: Final = 1

#: What stands on a resource tracker's command line, and how long it may take.
_TRACKER: Final = b"multiprocessing.resource_tracker"
_TRACKERS_GRACE_S: Final = 0.5
_PYTHON: Final = os.path.basename(sys.executable).encode()[:15]

#: Where a process's flags are in what the kernel shows of it, and the flag of a thread that ends.
_FLAGS: Final = 6
_EXITING: Final = 4

#: So many are waited for between two looks for somebody who lives, while there are such.
_A_FEW: Final = 64


def _is_exiting(pid: int) -> bool:
    """Whether a process has begun to end; it may have threads that have not ended."""
    stat = stat_of(pid)
    return not stat or bool(int(stat[_FLAGS]) & _EXITING)


def _mark_of(pid: int) -> str | None:
    try:
        with open(f"/proc/{pid}/environ", "rb") as file:
            variables = file.read().split(b"\0")
    except OSError:  # ended, or not ours to read
        return None
    prefix = MARK.encode() + b"="
    return next((v[len(prefix) :].decode() for v in variables if v.startswith(prefix)), None)


def _is_tracker(pid: int) -> bool:
    try:
        # A command line is in a process's memory, and who reads it waits for one that is forking
        # and has no processor. What just forks has the name of its trial.
        with open(f"/proc/{pid}/comm", "rb") as file:
            if file.read().rstrip(b"\n") != _PYTHON:
                return False
        with open(f"/proc/{pid}/cmdline", "rb") as file:
            return _TRACKER in file.read(4096)
    except OSError:  # ended, or not ours to read
        return False


class ProcessTrees:
    """The living hosts below this process, and the remains of dead ones.

    Args:
        own: children of this process that belong to nobody's family and are left alone.
    """

    def __init__(self, own: Iterable[int] = ()) -> None:
        self._own = set(own)
        self._pids: dict[str, int] = {}
        self._processes: dict[int, str] = {}
        self._dying: dict[str, int] = {}
        #: Who was told to end, or has ended, and was not waited for yet.
        self._told: set[int] = set()
        self._orphans: dict[int, frozenset[str]] = {}
        self._immune: set[int] = set()
        self._trackers: set[int] = set()
        #: Groups of dead hosts that trackers are members of.
        self._guarded: set[int] = set()
        self._trackers_deadline: float | None = None
        self._is_hurried = False

    def __bool__(self) -> bool:
        """Whether anything of any host is left."""
        return bool(self._pids or self._dying)

    def add(self, process: str, pid: int) -> None:
        """A host was forked."""
        self._pids[process] = pid
        self._processes[pid] = process

    def term(self, process: str) -> None:
        """Send SIGTERM to the host's process group, if it lives."""
        if (pid := self._pids.get(process)) is not None:
            signal_group(pid, signal.SIGTERM)

    def kill(self, process: str) -> None:
        """Kill the host, if it lives; `reap` does the rest of the family."""
        if (pid := self._pids.get(process)) is not None:
            self._hurry()
            os.kill(pid, signal.SIGKILL)

    def kill_all(self) -> None:
        """Kill every host."""
        for process in self._pids:
            self.kill(process)

    def reap(self) -> list[ForkserverReport]:
        """Take note of children that ended, kill what dead hosts left, and say what changed.

        To be called after every SIGCHLD: each killed orphan sends another until none is left.
        """
        reports: list[ForkserverReport] = []
        while (ended := _ended_child()) is not None or self._dying:
            if ended is None or ended.si_pid not in self._own:
                self._hurry()
            children = children_of(os.getpid())
            # Whoever left one of these has ended by now.
            dead = [pid for pid in self._processes if _has_ended(pid)]
            is_hunting = self._sweep(children, has_new_dead=bool(dead))
            for pid in dead:
                self._bury(pid, reports)
            buried = self._bury_others(_A_FEW if is_hunting else sys.maxsize, reports)
            # A child that ended after `children` was read may have left orphans that are not in it,
            # so only a round in which no child ended and nobody new was seen is the last.
            if not (is_hunting or dead or buried) and _ended_child() is None:
                break
        self._find_owners(reports)
        remaining = frozenset[str]().union(*self._orphans.values())
        for process in [process for process in self._dying if process not in remaining]:
            del self._dying[process]
            reports.append(ProcessTreeGone(process))
        if not self._trackers:
            self._trackers_deadline = None
        if not self._dying:
            self._guarded.clear()
        if not self._dying or self._orphans.keys() <= self._immune:  # nobody is left to kill
            self._calm_down()
        return reports

    def _hurry(self) -> None:
        """Come before every process that is scheduled as usual; not everybody may.

        A host that is forked meanwhile does not: see `leave_the_forkserver`.
        """
        if not self._is_hurried:
            self._is_hurried = True
            with suppress(OSError):
                os.sched_setscheduler(
                    0, os.SCHED_RR | os.SCHED_RESET_ON_FORK, os.sched_param(_PRIORITY)
                )

    def _calm_down(self) -> None:
        if self._is_hurried:
            self._is_hurried = False
            with suppress(OSError):
                os.sched_setscheduler(0, os.SCHED_OTHER | os.SCHED_RESET_ON_FORK, os.sched_param(0))

    def _bury_others(self, at_most: int, reports: list[ForkserverReport]) -> int:
        """Wait for children that have ended, up to a host: who that leaves is to be seen first.

        Returns for how many.
        """
        for buried in range(at_most):
            ended = _ended_child()
            if ended is None or ended.si_pid in self._processes:
                return buried
            self._bury(ended.si_pid, reports)
        return at_most

    def _bury(self, pid: int, reports: list[ForkserverReport]) -> None:
        """Wait for a child that has ended."""
        process = self._processes.pop(pid, None)
        if process is not None:
            # Until it is waited for, its pid, and so its group's, is nobody else's.
            self._kill_group(pid)
        ended = os.waitid(os.P_PID, pid, os.WEXITED)
        assert ended is not None  # that is for WNOHANG
        self._own.discard(pid)
        self._told.discard(pid)
        self._orphans.pop(pid, None)
        self._immune.discard(pid)
        self._trackers.discard(pid)
        if process is None:
            return
        del self._pids[process]
        self._dying[process] = pid
        status = ended.si_status
        if ended.si_code == os.CLD_EXITED:
            reports.append(ProcessExited(process, pid, None, status))
        else:
            reports.append(ProcessExited(process, pid, status, None))

    def _sweep(self, children: list[int], *, has_new_dead: bool) -> bool:
        """Kill each of the children that is no host, nor was told before, nor may clean up.

        Returns whether there was one. With ``has_new_dead`` there may be trackers among them that
        were not there before.
        """
        spared = {os.getpgrp(), *self._processes, *self._guarded}
        known = self._processes.keys() | self._own | self._trackers | (self._told - self._immune)
        has_found_any = False
        for pid in reversed(children):
            if pid in known:
                continue
            if _has_ended(pid):
                self._told.add(pid)
            elif has_new_dead and _is_tracker(pid):
                self._trackers.add(pid)
            elif self._kill(pid, spared):
                has_found_any = True
        self._kill_late_trackers(spared)
        return has_found_any

    def _kill(self, pid: int, spared: Container[int]) -> bool:
        """Kill a child, if that is allowed, and its group."""
        self._told.add(pid)
        try:
            os.kill(pid, signal.SIGKILL)
        except PermissionError:
            self._immune.add(pid)
            return False
        # Its group too: what it has just forked need not wait for the next round.
        if (group := os.getpgid(pid)) not in spared:
            signal_group(group, signal.SIGKILL)
        return True

    def _find_owners(self, reports: list[ForkserverReport]) -> None:
        """Ask of whom those are that were seen and have not ended."""
        for pid in (self._told | self._trackers) - self._orphans.keys():
            self._orphans[pid] = self._processes_of(pid)
            if pid in self._immune:
                self._say_immune(pid, reports)

    def _kill_group(self, process: int) -> None:
        """Kill a host's group; where somebody has to clean up it is killed one by one instead."""
        if process in map(os.getpgid, self._trackers):
            self._guarded.add(process)
        else:
            signal_group(process, signal.SIGKILL)

    def _kill_late_trackers(self, spared: Container[int]) -> None:
        """Kill the trackers that had their time."""
        if not self._trackers:
            return
        if self._trackers_deadline is None:
            self._trackers_deadline = time.monotonic() + _TRACKERS_GRACE_S
            # Wakes this process, should nobody end before.
            signal.signal(signal.SIGALRM, _only_wake)
            signal.setitimer(signal.ITIMER_REAL, 1.02 * _TRACKERS_GRACE_S)
        elif time.monotonic() > self._trackers_deadline:
            for pid in self._trackers:
                self._orphans.pop(pid, None)
                self._kill(pid, spared)
            self._trackers.clear()

    def _processes_of(self, orphan: int) -> frozenset[str]:
        """The dead hosts that this orphan may have come from."""
        # The orphans of a host with threads come a moment before it can be waited for.
        dead = self._dying | {
            process: pid for process, pid in self._pids.items() if _is_exiting(pid)
        }
        if len(dead) == 1:
            return frozenset(dead)
        leaders = {os.getpgid(orphan), os.getsid(orphan)}
        for process, pid in dead.items():
            if pid in leaders:
                return frozenset({process})
        mark = _mark_of(orphan)
        return frozenset({mark} if mark in dead else dead)

    def _say_immune(self, pid: int, reports: list[ForkserverReport]) -> None:
        processes = ", ".join(sorted(self._orphans[pid]))
        reports.append(
            ForkserverWarned(
                f"process {pid}, left by {processes}, runs as another user and cannot be killed; "
                "its slot stays taken until it ends."
            )
        )


def _only_wake(_signal: int, _frame: FrameType | None) -> None:
    """The signal's byte in the wakeup socket says all."""


def _ended_child() -> os.waitid_result | None:
    """A child that ended and was not waited for yet; it stays so."""
    try:
        return os.waitid(os.P_ALL, 0, os.WEXITED | os.WNOHANG | os.WNOWAIT)
    except ChildProcessError:
        return None


def _has_ended(child: int) -> bool:
    """Whether a child that was not waited for has ended; it stays so."""
    return os.waitid(os.P_PID, child, os.WEXITED | os.WNOHANG | os.WNOWAIT) is not None
