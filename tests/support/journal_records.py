"""Read all turns of a journal, for comparison in tests."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

from tunemq_scheduler.journal.journal_files import TURNS_SUFFIX, numbers
from tunemq_scheduler.journal.journal_reader import JournalTurns, read_segments
from tunemq_shared.base.errors import JournalError
from tunemq_shared.protocol.messages import JournalRecord


def read_turns(path: Path) -> Iterator[list[JournalRecord]]:
    """Yield all turns since the start of the experiment.

    Raises:
        JournalError: a snapshot has replaced its first turns (see `recover`); or it cannot be read.
        JournalCorrupt: it is damaged beyond a torn end.
    """
    present = numbers(path, TURNS_SUFFIX)
    if not present:
        raise JournalError(f"the journal {path} does not exist.")
    segments = read_segments(path, present, first=present[0])
    if segments[0].header.turns_before:
        raise JournalError(
            f"the first {segments[0].header.turns_before} turns of {path} are not there any more: "
            "a snapshot stands for them."
        )
    yield from JournalTurns(segments)


def read_records(path: Path) -> Iterator[JournalRecord]:
    """Yield all records of all turns, in order; see `read_turns`."""
    for turn in read_turns(path):
        yield from turn
