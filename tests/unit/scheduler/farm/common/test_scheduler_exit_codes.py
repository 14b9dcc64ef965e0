"""Which exit codes of an experiment process do not count as its failure."""

from __future__ import annotations

import errno

import pytest

from tunemq_scheduler.farm.common.scheduler_exit_codes import (
    EXIT_AGAIN,
    EXIT_FAILED,
    EXIT_MUST_WAIT,
    EXIT_SUPERSEDED,
    EXIT_UNAVAILABLE,
    EXIT_USE,
    exit_code,
    process_exit_code,
)
from tunemq_shared.base.errors import (
    BlobCorrupt,
    ConfigError,
    InvariantBroken,
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
    TunerVersionMismatch,
)

_FULL = OSError(errno.ENOSPC, "No space left on device")
_ABSENT = FileNotFoundError(errno.ENOENT, "No such file or directory")


def _from(problem: Exception, cause: Exception) -> Exception:
    problem.__cause__ = cause
    return problem


@pytest.mark.parametrize(
    "problem",
    [
        StoreError("it does not answer"),
        JournalFull("no room"),
        _from(JournalError("cannot be written"), PermissionError(errno.EACCES, "")),
        _from(ConfigError("cannot be made"), _FULL),
        _FULL,
        OSError(errno.EMFILE, "Too many open files"),
        RuntimeError("can't start new thread"),
        _from(SearchFailed("a callback raised"), RuntimeError("can't start new thread")),
        _from(ConfigError("cannot be started"), OSError(errno.EAGAIN, "")),
    ],
)
def test_failure_of_disk_or_store_may_succeed_on_retry(problem):
    assert process_exit_code(problem) == EXIT_AGAIN


@pytest.mark.parametrize(
    ("problem", "code"),
    [
        (JournalCorrupt("journal", 7, "damaged"), EXIT_FAILED),
        (JournalError("nothing of it can be read"), EXIT_FAILED),
        (JournalVersionMismatch("another version wrote it"), EXIT_MUST_WAIT),
        (TunerVersionMismatch("another version wrote it"), EXIT_MUST_WAIT),
        (StoreNotAllowed("of another farm"), EXIT_MUST_WAIT),
        (BlobCorrupt("not what its name says"), EXIT_FAILED),
        (_from(SearchFailed("the algorithm raised"), _FULL), EXIT_FAILED),
        (_from(InvariantBroken("ours"), _FULL), EXIT_FAILED),
        (_from(ConfigError("there is no script"), _ABSENT), EXIT_USE),
        (_ABSENT, EXIT_FAILED),
        (ValueError("the user's"), EXIT_FAILED),
        (JournalLocked("held"), EXIT_SUPERSEDED),
        (SchedulerSuperseded("replaced"), EXIT_SUPERSEDED),
        (RunSuperseded("continued elsewhere"), EXIT_FAILED),
        (RedisUnavailable("away"), EXIT_UNAVAILABLE),
    ],
)
def test_failure_of_the_experiments_code_does_not_succeed_on_retry(problem, code):
    assert process_exit_code(problem) == code


def test_search_of_a_foreground_scheduler_fails_with_its_store():
    assert exit_code(StoreError("it does not answer")) == EXIT_FAILED
