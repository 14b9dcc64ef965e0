"""`VirtualTime`: a clock that jumps from one thing that happens to the next."""

from __future__ import annotations

import heapq
from collections.abc import Callable
from typing import Any


class VirtualTime:
    """What is to happen, in order of time; what is due at one moment happens as it was asked for.

    Attributes:
        now: seconds since the simulation began.
    """

    def __init__(self) -> None:
        self.now = 0.0
        self._happenings: list[tuple[float, int, Callable[..., object], tuple[Any, ...]]] = []
        #: How many things were asked for so far.
        self.asked = 0

    def after(self, delay: float, action: Callable[..., object], *arguments: Any) -> None:
        """Have something done in ``delay`` seconds."""
        self.asked += 1
        heapq.heappush(self._happenings, (self.now + delay, self.asked, action, arguments))

    def happen(self) -> None:
        """Go to the next thing, and do it."""
        self.now, _, action, arguments = heapq.heappop(self._happenings)
        action(*arguments)

    def pass_to(self, moment: float) -> None:
        """Do all that is due until then."""
        while self._happenings and self._happenings[0][0] <= moment:
            self.happen()
        self.now = max(self.now, moment)

    def has_due(self, moment: float) -> bool:
        """Whether anything happens until then."""
        return bool(self._happenings) and self._happenings[0][0] <= moment
