"""Node instances that have ended, held back until their last events are read. Pure."""

from __future__ import annotations

import sys
from collections.abc import Iterable


class Deregistrations:
    """Node instances that deregistered or were replaced, with the position of that entry."""

    def __init__(self) -> None:
        self._said: dict[str, tuple[bytes, str]] = {}

    def add(self, instance_id: str, entry_id: bytes, why: str) -> None:
        """Record that an instance ended, as an entry of the nodes' stream says."""
        self._said[instance_id] = entry_id, why

    def due(self, unfinished: Iterable[bytes]) -> dict[str, str]:
        """Return the instances whose earlier events are all read, with the reason for each.

        Args:
            unfinished: for each stream that may have more entries, the newest one that was read.
        """
        if not self._said:
            return {}
        read = min((place_of(entry_id)[0] for entry_id in unfinished), default=None)
        due: dict[str, str] = {}
        for instance_id, (entry_id, why) in list(self._said.items()):
            # Within a millisecond, entry numbers do not order entries of two streams.
            if read is None or read > place_of(entry_id)[0]:
                del self._said[instance_id]
                due[instance_id] = why
        return due


def place_of(entry_id: bytes) -> tuple[int, int]:
    """Return an entry's position in its stream; an unread entry (empty id) is after all others."""
    if not entry_id:
        return sys.maxsize, 0
    milliseconds, _, number = entry_id.partition(b"-")
    return int(milliseconds), int(number)
