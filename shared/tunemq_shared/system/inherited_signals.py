"""Undo what a parent process left for signals where services could not work with it."""

from __future__ import annotations

import signal


def take_default_signals() -> None:
    """Receive all signals, and the exit codes of children; call it in the main thread.

    A process that ignores SIGCHLD gets no exit codes. Other ignored signals stay ignored, as
    ``nohup`` wants it.
    """
    signal.signal(signal.SIGCHLD, signal.SIG_DFL)
    signal.pthread_sigmask(signal.SIG_SETMASK, ())
