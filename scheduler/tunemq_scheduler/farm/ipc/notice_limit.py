"""`NoticeLimit`: shows some lines of a search in the scheduler's log; the search's log has all."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Final

#: The most lines of one search in a minute: those of other searches must stay visible there, and
#: the disk must not fill.
MOST_A_MINUTE: Final = 100
_MINUTE_S: Final = 60.0


class NoticeLimit:
    """Counts the lines of one search."""

    def __init__(self) -> None:
        self._until = 0.0
        self._shown = self._hidden = 0

    def take(self, lines: Sequence[str], now: float) -> list[str]:
        """Return which of these lines to show at this monotonic time, in seconds."""
        shown: list[str] = []
        if now >= self._until and (lines or self._hidden):
            if self._hidden:
                shown.append(f"{self._hidden} more lines are in its own log: tunemq logs")
            self._until, self._shown, self._hidden = now + _MINUTE_S, 0, 0
        for line in lines:
            if self._shown < MOST_A_MINUTE:
                self._shown += 1
                shown.append(line)
            else:
                self._hidden += 1
        return shown
