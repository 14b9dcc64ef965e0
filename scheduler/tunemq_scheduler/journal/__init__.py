"""The journal: all events in order, on disk before any command is executed.

    journal = Journal.create(folder / FILE_NAME, header)
    journal.append(turn)                        one frame, one fdatasync
    journal.snapshot(state, finished)           when it `wants_snapshot`
    journal, found = Journal.resume(folder / FILE_NAME)

It is a subfolder of the experiment's folder: see `tunemq_scheduler.journal.journal_layout`.
`tunemq_scheduler.journal.journal_frames` distinguishes damage from a torn end. The reasons are in
docs/decisions 0001 and 0014.
"""

from __future__ import annotations

from tunemq_scheduler.journal.journal_contents import (
    JOURNAL_VERSION,
    JournalHeader,
    JournalSnapshot,
)
from tunemq_scheduler.journal.journal_layout import FILE_NAME
from tunemq_scheduler.journal.journal_reader import (
    RecoveredJournal,
    read_header,
    recover,
)
from tunemq_scheduler.journal.journal_writer import SEGMENT_BYTES, Journal, JournalPosition

__all__ = [
    "FILE_NAME",
    "JOURNAL_VERSION",
    "SEGMENT_BYTES",
    "Journal",
    "JournalHeader",
    "JournalPosition",
    "JournalSnapshot",
    "RecoveredJournal",
    "read_header",
    "recover",
]
