"""What Linux lets a process say about itself and its parent, and Python does not offer."""

from __future__ import annotations

import ctypes
import os
import signal
from typing import Final

_PR_SET_PDEATHSIG: Final = 1
_PR_SET_NAME: Final = 15
_PR_SET_CHILD_SUBREAPER: Final = 36

_libc = ctypes.CDLL(None, use_errno=True)


def die_with_parent(parent: int, with_signal: int = signal.SIGKILL) -> None:
    """Have the kernel send ``with_signal`` to this process when its parent thread ends.

    ``parent`` is the pid that the parent is supposed to have. If it is gone already, nobody would
    ever send the signal, so this process ends at once. An exec of a set-user-id program clears
    the wish.
    """
    _prctl(_PR_SET_PDEATHSIG, int(with_signal))
    if os.getppid() != parent:
        os._exit(0)


def adopt_orphans() -> None:
    """Become the parent of every descendant whose own parent ends (a *subreaper*)."""
    _prctl(_PR_SET_CHILD_SUBREAPER, 1)


def set_name(name: str) -> None:
    """Show ``name`` (15 bytes of it) in ps and top."""
    _prctl(_PR_SET_NAME, ctypes.c_char_p(name.encode(errors="replace")[:15]))


def _prctl(option: int, argument: object) -> None:
    if _libc.prctl(option, argument, 0, 0, 0) != 0:
        number = ctypes.get_errno()
        raise OSError(number, os.strerror(number), f"prctl {option}")
