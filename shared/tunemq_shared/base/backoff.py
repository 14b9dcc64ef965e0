"""How long to wait before something that fails again and again is tried again."""

from __future__ import annotations

from typing import Final

#: Of any first pause, twice as many are longer than a year, and 2.0 to this power is a float.
_MOST_DOUBLINGS: Final = 60


def backoff_s(doublings: int, shortest_s: float, longest_s: float) -> float:
    """Seconds: ``shortest_s``, doubled so often, and at most ``longest_s``."""
    return min(longest_s, shortest_s * 2.0 ** min(doublings, _MOST_DOUBLINGS))
