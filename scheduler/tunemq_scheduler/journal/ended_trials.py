"""The history: summaries of ended trials, appended at each snapshot and never removed.

So the cost of a snapshot depends on live and changed trials, not on the number of all trials. A
trial's last summary counts. Each snapshot says how many bytes of the file belong to it; bytes after
that were written before a crash, for a snapshot that was not completed.

No remaining turn contains the summaries of trials that ended long ago. So two files have the same
content: `tunemq journal salvage` takes each record from the file that still has it.
"""

from __future__ import annotations

import os
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Final, NamedTuple

import msgspec

from tunemq_scheduler.journal.journal_files import HISTORY, HISTORY_COPY, sync_folder, write_at
from tunemq_scheduler.journal.journal_frames import JournalFrames, all_whole_frames, pack
from tunemq_scheduler.journal.journal_headers import HistoryHeader, decode_header, readable
from tunemq_shared.base.errors import JournalCorrupt
from tunemq_shared.protocol.messages import encode

#: A trial's id and its summary; an empty summary means that the trial runs again.
FinishedTrial = tuple[str, bytes]

_decode: Final = msgspec.msgpack.Decoder(list[FinishedTrial]).decode
_RECORD_BYTES: Final = 2**20


class HistoryExtent(NamedTuple):
    """A part of the history: bytes, and records after the header."""

    size: int
    records: int


NOTHING: Final = HistoryExtent(0, 0)


def read_history(
    folder: Path, extent: HistoryExtent, experiment_id: str, name: str = HISTORY
) -> dict[str, bytes]:
    """Return the last summary of each trial within this part of the history.

    Args:
        folder: the journal's folder.
        extent: the part.
        experiment_id: the expected owner.
        name: which of the two files to read.

    Raises:
        JournalCorrupt: that part is incomplete or damaged.
        JournalError: it cannot be read, or another version wrote it.
    """
    found: dict[str, bytes] = {}
    if extent == NOTHING:
        return found
    path = folder / name
    if not path.exists():
        raise JournalCorrupt(str(path), 0, "this file is missing")
    frames = JournalFrames(path, limit=extent.size)
    header: HistoryHeader | None = None
    for frame in frames:
        if header is None:
            header = decode_header(frame.payload, HistoryHeader, path)
        else:
            _take(found, readable(frame.payload, _decode, path))
    last = frame.number if header is not None else -1
    if header is None or frames.end != extent.size or last != extent.records:
        raise JournalCorrupt(
            str(path),
            frames.end,
            f"only some of the {extent.size} bytes that belong to the snapshot are whole",
        )
    if header.experiment_id != experiment_id:
        raise JournalCorrupt(str(path), 0, f"it is of experiment {header.experiment_id}")
    return found


def append_history(
    folder: Path,
    extent: HistoryExtent,
    finished: Iterable[FinishedTrial],
    experiment_id: str,
) -> HistoryExtent:
    """Write records after ``extent``, replacing all that follows it; return the new extent.

    Raises:
        OSError: it cannot be written. The part within ``extent`` is unchanged.
    """
    size, records = extent
    content = bytearray()
    if extent == NOTHING:
        content += pack(0, encode(HistoryHeader(experiment_id=experiment_id)))
    for record in _records(finished):
        records += 1
        content += pack(records, encode(record))
    for name in (HISTORY, HISTORY_COPY):
        path = folder / name
        is_new = not path.exists()
        descriptor = os.open(path, os.O_CREAT | os.O_WRONLY | os.O_CLOEXEC, 0o644)
        try:
            if os.fstat(descriptor).st_size < size:  # a fetched journal has no second file
                write_at(descriptor, (folder / HISTORY).read_bytes()[:size], 0)
            os.ftruncate(descriptor, size)
            write_at(descriptor, bytes(content), size)
            os.fsync(descriptor)
        finally:
            os.close(descriptor)
        if is_new:
            sync_folder(folder)
    return HistoryExtent(size + len(content), records)


def cut_history(folder: Path, extent: HistoryExtent) -> None:
    """Truncate both files to ``extent``."""
    for name in (HISTORY, HISTORY_COPY):
        path = folder / name
        if path.exists() and path.stat().st_size > extent.size:
            os.truncate(path, extent.size)


def whole_records(folder: Path, experiment_id: str) -> dict[int, bytes]:
    """Return the records of the history that either file has, by number.

    It omits a number for which the files have different records.

    Raises:
        JournalError: a file cannot be read, or another version wrote it.
    """
    found: dict[int, bytes] = {}
    ambiguous: set[int] = set()
    for name in (HISTORY, HISTORY_COPY):
        path = folder / name
        if not path.exists():
            continue
        frames = list(all_whole_frames(path))
        if frames and frames[0].offset == 0 and _owner(frames[0].payload, path) != experiment_id:
            continue
        for frame in frames:
            if found.setdefault(frame.number, frame.payload) != frame.payload:
                ambiguous.add(frame.number)
    return {number: found[number] for number in found if number and number not in ambiguous}


def _owner(header: bytes, path: Path) -> str:
    """Return the id of a history's experiment; empty if this is no header of a history."""
    try:
        return decode_header(header, HistoryHeader, path).experiment_id
    except JournalCorrupt:
        return ""


def _records(finished: Iterable[FinishedTrial]) -> Iterator[list[FinishedTrial]]:
    record: list[FinishedTrial] = []
    size = 0
    for trial, summary in finished:
        record.append((trial, summary))
        size += len(summary)
        if size >= _RECORD_BYTES:
            yield record
            record, size = [], 0
    if record:
        yield record


def _take(found: dict[str, bytes], record: list[FinishedTrial]) -> None:
    for trial, summary in record:
        if summary:
            found[trial] = summary
        else:
            found.pop(trial, None)
