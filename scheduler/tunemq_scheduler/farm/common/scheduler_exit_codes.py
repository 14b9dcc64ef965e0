"""The exit codes of a scheduler and of experiment processes."""

from __future__ import annotations

import errno
import signal
from collections.abc import Iterator
from typing import Final

from tunemq_shared.base.errors import (
    BlobCorrupt,
    BugError,
    CheckpointCorrupt,
    JournalCorrupt,
    JournalError,
    JournalFull,
    JournalLocked,
    JournalVersionMismatch,
    RedisUnavailable,
    RunSuperseded,
    SchedulerSuperseded,
    SearchFailed,
    StoreError,
    StoreNotAllowed,
    TuneError,
    TunerVersionMismatch,
    UserError,
)
from tunemq_shared.system.processes import signal_name

#: The search failed; its results are saved.
EXIT_FAILED: Final = 1
#: An argument or a setting is invalid (EX_USAGE).
EXIT_USE: Final = 64
#: Redis is away or rejects connections (EX_UNAVAILABLE).
EXIT_UNAVAILABLE: Final = 69
#: Of an experiment process: the disk or the store failed, perhaps temporarily (EX_IOERR).
EXIT_AGAIN: Final = 74
#: Another scheduler runs on this farm, has this search, or took it over (EX_TEMPFAIL).
EXIT_SUPERSEDED: Final = 75
#: Of an experiment process: its search needs another version of TuneMQ or Python, or a store that
#: the farm does not allow (EX_CONFIG).
EXIT_MUST_WAIT: Final = 78

#: The errors of a file system that is full, broken, or away, and of a machine without a process,
#: memory or a descriptor left.
_TRANSIENT: Final = frozenset(
    {
        *(errno.EDQUOT, errno.EIO, errno.ENOSPC, errno.EROFS, errno.ESTALE),
        *(errno.EAGAIN, errno.EMFILE, errno.ENFILE, errno.ENOMEM),
    }
)
#: Errors that would happen again, whatever their cause.
_LASTING: Final = (BlobCorrupt, BugError, CheckpointCorrupt, JournalCorrupt, SearchFailed)


def exit_code(problem: TuneError) -> int:
    """Return the exit code of a scheduler for this error."""
    if isinstance(problem, SchedulerSuperseded | JournalLocked):
        return EXIT_SUPERSEDED
    if isinstance(problem, UserError):
        return EXIT_USE
    return EXIT_UNAVAILABLE if isinstance(problem, RedisUnavailable) else EXIT_FAILED


def process_exit_code(problem: Exception) -> int:
    """Return the exit code of an experiment process for this error."""
    if isinstance(problem, JournalVersionMismatch | TunerVersionMismatch | StoreNotAllowed):
        return EXIT_MUST_WAIT
    if may_pass(problem):
        return EXIT_AGAIN
    if isinstance(problem, RunSuperseded):
        return EXIT_FAILED  # a restart would find the same
    return exit_code(problem) if isinstance(problem, TuneError) else EXIT_FAILED


def may_pass(problem: Exception) -> bool:
    """Return whether a disk, a store or a full machine caused this, not the experiment."""
    if lacks_threads(problem):
        return True
    if isinstance(problem, _LASTING):
        return False
    if isinstance(problem, StoreError | JournalFull):
        return True
    is_file = isinstance(problem, JournalError) and not isinstance(problem, JournalLocked)
    refusals = [one for one in _causes(problem) if isinstance(one, OSError)]
    return any(is_file or one.errno in _TRANSIENT for one in refusals)


def lacks_threads(problem: Exception) -> bool:
    """Return whether the system refused a thread: another program used up its processes."""
    return any(
        type(one) is RuntimeError and one.args == ("can't start new thread",)
        for one in _causes(problem)
    )


def _causes(problem: BaseException) -> Iterator[BaseException]:
    """Yield the error, and those that led to it."""
    seen: set[int] = set()
    cause: BaseException | None = problem
    while cause is not None and id(cause) not in seen:
        seen.add(id(cause))
        yield cause
        cause = cause.__cause__


def how_it_ended(returncode: int) -> str:
    """Describe how a process ended, e.g. ``was killed by SIGSEGV (Segmentation fault)``."""
    if returncode >= 0:
        return f"ended with exit code {returncode}"
    try:
        told = signal.strsignal(-returncode)
    except (ValueError, OverflowError):  # a search's process may name any
        return f"ended with exit code {returncode}"
    return f"was killed by {signal_name(-returncode)}" + (f" ({told})" if told else "")
