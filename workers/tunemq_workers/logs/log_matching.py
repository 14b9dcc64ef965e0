"""Compares lines with users' patterns, for no longer than a pattern may take.

A regular expression may take exponential time for a line, holds the interpreter's lock meanwhile,
and cannot be told by its looks. What ends it is a signal, which Python's `re` heeds, and only in
the main thread of a process: so this is for a process of its own, not for a thread of the node.
"""

from __future__ import annotations

import re
import signal
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from types import FrameType
from typing import Final

#: The processor time that a pattern may take for what was printed between two looks. Most take a
#: hundredth of this for as much as is looked at.
BUDGET_S: Final = 0.25
#: So much is told of a line.
SHOWN: Final = 300
#: ... and so much of it before what matches.
_BEFORE: Final = 100
#: Control characters would reach people's terminals.
_PLAIN: Final = dict.fromkeys([*range(32), *range(127, 160)], " ")


class PatternDisabled(Exception):
    """The pattern is not looked for any more; says why."""


class _TimeIsUp(Exception):
    """The timer has run out."""


class LogPatterns:
    """Those in use, compiled once; to be used in the main thread."""

    def __init__(self, budget_s: float = BUDGET_S) -> None:
        self._budget_s = budget_s
        self._compiled: dict[str, re.Pattern[str]] = {}
        self._left_out: dict[str, str] = {}
        self._is_limited = False
        signal.signal(signal.SIGVTALRM, self._ring)

    def search(self, pattern: str, lines: Iterable[str]) -> str | None:
        """The first line that matches, as it is shown; None where none does.

        Raises:
            PatternLeftOut: it takes too long, or has done so before.
        """
        if pattern in self._left_out:
            raise PatternDisabled(self._left_out[pattern])
        try:
            with self._limited():
                return self._search(pattern, lines)
        except _TimeIsUp:
            reason = f"it took more than {self._budget_s:g} s for what a trial had printed"
        except (re.error, OverflowError, RecursionError, MemoryError) as error:
            reason = f"it cannot be used here: {error}"
        self._left_out[pattern] = reason
        raise PatternDisabled(reason)

    def _search(self, pattern: str, lines: Iterable[str]) -> str | None:
        compiled = self._compiled.get(pattern)
        if compiled is None:
            compiled = self._compiled[pattern] = re.compile(pattern)
        for line in lines:
            found = compiled.search(line)
            if found is not None:
                begin = max(0, found.start() - _BEFORE)
                return line[begin : begin + SHOWN].translate(_PLAIN).strip()
        return None

    @contextmanager
    def _limited(self) -> Iterator[None]:
        # Of this process's own time: on a machine that is busy no pattern is to blame.
        self._is_limited = True
        signal.setitimer(signal.ITIMER_VIRTUAL, self._budget_s)
        try:
            yield
        finally:
            self._is_limited = False
            signal.setitimer(signal.ITIMER_VIRTUAL, 0)

    def _ring(self, _signal: int, _frame: FrameType | None) -> None:
        if self._is_limited:  # else it came just before the timer was stopped
            raise _TimeIsUp
