"""`ProcessTrees`: tracks the process trees of trials in a forkserver, and kills them.

The forkserver is the parent of the trial processes and a subreaper; every trial process is a
subreaper, too. So orphans below a living trial process stay below it. When it ends, everything
below it, in any session or group, becomes a child of the forkserver. Hence the rule: *a child of
the forkserver that is not a living trial process belonged to a dead one*. The forkserver kills it,
its children become the forkserver's in turn, and the last round finds none. It signals only
children that it has not reaped, so no pid can have been reused.

A process tree that forks without end is a race, and it may include thousands of ended processes
that were never reaped. So each round first kills the living, the youngest first, and signals no
process twice. Only when it finds no new process does it do the rest: reap ended processes, and find
the trial that each orphan belonged to. A round in which a process ended is never the last. If
permitted, the forkserver has real-time priority meanwhile: it kills a new orphan before that can
fork another.

One kind of orphan is spared for a moment: Python's resource tracker, which removes the shared
memory of killed processes. Otherwise that memory would stay in use until the machine restarts. The
tracker ends by itself when all others of its process tree have ended.

A process tree is *gone* when none of its orphans is left, or *stuck* if killed processes do not
end: see `tunemq_workers.processes.killed_trees`. An orphan belongs to a trial process if its
process group or session does, or if its environment names the trial process. An orphan without
either counts for every trial process that was dying when it appeared.
"""

from __future__ import annotations

import os
import signal
import sys
import time
from collections.abc import Container, Iterable
from typing import Final

from tunemq_shared.system.processes import children_of, signal_group, stat_of
from tunemq_workers.processes import forkserver_messages as messages
from tunemq_workers.processes import real_time
from tunemq_workers.processes.killed_trees import MAX_NAMED, KilledTree

#: The environment variable with a trial process's name, inherited by all that it executes.
MARK: Final = "TUNEMQ_HOST"

#: Part of a resource tracker's command line, and how long one may take to end.
_TRACKER: Final = b"multiprocessing.resource_tracker"
_TRACKERS_GRACE_S: Final = 1.0
_PYTHON: Final = os.path.basename(sys.executable).encode()[:15]

#: The position of the flags in /proc/<pid>/stat, and the flag of a thread that is ending.
_FLAGS: Final = 6
_EXITING: Final = 4

#: The most processes that are reaped between two looks, while living ones may be found.
_A_FEW: Final = 64


def _is_exiting(pid: int) -> bool:
    """Return whether a process has begun to end; some of its threads may still run."""
    stat = stat_of(pid)
    return not stat or bool(int(stat[_FLAGS]) & _EXITING)


def _mark_of(pid: int) -> str | None:
    try:
        with open(f"/proc/{pid}/environ", "rb") as file:
            variables = file.read().split(b"\0")
    except OSError:  # ended, or not ours to read
        return None
    prefix = MARK.encode() + b"="
    found = next((v for v in variables if v.startswith(prefix)), None)
    # A trial can give its processes any bytes.
    return None if found is None else found[len(prefix) :].decode(errors="replace")


def _is_tracker(pid: int) -> bool:
    try:
        # Reading a command line waits for the process's memory lock, which a forking process
        # without a processor may hold for long. A process that just forks has its trial's name, so
        # check that first.
        with open(f"/proc/{pid}/comm", "rb") as file:
            if file.read().rstrip(b"\n") != _PYTHON:
                return False
        with open(f"/proc/{pid}/cmdline", "rb") as file:
            return _TRACKER in file.read(4096)
    except OSError:  # ended, or not ours to read
        return False


