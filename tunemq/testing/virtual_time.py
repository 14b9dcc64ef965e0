"""`VirtualTime`: a clock that jumps from one event to the next."""

from __future__ import annotations

import heapq
from collections.abc import Callable
from typing import Any


class VirtualTime:
    """A queue of future actions in order of time; simultaneous ones run as scheduled.

    Attributes:
        now: seconds since the simulation began.
    """

    def __init__(self) -> None:
        self.now = 0.0
        self._happenings: list[tuple[float, int, Callable[..., object], tuple[Any, ...]]] = []
        #: The number of actions scheduled so far.
        self.asked = 0

    def after(self, delay: float, action: Callable[..., object], *arguments: Any) -> None:
        """Schedule an action in ``delay`` seconds."""
        self.asked += 1
        heapq.heappush(self._happenings, (self.now + delay, self.asked, action, arguments))

    def happen(self) -> None:
        """Advance to the next action, and run it."""
        self.now, _, action, arguments = heapq.heappop(self._happenings)
        action(*arguments)

    def pass_to(self, moment: float) -> None:
        """Run all actions due until a moment."""
        while self._happenings and self._happenings[0][0] <= moment:
            self.happen()
        self.now = max(self.now, moment)

    def has_due(self, moment: float) -> bool:
        """Return whether an action is due until a moment."""
        return bool(self._happenings) and self._happenings[0][0] <= moment
