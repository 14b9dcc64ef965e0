"""Real-time priority for the calling thread while it kills processes that fork without end."""

from __future__ import annotations

import os
from contextlib import suppress
from typing import Final

#: The lowest real-time priority, above all processes with ordinary scheduling.
_PRIORITY: Final = 1


def take_priority() -> None:
    """Take real-time priority, if permitted; processes that are forked meanwhile have none."""
    with suppress(OSError):
        os.sched_setscheduler(0, os.SCHED_RR | os.SCHED_RESET_ON_FORK, os.sched_param(_PRIORITY))


def give_up_priority() -> None:
    """Take ordinary scheduling again."""
    with suppress(OSError):
        os.sched_setscheduler(0, os.SCHED_OTHER | os.SCHED_RESET_ON_FORK, os.sched_param(0))
