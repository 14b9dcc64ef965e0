"""What the watchdog does to processes: starts them bound to its own life, and leaves none behind.

Imports only what costs no time: the watchdog is in every script's path to its first result.
"""

from __future__ import annotations

import os
import signal
import sys
import time
from collections.abc import Callable, Collection, Mapping, Sequence

from tunemq_shared.system import folder_trees
from tunemq_shared.system.process_control import die_with_parent
from tunemq_shared.system.processes import children_of, signal_name

#: How often in a row no child must be seen before there is none.
_QUIET_LOOKS = 3
#: No more than this counts as waiting between two looks: whom we killed may have stood still, too.
_LONGEST_GAP_S = 0.1
#: Attempts to remove a folder into which somebody may still write.
_REMOVALS = 5


def start(argv: Sequence[str], environ: Mapping[str, str], log: str) -> int:
    """Start a process in a session of its own that is killed when this one ends; returns its pid.

    Its standard input is ``/dev/null``; its output goes to the file ``log``, emptied first. Must be
    called by a thread that lives as long as the process does: PDEATHSIG follows the thread.
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
    """Take what has ended: pairs of pid and wait status."""
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
    """Kill and reap all children but ``spared``, and what is re-parented to us when they die.

    Gives up after ``within_s`` seconds, not counting those for which the machine stood still: what
    sleeps in the kernel cannot be killed.
    """
    waited, looked_at = 0.0, time.monotonic()
    pause = 0.0005
    quiet_looks = 0
    # The kernel's list may leave out a child when another one ends while it is read.
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
            time.sleep(pause)  # there is no event for "an orphan has arrived"
            pause = min(2 * pause, 0.01)


def how_it_ended(status: int) -> str:
    """A wait status in words."""
    code = os.waitstatus_to_exitcode(status)
    return f"exit code {code}" if code >= 0 else f"signal {-code} ({signal_name(-code)})"


def remove_tree(path: str) -> None:
    """Delete a folder and all in it; one that cannot be deleted is named on standard error."""
    for _ in range(_REMOVALS):
        folder_trees.remove_tree(path)
        if not os.path.lexists(path):
            return
    sys.stderr.write(f"left behind: {path}\n")
