"""Reads a journal's contents, without a lock and without changing it."""

from __future__ import annotations

import os
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Final

import msgspec

from tunemq_scheduler.journal.ended_trials import NOTHING, HistoryExtent, read_history
from tunemq_scheduler.journal.journal_files import (
    SNAPSHOT_SUFFIX,
    TURNS_SUFFIX,
    numbers,
    snapshot_file,
    turns_file,
)
from tunemq_scheduler.journal.journal_frames import JournalFrames, frame_at
from tunemq_scheduler.journal.journal_headers import (
    JournalHeader,
    JournalSnapshot,
    SegmentHeader,
    SnapshotHeader,
    decode_header,
    readable,
)
from tunemq_shared.base.errors import JournalCorrupt, JournalError
from tunemq_shared.protocol.messages import JournalRecord, decode_records
from tunemq_shared.system.plain_files import open_to_read

#: The most bytes of a file in which its header is looked for: a trial may have written it.
_HEADER_BYTES: Final = 2**26

_decode_snapshot: Final = msgspec.msgpack.Decoder(JournalSnapshot).decode


@dataclass(frozen=True)
class JournalSegment:
    """One segment; ``end`` is after its last whole turn, ``torn`` counts the bytes after that."""

    path: Path
    number: int
    header: SegmentHeader
    turns: int
    end: int
    torn: int

    def payloads(self) -> Iterator[bytes]:
        """Iterate over its turns in encoded form."""
        frames = iter(JournalFrames(self.path, limit=self.end))
        next(frames)
        return (frame.payload for frame in frames)


@dataclass(frozen=True)
class JournalTurns:
    """The turns of some segments, read again on each iteration."""

    segments: tuple[JournalSegment, ...]

    def __iter__(self) -> Iterator[list[JournalRecord]]:
        for segment in self.segments:
            for payload in segment.payloads():
                yield readable(payload, decode_records, segment.path)


@dataclass(frozen=True)
class RecoveredJournal:
    """The contents of a journal.

    Attributes:
        header: the experiment's identity and rules.
        snapshot: the state at its beginning; None for that of a new experiment.
        finished: the summaries of the trials that had ended at the snapshot.
        turns: the turns after it.
        turn: the number of turns since the start of the experiment.
        cut: how many bytes of an incomplete turn are at the end, or were until now.
        snapshot_turn: the number of turns that the snapshot replaces.
        history: the part of the history that belongs to the snapshot.
        segments: the segments after the snapshot.
        lost: what the fetched copy lacked, for messages; empty if nothing.
    """

    header: JournalHeader
    snapshot: JournalSnapshot | None
    finished: dict[str, bytes]
    turns: Iterable[list[JournalRecord]]
    turn: int
    cut: int = 0
    snapshot_turn: int = 0
    history: HistoryExtent = NOTHING
    segments: tuple[JournalSegment, ...] = field(default=(), repr=False)
    lost: str = ""


def recover(path: Path) -> RecoveredJournal:
    """Read the journal at ``path``.

    Raises:
        JournalError: there is none, it cannot be read, or another version wrote it.
        JournalCorrupt: it is damaged beyond a torn end.
    """
    snapshots, present = numbers(path, SNAPSHOT_SUFFIX), numbers(path, TURNS_SUFFIX)
    if not present and not snapshots:
        raise JournalError(f"the journal {path} does not exist.")
    snapshot: JournalSnapshot | None = None
    if snapshots:
        about, snapshot = read_snapshot(snapshot_file(path, snapshots[-1]), snapshots[-1])
    else:
        about = SnapshotHeader(
            experiment_id="", segment=present[0], turns=0, history_bytes=0, history_records=0
        )
    segments = read_segments(path, present, first=about.segment, turns_before=about.turns)
    header, extent = segments[0].header, HistoryExtent(about.history_bytes, about.history_records)
    if snapshot is not None and header.experiment_id != about.experiment_id:
        raise JournalCorrupt(
            str(path), 0, f"a snapshot of experiment {about.experiment_id} lies in it"
        )
    return RecoveredJournal(
        header=header.of_journal(),
        snapshot=snapshot,
        finished=read_history(path, extent, about.experiment_id),
        turns=JournalTurns(segments),
        turn=segments[-1].header.turns_before + segments[-1].turns,
        cut=segments[-1].torn,
        snapshot_turn=about.turns,
        history=extent,
        segments=segments,
    )


