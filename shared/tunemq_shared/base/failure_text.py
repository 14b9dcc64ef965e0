"""Turns what a trial's code raised into one line and a traceback that can be sent."""

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
    """The error as ``ValueError: what was wrong``, without line breaks and of bounded length."""
    try:
        said = str(error)
    except Exception:  # noqa: BLE001  a user's __str__ may raise anything; the type is still told
        said = "(its message cannot be read)"
    text = f"{type(error).__name__}: {said}" if said else type(error).__name__
    return _encodable(shortened(" ".join(text.split()), _LONGEST_LINE))


def traceback_text(error: BaseException) -> str:
    """The traceback from the first frame of user code on, of bounded length.

    An error of ours that no user code raised needs none: its message says all.
    """
    trace = _from_user_code(error.__traceback__)
    if trace is None and not isinstance(error, TuneError):
        trace = error.__traceback__
    lines = traceback.format_exception(type(error), error, trace)
    return _encodable(shortened("".join(lines), _LONGEST_TRACEBACK))


def _from_user_code(trace: TracebackType | None) -> TracebackType | None:
    """``trace`` without our own frames at its start; None if there is no other."""
    frame = trace
    while frame is not None and frame.tb_frame.f_code.co_filename.startswith(_OURS):
        frame = frame.tb_next
    return frame


def shortened(text: str, longest: int = _LONGEST_LINE) -> str:
    """``text`` without its middle if it is too long: both ends tell most."""
    if len(text) <= longest:
        return text
    half = (longest - 40) // 2
    return f"{text[:half]} [... {len(text) - 2 * half} characters ...] {text[-half:]}"


def _encodable(text: str) -> str:
    return text.encode("utf-8", "backslashreplace").decode("utf-8")
