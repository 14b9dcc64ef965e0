"""Process functions of the watchdog: start bound processes, and leave none behind.

Imports only fast modules, because each script waits for the watchdog before its first result.
"""

from __future__ import annotations

import os
import signal
import sys
import time
from collections.abc import Callable, Collection, Mapping, Sequence

from tunemq_shared.system import folder_trees
from tunemq_shared.system.process_attributes import die_with_parent
from tunemq_shared.system.processes import children_of, signal_name

#: The number of checks in a row without a child after which there is none.
_QUIET_LOOKS = 3
#: The most seconds counted between two checks, since the machine may have been suspended.
_LONGEST_GAP_S = 0.1
#: Attempts to remove a folder into which another process may still write.
_REMOVALS = 5


def start(argv: Sequence[str], environ: Mapping[str, str], log: str) -> int:
    """Start a process in a new session that is killed when this one ends; return its pid.

    Its standard input is ``/dev/null``; its output goes to the file ``log``, which is emptied
    first. Call it in a thread that lives as long as the process: PDEATHSIG follows the thread.
    """
    parent = os.getpid()
    pid = os.fork()
    if pid:
        return pid
    try:
        _turn_into(argv, environ, log, parent)
    except BaseException as error:  # noqa: BLE001  nothing may return into the watchdog's code; written to the process's log
        os.write(2, f"cannot start {argv[0]}: {error}\n".encode())
    os._exit(127)


def _turn_into(argv: Sequence[str], environ: Mapping[str, str], log: str, parent: int) -> None:
    for number in range(1, signal.SIGSYS + 1):
        if number not in {signal.SIGKILL, signal.SIGSTOP}:
            signal.signal(number, signal.SIG_DFL)
    nothing = os.open(os.devnull, os.O_RDONLY)
    output = os.open(log, os.O_WRONLY | os.O_CREAT | os.O_TRUNC | os.O_APPEND, 0o600)
    os.dup2(nothing, 0)
    os.dup2(output, 1)
    os.dup2(output, 2)
    os.setsid()
    die_with_parent(parent)
    os.execve(argv[0], list(argv), dict(environ))  # noqa: S606  no shell is wanted


def reap() -> list[tuple[int, int]]:
    """Reap ended children; return pairs of pid and wait status."""
    ended: list[tuple[int, int]] = []
    while True:
        try:
            pid, status = os.waitpid(-1, os.WNOHANG)
        except ChildProcessError:
            return ended
        if not pid:
            return ended
        ended.append((pid, status))


def kill_children(
    spared: Collection[int], within_s: float, on_end: Callable[[int, int], None] | None = None
) -> None:
    """Kill and reap all children except ``spared``, and their orphans, which are re-parented.

    Gives up after ``within_s`` seconds, without those for which the machine was suspended: a
    process in an uninterruptible sleep cannot be killed.
    """
    waited, looked_at = 0.0, time.monotonic()
    pause = 0.0005
    quiet_looks = 0
    # The kernel's list may omit a child when another one ends during the read.
    while quiet_looks < _QUIET_LOOKS:
        targets = set(children_of(os.getpid())).difference(spared)
        for pid in targets:
            os.kill(pid, signal.SIGKILL)
        ended = reap()
        for pid, status in ended:
            if on_end is not None:
                on_end(pid, status)
        quiet_looks = 0 if targets or ended else quiet_looks + 1
        now = time.monotonic()
        waited, looked_at = waited + min(now - looked_at, _LONGEST_GAP_S), now
        if targets and not ended:
            if waited > within_s:
                return
            time.sleep(pause)  # no event announces an orphan
            pause = min(2 * pause, 0.01)


def how_it_ended(status: int) -> str:
    """Describe a wait status."""
    code = os.waitstatus_to_exitcode(status)
    return f"exit code {code}" if code >= 0 else f"signal {-code} ({signal_name(-code)})"


def remove_tree(path: str) -> None:
    """Delete a folder; print one that cannot be deleted to standard error."""
    for _ in range(_REMOVALS):
        folder_trees.remove_tree(path)
        if not os.path.lexists(path):
            return
    sys.stderr.write(f"left behind: {path}\n")
