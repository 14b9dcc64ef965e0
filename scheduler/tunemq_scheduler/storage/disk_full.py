"""Waiting for room on the journal's disk: nothing is done meanwhile, and so nothing is lost.

A full disk is no reason to end a search of days: somebody makes room, and it goes on. Until then
the turn that could not be written is held; no event is taken in, no order leaves, and nodes keep
what they have reported.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from typing import Final

from tunemq_shared.base.errors import JournalFull
from tunemq_shared.protocol.messages import JournalRecord

#: Seconds between two tries.
RETRY_S: Final = 0.5


def append_when_disk_has_space(
    append: Callable[[Sequence[JournalRecord]], None],
    journal_records: Sequence[JournalRecord],
    *,
    tell: Callable[[str], None],
    pause: Callable[[float], None],
    is_given_up: Callable[[], bool],
) -> None:
    """Write a turn, however long the disk has no room for it.

    Args:
        append: that of the journal.
        tell: told that the search is degraded, and why; and when it goes on.
        pause: waits for so many seconds between two tries.
        is_given_up: asked before each further try; where it says yes, there is none.

    Raises:
        JournalFull: there is no room, and it was given up.
        JournalError: the turn cannot be written for another reason.
    """
    since: float | None = None
    while True:
        try:
            append(journal_records)
        except JournalFull as full:
            if is_given_up():
                raise
            if since is None:
                since = time.monotonic()
                tell(
                    f"degraded: {full} Nothing is lost; the search waits until there is room, or "
                    "until it is interrupted."
                )
        else:
            break
        pause(RETRY_S)
    if since is not None:
        tell(f"there is room again after {time.monotonic() - since:.0f} s; the search goes on")
