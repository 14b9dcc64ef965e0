"""Waits for space on the journal's disk; meanwhile the search does nothing and loses nothing.

A full disk is no reason to end a search of days: once an operator frees space, it continues. Until
then the loop holds the turn that could not be written, takes no events, sends no commands, and
nodes keep what they have reported.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from typing import Final

from tunemq_shared.base.errors import JournalFull
from tunemq_shared.protocol.messages import JournalRecord

#: Seconds between two attempts.
RETRY_S: Final = 0.5


def append_when_disk_has_space(
    append: Callable[[Sequence[JournalRecord]], None],
    journal_records: Sequence[JournalRecord],
    *,
    tell: Callable[[str], None],
    pause: Callable[[float], None],
    is_given_up: Callable[[], bool],
) -> None:
    """Write a turn, and wait as long as the disk has no space for it.

    Args:
        append: the journal's method.
        journal_records: the turn.
        tell: receives a notice when the search is degraded, with the reason, and when it continues.
        pause: waits for a number of seconds between two attempts.
        is_given_up: checked before each further attempt; True ends the attempts.

    Raises:
        JournalFull: there is no space, and the attempts ended.
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
