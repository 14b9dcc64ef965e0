"""Node attempts that are dead as soon as their last events are read. Pure."""

from __future__ import annotations

import sys
from collections.abc import Iterable


class Deregistrations:
    """Who said that it ends, or whose node was started again, and where in the nodes' stream."""

    def __init__(self) -> None:
        self._said: dict[str, tuple[bytes, str]] = {}

    def add(self, instance_id: str, entry_id: bytes, why: str) -> None:
        """An entry of the nodes' stream says it."""
        self._said[instance_id] = entry_id, why

    def due(self, unfinished: Iterable[bytes]) -> dict[str, str]:
        """Those of whom all is read that they appended before; why, by attempt.

        Args:
            unfinished: of each stream that may have more, the newest entry that was read.
        """
        if not self._said:
            return {}
        read = min((place_of(entry_id)[0] for entry_id in unfinished), default=None)
        due: dict[str, str] = {}
        for instance_id, (entry_id, why) in list(self._said.items()):
            # Within a millisecond the numbers of two streams say nothing about their order.
            if read is None or read > place_of(entry_id)[0]:
                del self._said[instance_id]
                due[instance_id] = why
        return due


def place_of(entry_id: bytes) -> tuple[int, int]:
    """An entry's place in its stream; one that was not read yet is in front of none."""
    if not entry_id:
        return sys.maxsize, 0
    milliseconds, _, number = entry_id.partition(b"-")
    return int(milliseconds), int(number)
