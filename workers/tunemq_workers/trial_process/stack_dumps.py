"""Has a trial's Python processes write what they are doing to its ``stderr``, whatever that is.

The host is asked first, then what was forked from it, one after another: each writes its stacks in
many pieces, which would be mixed else. What executes another interpreter (``spawn``, a launcher)
has no handler for the signal, which would end it; so nobody is asked who has none.
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

#: So many children are asked, so long apart, the first a while behind the host: all within
#: `tunemq_workers.trials.limit_enforcement.DUMP_S`.
_CHILDREN: Final = 10
_PAUSE_S: Final = 0.03
_FIRST_S: Final = 0.1


def have_stacks_written(pidfd: int, process: int, user: int | None = None) -> None:
    """Ask the host that this descriptor stands for, and its family; returns at once.

    Who cannot be asked is not: it has ended, or is somebody else's, or nothing is left to ask with.
    Where a ``user`` is given, no process of another user is signalled: by the time that a process
    of the family is looked up, its number may be another's, and the node may signal any process.
    """
    with suppress(OSError, RuntimeError):  # the latter: no further thread is to be had
        signal.pidfd_send_signal(pidfd, DUMP_SIGNAL)
        threading.Thread(
            target=_ask_children, args=(process, user), name="stacks", daemon=True
        ).start()


def _ask_children(process: int, user: int | None) -> None:
    time.sleep(_FIRST_S)  # for the host to have written its own
    children = [pid for pid in process_tree_of(process)[1:] if _listens(pid)]
    for pid in children[:_CHILDREN]:
        # A "setuid" program, for example, is not for the node to signal.
        with suppress(OSError, ProcessMismatch):
            pidfd = open_claimed(pid, user=user)
            try:
                if _listens(pid):  # the very process that the descriptor stands for
                    signal.pidfd_send_signal(pidfd, DUMP_SIGNAL)
            finally:
                os.close(pidfd)
        time.sleep(_PAUSE_S)


def _listens(pid: int) -> bool:
    """Whether a process has a handler for the signal."""
    with suppress(OSError), open(f"/proc/{pid}/status", "rb") as file:
        for line in file:
            name, _, mask = line.partition(b":")
            if name == b"SigCgt":
                return bool(int(mask, 16) >> (DUMP_SIGNAL - 1) & 1)
    return False
