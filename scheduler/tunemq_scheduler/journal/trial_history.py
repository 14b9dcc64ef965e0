"""The history: summaries of trials that are over, appended at each snapshot and never taken away.

So a snapshot costs what is alive and what changed, however many trials there were. Of a trial's
summaries the last one counts. How much of the file belongs to a snapshot stands in that; what is
behind was written before a crash, for a snapshot that there is not.

The summaries of trials that finished long ago stand in no turn that is still there. So two files
have the same content: `tunemq journal salvage` takes each record from the one that has it.
"""

from __future__ import annotations

import os
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Final, NamedTuple

import msgspec

from tunemq_scheduler.journal.journal_contents import HistoryHeader, decode_header, readable
from tunemq_scheduler.journal.journal_frames import JournalFrames, all_whole_frames, pack
from tunemq_scheduler.journal.journal_layout import HISTORY, HISTORY_COPY, sync_folder, write_at
from tunemq_shared.base.errors import JournalCorrupt
from tunemq_shared.protocol.messages import encode

#: A trial's id and its summary; an empty one says that it is not over any more.
FinishedTrial = tuple[str, bytes]

_decode: Final = msgspec.msgpack.Decoder(list[FinishedTrial]).decode
_RECORD_BYTES: Final = 2**20


class HistoryExtent(NamedTuple):
    """How much of the history there is: bytes, and records behind the header."""

    size: int
    records: int


NOTHING: Final = HistoryExtent(0, 0)


def read_history(
    folder: Path, extent: HistoryExtent, experiment_id: str, name: str = HISTORY
) -> dict[str, bytes]:
    """The last summary of each trial within this much of the history.

    Args:
        name: of the one or the other of its files.

    Raises:
        JournalCorrupt: that is not all there, or damaged.
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
            f"of {extent.size} bytes that belong to the snapshot so many are whole",
        )
    if header.experiment_id != experiment_id:
        raise JournalCorrupt(str(path), 0, f"it is of experiment {header.experiment_id}")
    return found


def append_history(
    folder: Path,
    extent: HistoryExtent,
    finished: Iterable[FinishedTrial],
    experiment_id: str,
    *,
    sync: bool,
) -> HistoryExtent:
    """Write behind ``extent``, instead of what is there; returns how much there is then.

    Raises:
        OSError: it cannot be written. What was within ``extent`` is as it was.
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
            if os.fstat(descriptor).st_size < size:  # a journal from its store has no copy
                write_at(descriptor, (folder / HISTORY).read_bytes()[:size], 0)
            os.ftruncate(descriptor, size)
            write_at(descriptor, bytes(content), size)
            if sync:
                os.fsync(descriptor)
        finally:
            os.close(descriptor)
        if sync and is_new:
            sync_folder(folder)
    return HistoryExtent(size + len(content), records)


def cut_history(folder: Path, extent: HistoryExtent) -> None:
    """Give back the room of what was written behind ``extent``."""
    for name in (HISTORY, HISTORY_COPY):
        path = folder / name
        if path.exists() and path.stat().st_size > extent.size:
            os.truncate(path, extent.size)


def whole_records(folder: Path, experiment_id: str) -> dict[int, bytes]:
    """The records of the history that either of its files has, by number.

    A number under which the files have different records is left out.

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
    """Whose history it is; empty where it is none."""
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
