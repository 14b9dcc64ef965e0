"""Search lines for users' patterns, with a limit on processor time.

A regular expression can take exponential time, holds the interpreter's lock meanwhile, and its form
does not reveal this. Only a signal stops Python's `re`, and only in the main thread. So this module
runs in a separate process, not in a thread of the node.
"""

from __future__ import annotations

import re
import signal
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from types import FrameType
from typing import Final

#: Seconds of processor time that a pattern may take for the output of one period. Most take a
#: hundredth of this for the longest output that is read at once.
BUDGET_S: Final = 0.25
#: Characters of a line that a report contains.
SHOWN: Final = 300
#: Characters of a line before the match that a report contains.
_BEFORE: Final = 100
#: Control characters would reach users' terminals.
_PLAIN: Final = dict.fromkeys([*range(32), *range(127, 160)], " ")


class PatternDisabled(Exception):
    """The pattern is not searched for any more; the text says why."""


class _TimeIsUp(Exception):
    """The pattern used up its processor time."""


class LogPatterns:
    """Compiled patterns with a time limit; usable only in the main thread."""

    def __init__(self, budget_s: float = BUDGET_S) -> None:
        self._budget_s = budget_s
        self._compiled: dict[str, re.Pattern[str]] = {}
        self._left_out: dict[str, str] = {}
        self._is_limited = False
        signal.signal(signal.SIGVTALRM, self._ring)

    def search(self, pattern: str, lines: Iterable[str]) -> str | None:
        """Return the first matching line, shortened for display; None if there is none.

        Raises:
            PatternDisabled: the pattern is invalid or takes too long, now or earlier.
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
        # The process's own time, so that a busy machine does not disable patterns.
        self._is_limited = True
        signal.setitimer(signal.ITIMER_VIRTUAL, self._budget_s)
        try:
            yield
        finally:
            self._is_limited = False
            signal.setitimer(signal.ITIMER_VIRTUAL, 0)

    def _ring(self, _signal: int, _frame: FrameType | None) -> None:
        if self._is_limited:  # otherwise it came just before the timer was stopped
            raise _TimeIsUp
