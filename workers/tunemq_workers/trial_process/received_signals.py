"""`ReceivedSignals`: which signals a trial's own handlers have received."""

from __future__ import annotations

import os
import signal
from contextlib import suppress
from functools import partial
from typing import Final

_CHUNK: Final = 2**16


class ReceivedSignals:
    """Notes each signal for which this process has a handler in Python; make it in the main thread.

    A signal without a handler has its default action. Code that calls `signal.set_wakeup_fd`, as an
    event loop does, ends the notes.
    """

    def __init__(self) -> None:
        self._notes, noted = os.pipe2(os.O_NONBLOCK | os.O_CLOEXEC)
        signal.set_wakeup_fd(noted, warn_on_full_buffer=False)
        os.register_at_fork(after_in_child=partial(_forget, noted))

    def has(self, number: int) -> bool:
        """Whether this signal was received since the last call."""
        found = False
        with suppress(OSError):  # there are no more; or the trial's code closed the pipe
            while notes := os.read(self._notes, _CHUNK):
                found |= number in notes
        return found


def _forget(noted: int) -> None:
    """Note no signals that a forked child receives: the pipe is its parent's."""
    if (used := signal.set_wakeup_fd(-1)) not in (noted, -1):  # the trial's code has set another
        signal.set_wakeup_fd(used)
