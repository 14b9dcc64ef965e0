"""Handle standard streams that are closed (``>&-``) or on a full disk: a search needs none."""

from __future__ import annotations

import contextlib
import os
import sys
from typing import Final

_STDIN, _STDERR = 0, 2
_NULL: Final = os.devnull


def fill_closed_descriptors() -> None:
    """Open the null device for each of the descriptors 0, 1 and 2 that is closed.

    Otherwise a journal or a socket could get such a number, and receive the output of C code and of
    children that inherit it.
    """
    for descriptor in range(_STDIN, _STDERR + 1):
        try:
            os.fstat(descriptor)
        except OSError:
            # It gets this number: the lowest free one.
            os.set_inheritable(os.open(_NULL, os.O_RDWR), True)


def fill_closed_streams() -> None:
    """Replace a closed stdout or stderr by the null device."""
    fill_closed_descriptors()
    if sys.stdout is None:
        sys.stdout = open(_NULL, "w", encoding="utf-8")  # noqa: SIM115  until the process ends
    if sys.stderr is None:
        sys.stderr = open(_NULL, "w", encoding="utf-8")  # noqa: SIM115


def tell(text: str) -> None:
    """Write a line to stderr; drop it if that is closed or on a full disk."""
    if sys.stderr is not None:
        with contextlib.suppress(OSError, ValueError):
            sys.stderr.write(f"{text}\n")
            sys.stderr.flush()
