"""Handle standard streams that are closed (``>&-``) or on a full disk: a search needs none."""

from __future__ import annotations

import contextlib
import os
import select
import sys
from collections.abc import Callable
from typing import Final

from tunemq_shared.base.safe_text import harmless

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


def run_quietly(command: Callable[[], int]) -> int:
    """Run a command; return its exit status, or 0 if its output is read no further (``| head``)."""
    try:
        return command()
    except BrokenPipeError:
        if not _is_unread():  # it was another pipe
            raise
        return 0
    except SystemExit as ended:
        if isinstance(ended.__context__, BrokenPipeError):  # rich ends a program then
            return 0
        raise
    finally:
        _flush()


def _is_unread() -> bool:
    """Whether the reader of stdout or stderr has ended."""
    poll = select.poll()
    for stream in (sys.stdout, sys.stderr):
        poll.register(stream.fileno(), 0)
    return any(happened & (select.POLLERR | select.POLLHUP) for _, happened in poll.poll(0))


def _flush() -> None:
    """Write buffered output; drop it if its reader has ended.

    The interpreter's own attempt at its end would print an error.
    """
    for stream in (sys.stdout, sys.stderr):
        if stream is None or stream.closed:
            continue
        with contextlib.suppress(OSError):  # the interpreter reports a full disk
            try:
                stream.flush()
            except BrokenPipeError:
                null = os.open(_NULL, os.O_WRONLY)
                os.dup2(null, stream.fileno())
                os.close(null)


def tell(text: str) -> None:
    """Write a line to stderr; drop it if that is closed or on a full disk.

    Control characters are written as escapes: a text may quote what another party sent.
    """
    if sys.stderr is not None:
        with contextlib.suppress(OSError, ValueError):
            sys.stderr.write(f"{harmless(text)}\n")
            sys.stderr.flush()
