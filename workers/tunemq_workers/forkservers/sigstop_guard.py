"""`killing_stopped_starts`: a process that starts as another user cannot keep its starter waiting.

Between the change of its user and `execve`, a trial of that user can stop a new process, and its
starter waits for it to execute its program.
"""

from __future__ import annotations

import os
import signal
import threading
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from typing import Final

from tunemq_shared.system.processes import children_of

_LOOK_S: Final = 1.0


@contextmanager
def killing_stopped_starts() -> Iterator[None]:
    """Kill new children of this process that are stopped, while the context starts one."""
    before, is_over = set(children_of(os.getpid())), threading.Event()

    def look() -> None:
        while not is_over.wait(_LOOK_S):
            for pid in set(children_of(os.getpid())) - before:
                with suppress(OSError):  # another thread has reaped it
                    if os.waitid(os.P_PID, pid, os.WSTOPPED | os.WNOHANG | os.WNOWAIT):
                        os.kill(pid, signal.SIGKILL)

    thread = threading.Thread(target=look, name="stopped starts", daemon=True)
    with suppress(RuntimeError):  # the system refuses a thread
        thread.start()
    try:
        yield
    finally:
        is_over.set()
        if thread.ident is not None:
            thread.join()