def read_header(path: Path) -> JournalHeader:
    """Read the header of a journal.

    Raises:
        JournalError: there is no journal, another version wrote it, or it cannot be read.
        JournalCorrupt: it is damaged.
    """
    try:
        present = numbers(path, TURNS_SUFFIX)
        if not present:
            raise JournalError(f"the journal {path} does not exist.")
        first = turns_file(path, present[-1])
        with open_to_read(first) as file:
            frame = frame_at(file, 0, min(os.fstat(file.fileno()).st_size, _HEADER_BYTES))
        if frame is not None:
            return decode_header(frame.payload, SegmentHeader, first).of_journal()
    except OSError as error:
        raise JournalError(f"the journal {path} cannot be read: {error.strerror}.") from error
    raise JournalCorrupt(str(first), 0, "its header is damaged or missing")


def read_snapshot(path: Path, number: int | None = None) -> tuple[SnapshotHeader, JournalSnapshot]:
    """Read a snapshot and its header.

    Args:
        path: the file.
        number: the number in its name, which must match; None accepts any.

    Raises:
        JournalCorrupt: it is damaged, which no crash explains; or a different file has its name.
        JournalError: it cannot be read, or another version wrote it.
    """
    frames = JournalFrames(path)
    payloads = [frame.payload for frame in frames]
    if len(payloads) != 2 or frames.torn:
        raise JournalCorrupt(str(path), frames.end, "the snapshot is not whole")
    header = decode_header(payloads[0], SnapshotHeader, path)
    if number is not None and header.segment != number:
        raise JournalCorrupt(str(path), 0, f"it is snapshot {header.segment}, renamed")
    return header, readable(payloads[1], _decode_snapshot, path)


def read_segments(
    folder: Path, present: list[int], *, first: int, turns_before: int | None = None
) -> tuple[JournalSegment, ...]:
    """Read the segments from ``first`` on, and check that they are consecutive.

    Args:
        folder: the journal's folder.
        present: the numbers of the existing segments.
        first: the number of the first segment to read.
        turns_before: the expected number of turns before them; None if unknown.

    Raises:
        JournalCorrupt: one is missing or damaged.
    """
    found: list[JournalSegment] = []
    number, expected = first, turns_before
    while number == first or number <= present[-1]:
        path = turns_file(folder, number)
        if number not in present:
            raise JournalCorrupt(str(path), 0, "this file is missing")
        segment = read_segment(path, number)
        before = segment.header.turns_before
        if expected is not None and before != expected:
            raise JournalCorrupt(
                str(path), 0, f"it begins behind {before} turns, and not behind {expected}"
            )
        if found and segment.header.experiment_id != found[0].header.experiment_id:
            raise JournalCorrupt(
                str(path), 0, f"it is of experiment {segment.header.experiment_id}"
            )
        found.append(segment)
        number, expected = number + 1, before + segment.turns
    return tuple(found)


def read_segment(path: Path, number: int) -> JournalSegment:
    """Read one segment and check every frame.

    Raises:
        JournalCorrupt: it is damaged beyond a torn end.
        JournalError: it cannot be read, or another version wrote it.
    """
    frames = JournalFrames(path)
    header: SegmentHeader | None = None
    turns = 0
    for frame in frames:
        if header is None:
            header = decode_header(frame.payload, SegmentHeader, path)
            if header.segment != number or frame.number != header.turns_before:
                raise JournalCorrupt(str(path), 0, f"it is segment {header.segment}, renamed")
        else:
            turns += 1
    if header is None:
        raise JournalCorrupt(str(path), 0, "its header is damaged or missing")
    return JournalSegment(path, number, header, turns, frames.end, frames.torn)
