"""What a scheduler's exit code says."""

from __future__ import annotations

from typing import Final

from tunemq_shared.errors import (
    JournalLocked,
    SchedulerSuperseded,
    TuneError,
    UserError,
    WireUnavailable,
)

#: The search could not go on; what it had is saved.
EXIT_FAILED: Final = 1
#: What was given is of no use (EX_USAGE).
EXIT_USE: Final = 64
#: Redis is away, or lets nobody in (EX_UNAVAILABLE).
EXIT_UNAVAILABLE: Final = 69
#: Another scheduler runs on this farm, has this search, or took it over (EX_TEMPFAIL).
EXIT_SUPERSEDED: Final = 75


def exit_code(problem: TuneError) -> int:
    """What a scheduler ends with for this."""
    if isinstance(problem, SchedulerSuperseded | JournalLocked):
        return EXIT_SUPERSEDED
    if isinstance(problem, UserError):
        return EXIT_USE
    return EXIT_UNAVAILABLE if isinstance(problem, WireUnavailable) else EXIT_FAILED
