"""Compute the pause before the next retry."""

from __future__ import annotations

from typing import Final

#: Doubled this often, any first pause exceeds a year, and 2.0 to this power still fits a float.
_MOST_DOUBLINGS: Final = 60


def backoff_s(doublings: int, shortest_s: float, longest_s: float) -> float:
    """Seconds to wait: ``shortest_s`` doubled ``doublings`` times, at most ``longest_s``."""
    return min(longest_s, shortest_s * 2.0 ** min(doublings, _MOST_DOUBLINGS))
