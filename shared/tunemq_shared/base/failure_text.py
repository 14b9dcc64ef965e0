"""Format an exception of a trial's code as one line, and as a traceback of bounded size."""

from __future__ import annotations

import os
import traceback
from types import TracebackType
from typing import Final

from tunemq_shared.base.errors import TuneError

_OURS: Final = os.path.dirname(os.path.dirname(os.path.abspath(__file__))) + os.sep
_LONGEST_LINE: Final = 1000
_LONGEST_TRACEBACK: Final = 64 * 1024


def one_line(error: BaseException) -> str:
    """Format the error as ``ValueError: message``, on one line and of bounded length."""
    try:
        said = str(error)
    except Exception:  # noqa: BLE001  a user's __str__ may raise anything; the type still helps
        said = "(its message cannot be read)"
    text = f"{type(error).__name__}: {said}" if said else type(error).__name__
    return _encodable(shortened(" ".join(text.split()), _LONGEST_LINE))


def traceback_text(error: BaseException) -> str:
    """Format the traceback from the first frame of user code, with bounded length.

    A TuneMQ error without a frame of user code has no traceback: its message suffices.
    """
    trace = _from_user_code(error.__traceback__)
    if trace is None and not isinstance(error, TuneError):
        trace = error.__traceback__
    lines = traceback.format_exception(type(error), error, trace)
    return _encodable(shortened("".join(lines), _LONGEST_TRACEBACK))


def _from_user_code(trace: TracebackType | None) -> TracebackType | None:
    """Drop our own leading frames from ``trace``; None if no others remain."""
    frame = trace
    while frame is not None and frame.tb_frame.f_code.co_filename.startswith(_OURS):
        frame = frame.tb_next
    return frame


def shortened(text: str, longest: int = _LONGEST_LINE) -> str:
    """Cut the middle out of a text that is too long: both ends matter most."""
    if len(text) <= longest:
        return text
    half = (longest - 40) // 2
    return f"{text[:half]} [... {len(text) - 2 * half} characters ...] {text[-half:]}"


def _encodable(text: str) -> str:
    return text.encode("utf-8", "backslashreplace").decode("utf-8")