class ProcessTrees:
    """The living trial processes below this process, and the orphans of dead ones.

    Args:
        own: children of this process that are not trials' and are left alone.
    """

    def __init__(self, own: Iterable[int] = ()) -> None:
        self._own = set(own)
        self._pids: dict[str, int] = {}
        self._processes: dict[int, str] = {}
        self._dying: dict[str, int] = {}
        #: Those that were killed, or have ended, until they are gone or stuck.
        self._killed: dict[str, KilledTree] = {}
        #: Processes that were killed, or have ended, and are not reaped yet.
        self._told: set[int] = set()
        self._orphans: dict[int, frozenset[str]] = {}
        self._immune: set[int] = set()
        self._trackers: set[int] = set()
        #: Groups of dead trial processes that trackers are members of.
        self._guarded: set[int] = set()
        self._trackers_deadline: float | None = None
        self._is_hurried = False

    def __bool__(self) -> bool:
        """Return whether anything of any process tree is left."""
        return bool(self._pids or self._dying)

    def add(self, process: str, pid: int) -> None:
        """Add a trial process that was forked."""
        self._pids[process] = pid
        self._processes[pid] = process

    @property
    def is_waiting(self) -> bool:
        """Whether `reap` has to be called several times a second, also without a SIGCHLD."""
        return bool(self._killed)

    def term(self, process: str) -> None:
        """Send SIGTERM to the process group of a trial process, if it lives."""
        if (pid := self._pids.get(process)) is not None:
            signal_group(pid, signal.SIGTERM)

    def kill(self, process: str) -> None:
        """Kill a trial process, if it lives; `reap` kills the rest of its process tree."""
        if (pid := self._pids.get(process)) is not None:
            self._hurry()
            os.kill(pid, signal.SIGKILL)
            self._killed.setdefault(process, KilledTree())

    def kill_all(self) -> None:
        """Kill every trial process."""
        for process in self._pids:
            self.kill(process)

    def reap(self) -> list[messages.ForkserverReport]:
        """Reap ended children, kill orphans of dead trial processes, and return reports of changes.

        Call it after every SIGCHLD: each killed orphan causes another SIGCHLD until none is left;
        and see `is_waiting`.
        """
        reports: list[messages.ForkserverReport] = []
        while (ended := _ended_child()) is not None or self._dying:
            if ended is None or ended.si_pid not in self._own:
                self._hurry()
            children = children_of(os.getpid())
            # The parent of any orphan in this list has ended by now.
            dead = [pid for pid in self._processes if _has_ended(pid)]
            is_hunting = self._sweep(children, has_new_dead=bool(dead))
            for pid in dead:
                self._bury(pid, reports)
            buried = self._bury_others(_A_FEW if is_hunting else sys.maxsize, reports)
            # A child that ended after `children` was read may have left orphans that are not in it,
            # so only a round in which no child ended and no new one was found is the last.
            if not (is_hunting or dead or buried) and _ended_child() is None:
                break
        self._find_owners(reports)
        remaining = frozenset[str]().union(*self._orphans.values())
        for process in [process for process in self._dying if process not in remaining]:
            del self._dying[process], self._killed[process]
            reports.append(messages.ProcessTreeGone(process))
        for process in list(self._killed):
            self._give_up_if_stuck(process, reports)
        if not self._trackers:
            self._trackers_deadline = None
        if not self._dying:
            self._guarded.clear()
        if not self._dying or self._orphans.keys() <= self._immune:  # none left to kill
            self._calm_down()
        return reports

    def _hurry(self) -> None:
        """Take real-time priority, if permitted.

        A trial process that is forked meanwhile does not inherit it: see `leave_the_forkserver`.
        """
        if not self._is_hurried:
            self._is_hurried = True
            real_time.take_priority()

    def _calm_down(self) -> None:
        if self._is_hurried:
            self._is_hurried = False
            real_time.give_up_priority()

    def _bury_others(self, at_most: int, reports: list[messages.ForkserverReport]) -> int:
        """Reap ended children up to a trial process, whose orphans have to be found first.

        Returns:
            How many were reaped.
        """
        for buried in range(at_most):
            ended = _ended_child()
            if ended is None or ended.si_pid in self._processes:
                return buried
            self._bury(ended.si_pid, reports)
        return at_most

    def _bury(self, pid: int, reports: list[messages.ForkserverReport]) -> None:
        """Reap a child that has ended."""
        process = self._processes.pop(pid, None)
        if process is not None:
            # Its pid and group id cannot be reused before it is reaped.
            self._kill_group(pid)
        ended = os.waitid(os.P_PID, pid, os.WEXITED)
        assert ended is not None  # None is possible only with WNOHANG
        self._own.discard(pid)
        self._told.discard(pid)
        self._orphans.pop(pid, None)
        self._immune.discard(pid)
        self._trackers.discard(pid)
        if process is None:
            return
        del self._pids[process]
        self._dying[process] = pid
        self._killed.setdefault(process, KilledTree())
        status = ended.si_status
        if ended.si_code == os.CLD_EXITED:
            reports.append(messages.ProcessExited(process, pid, None, status))
        else:
            reports.append(messages.ProcessExited(process, pid, status, None))

    def _sweep(self, children: list[int], *, has_new_dead: bool) -> bool:
        """Kill each new child that is neither a trial process nor a resource tracker.

        Returns whether there was one. With ``has_new_dead`` there may be new trackers among them.
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
        """Kill a child and its group, if that is permitted."""
        self._told.add(pid)
        try:
            os.kill(pid, signal.SIGKILL)
        except PermissionError:
            self._immune.add(pid)
            return False
        # The group dies too: its newest processes need not wait for the next round.
        if (group := os.getpgid(pid)) not in spared:
            signal_group(group, signal.SIGKILL)
        return True

    def _find_owners(self, reports: list[messages.ForkserverReport]) -> None:
        """Find the trial processes to which the remaining orphans belong."""
        for pid in (self._told | self._trackers) - self._orphans.keys():
            self._orphans[pid] = self._processes_of(pid)
            if pid in self._immune:
                processes = ", ".join(sorted(self._orphans[pid]))
                text = f"process {pid}, left by {processes}, runs as another user and cannot be"
                ends = "killed; its slot stays taken until it ends."
                reports.append(messages.ForkserverWarned(f"{text} {ends}"))

    def _give_up_if_stuck(self, process: str, reports: list[messages.ForkserverReport]) -> None:
        """Report a killed process tree that does not end, and forget its processes' owners."""
        pid = self._pids.get(process)
        left = [pid] if pid else [one for one, owners in self._orphans.items() if process in owners]
        tree = self._killed[process]
        if not tree.is_stuck(left) or not self._immune.isdisjoint(left):
            return
        named = tuple(sorted({*left, *tree.living})[:MAX_NAMED])
        reports.append(messages.ProcessTreeStuck(process, pid is None, named))
        del self._killed[process]
        self._dying.pop(process, None)
        if pid:
            del self._pids[process], self._processes[pid]
            self._told.add(pid)
        for one in left:
            self._orphans[one] = self._orphans.get(one, frozenset()) - {process}

    def _kill_group(self, process: int) -> None:
        """Kill a trial process's group; if a tracker is in it, leave that to `_sweep`."""
        if process in map(os.getpgid, self._trackers):
            self._guarded.add(process)
        else:
            signal_group(process, signal.SIGKILL)

    def _kill_late_trackers(self, spared: Container[int]) -> None:
        """Kill the trackers whose time has passed."""
        if not self._trackers:
            return
        if self._trackers_deadline is None:
            self._trackers_deadline = time.monotonic() + _TRACKERS_GRACE_S
        elif time.monotonic() > self._trackers_deadline:
            for pid in self._trackers:
                self._orphans.pop(pid, None)
                self._kill(pid, spared)
            self._trackers.clear()

    def _processes_of(self, orphan: int) -> frozenset[str]:
        """Return the dead trial processes that an orphan may belong to."""
        # The orphans of a process with threads may appear a moment before it can be reaped.
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


def _ended_child() -> os.waitid_result | None:
    """Return a child that ended and is not reaped yet, without reaping it."""
    try:
        return os.waitid(os.P_ALL, 0, os.WEXITED | os.WNOHANG | os.WNOWAIT)
    except ChildProcessError:
        return None


def _has_ended(child: int) -> bool:
    """Return whether a child that is not reaped yet has ended, without reaping it."""
    return os.waitid(os.P_PID, child, os.WEXITED | os.WNOHANG | os.WNOWAIT) is not None
