"""Replays a journal: the state of its snapshot plus the turns after it, without algorithms."""

from __future__ import annotations

from typing import Final

from tunemq_scheduler.core.trial_runner import TrialRunner
from tunemq_scheduler.journal.damage_check import ReplayExtent
from tunemq_scheduler.journal.journal_reader import RecoveredJournal
from tunemq_shared.base.errors import TuneError

#: The errors that the runner raises for turns that do not match its state.
_UNREPLAYABLE: Final = (
    TuneError,
    ArithmeticError,
    AttributeError,
    LookupError,
    TypeError,
    ValueError,
)


def begin(found: RecoveredJournal) -> TrialRunner:
    """Return the state before the first of a journal's turns.

    Raises:
        JournalError: another version wrote the snapshot.
    """
    settings, snapshot = found.header.settings, found.snapshot
    if snapshot is None:
        return TrialRunner(settings)
    return TrialRunner.load(settings, snapshot.state, found.finished)


def replay_recovered(found: RecoveredJournal) -> TrialRunner:
    """Return the state at the end of a journal: its snapshot plus the turns after it.

    Raises:
        BugError: the turns do not match that state.
        JournalError: another version wrote them.
    """
    runner = begin(found)
    for turn in found.turns:
        for journal_record in turn:
            runner.handle(journal_record.event, journal_record.answers)
    return runner


def replay_as_far_as_possible(found: RecoveredJournal) -> ReplayExtent:
    """Return how many turns of a journal can be replayed, and which trials are missing then."""
    turns = -1
    try:
        runner = begin(found)
        turns = found.snapshot_turn
        for turn in found.turns:
            for journal_record in turn:
                runner.handle(journal_record.event, journal_record.answers)
            turns += 1
    except _UNREPLAYABLE as error:
        return ReplayExtent(turns, f"{type(error).__name__}: {error}")
    known = {int(trial.rpartition("_")[2]) for trial in (*runner.live, *runner.finished)}
    prefix = found.header.experiment_id[:5]
    missing = (number for number in range(runner.suggested) if number not in known)
    return ReplayExtent(turns, "", tuple(f"{prefix}_{number:05d}" for number in missing))
