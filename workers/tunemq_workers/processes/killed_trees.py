"""`KilledTree`: ends a process tree that was killed, and says when to wait for it no longer.

SIGKILL does not end a process that waits in the kernel for a file system that does not answer, nor
the first process of a pid namespace while others of it wait so. All below it live on meanwhile, so
looks kill these, too. Once `_LOOKS` in a row have found nothing new, the tree is *stuck*: the slot
of its trial is used again, and a warning names the processes.

States of processes do not count: one that frees the memory of a large trial shows the same ones.
Looks are counted instead of seconds: a busy machine, or one that stood still, may need more time.
"""

from __future__ import annotations

import signal
import time
from collections.abc import Collection, Iterable
from contextlib import suppress
from os import close
from typing import Final

from tunemq_shared.system.claimed_process import ProcessMismatch, open_claimed
from tunemq_shared.system.processes import children_of, stat_of

#: The time between two looks, and how many must find nothing new.
_LOOK_S: Final = 1.0
_LOOKS: Final = 20
#: The position of the number of threads in /proc/<pid>/stat, from the state on.
_THREADS: Final = 17
#: The most processes that a warning names.
MAX_NAMED: Final = 10


class KilledTree:
    """The processes of a killed tree that have not ended yet, as far as looks have found them."""

    def __init__(self) -> None:
        #: The living processes of the last look.
        self.living = set[int]()
        self._quiet_looks, self._due = 0, time.monotonic() + _LOOK_S

    def is_stuck(self, killed: Iterable[int]) -> bool:
        """Kill all below processes that were killed; call this at least once a second.

        Args:
            killed: the topmost processes of the tree: children of this process or its forkserver.

        Returns:
            Whether to wait no longer.
        """
        if (now := time.monotonic()) < self._due:
            return False
        self._due = now + _LOOK_S
        living = [pid for pid in killed if not is_zombie(pid)]
        seen = set(living)
        for parent in living:  # it grows meanwhile
            for pid in children_of(parent):
                if pid not in seen and not is_zombie(pid):
                    seen.add(pid)
                    living.append(pid)
                    kill_child(pid, parent)
        self._quiet_looks = 0 if seen - self.living else self._quiet_looks + 1
        self.living = seen
        return self._quiet_looks >= _LOOKS


def kill_child(pid: int, parent: int) -> None:
    """Kill a process, if it is still a child of ``parent`` and that is permitted."""
    with suppress(OSError, ProcessMismatch):
        pidfd = open_claimed(pid, parent=parent)
        try:
            signal.pidfd_send_signal(pidfd, signal.SIGKILL)
        finally:
            close(pidfd)


def is_zombie(pid: int) -> bool:
    """Return whether all threads of a process have ended, although it is not reaped."""
    stat = stat_of(pid)
    return bool(stat) and stat[0] == b"Z" and int(stat[_THREADS]) == 1


def stuck_text(pids: Collection[int]) -> str:
    """Return a warning about killed processes that do not end."""
    stats = {pid: stat_of(pid) for pid in sorted(pids)[:MAX_NAMED]}
    named = ", ".join(f"{pid} (state {s[0].decode() if s else '?'})" for pid, s in stats.items())
    return (
        f"killed processes do not end: {named}. The node waits for them no longer, and they may"
        " still hold memory, also of a GPU; look for a file system or device that does not answer,"
        " such as a lost NFS server."
    )
