"""Makes a trial's Python processes write their stacks to its ``stderr``, even if they hang.

It signals the trial process first and then its forked children, one after another, so that their
output does not mix. A process that executes another interpreter (``spawn``, a launcher) has no
handler for the signal, which would kill it; so only processes with a handler are signalled.
"""

from __future__ import annotations

import os
import signal
import threading
import time
from contextlib import suppress
from typing import Final

from tunemq_shared.system.claimed_process import ProcessMismatch, open_claimed
from tunemq_workers.processes.forkserver_messages import DUMP_SIGNAL
from tunemq_workers.processes.tree_memory import process_tree_of

#: The most children that are signalled, the pause between two, and the pause before the first: all
#: within `tunemq_workers.trials.limit_enforcement.DUMP_S`.
_CHILDREN: Final = 10
_PAUSE_S: Final = 0.03
_FIRST_S: Final = 0.1


def have_stacks_written(pidfd: int, process: int, user: int | None = None) -> None:
    """Signal a trial process, by its pidfd and pid, and its process tree; return at once.

    Processes that cannot be signalled are skipped. With a ``user``, only that user's processes are
    signalled: a child's pid may be reused before the signal, and the node may signal any process.
    """
    with suppress(OSError, RuntimeError):  # RuntimeError: no thread can be started
        signal.pidfd_send_signal(pidfd, DUMP_SIGNAL)
        threading.Thread(
            target=_ask_children, args=(process, user), name="stacks", daemon=True
        ).start()


def _ask_children(process: int, user: int | None) -> None:
    time.sleep(_FIRST_S)  # until the trial process has written its stacks
    children = [pid for pid in process_tree_of(process)[1:] if _listens(pid)]
    for pid in children[:_CHILDREN]:
        # The node must not signal a "setuid" program, for example.
        with suppress(OSError, ProcessMismatch):
            pidfd = open_claimed(pid, user=user)
            try:
                if _listens(pid):  # checked again, now that the descriptor fixes the process
                    signal.pidfd_send_signal(pidfd, DUMP_SIGNAL)
            finally:
                os.close(pidfd)
        time.sleep(_PAUSE_S)


def _listens(pid: int) -> bool:
    """Return whether a process has a handler for the signal."""
    with suppress(OSError), open(f"/proc/{pid}/status", "rb") as file:
        for line in file:
            name, _, mask = line.partition(b":")
            if name == b"SigCgt":
                return bool(int(mask, 16) >> (DUMP_SIGNAL - 1) & 1)
    return False
