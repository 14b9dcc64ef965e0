"""Builds a new journal from the readable parts of a damaged one, which is kept.

A state depends on *all* turns before it. So the new journal has the longest sequence of turns
without a gap, from an undamaged snapshot or from the beginning. The previous snapshot's files are
kept for this: if the newest snapshot is damaged, the one before it and the turns since give the
same state. Each frame contains its turn's number, so its file does not matter. Each record of the
history is in two files; if a record is lost in both, the result names its trials, and the search
continues without them.
"""

from __future__ import annotations

import datetime as dt
import os
import shutil
from collections.abc import Iterator
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Final, NamedTuple

import msgspec

from tunemq_scheduler.journal import journal_files
from tunemq_scheduler.journal.damage_check import (
    ReplayExtent,
    ReplayJournal,
    believe,
    examine,
    owner_of,
)
from tunemq_scheduler.journal.ended_trials import whole_records
from tunemq_scheduler.journal.journal_files import (
    HISTORY,
    HISTORY_COPY,
    LOCK,
    PART_SUFFIX,
    SNAPSHOT_SUFFIX,
    TURNS_SUFFIX,
    snapshot_file,
    turns_file,
)
from tunemq_scheduler.journal.journal_frames import JournalFrame, all_whole_frames, frame_at, pack
from tunemq_scheduler.journal.journal_headers import (
    HistoryHeader,
    JournalHeader,
    JournalSnapshot,
    SegmentHeader,
    SnapshotHeader,
    decode_header,
)
from tunemq_scheduler.journal.journal_lock import JournalLock
from tunemq_scheduler.journal.journal_reader import read_snapshot, recover
from tunemq_shared.base.errors import JournalCorrupt, JournalError
from tunemq_shared.protocol.messages import encode

_NEW_SUFFIX: Final = ".salvaged"
#: The first byte of a turn's payload, a list; that of a segment's header is a map.
_LIST_CODES: Final = frozenset({*range(0x90, 0xA0), 0xDC, 0xDD})


class _Base(NamedTuple):
    """A possible start for the turns; ``snapshot`` is None for the experiment's beginning."""

    about: SnapshotHeader
    snapshot: JournalSnapshot | None
    #: The last turn up to which all turns exist.
    reach: int
    #: The number of lost records of the history that belong to it.
    lost_records: int


@dataclass(frozen=True)
class _Survey:
    """All undamaged parts of a journal, in any file."""

    header: JournalHeader
    #: The path and the place of each whole turn.
    places: dict[int, tuple[Path, JournalFrame]]
    snapshots: list[tuple[SnapshotHeader, JournalSnapshot | None]]
    records: dict[int, bytes]
    #: The segments that are missing, empty or of another experiment.
    gone: tuple[int, ...]

    def bases(self) -> list[_Base]:
        """Return the possible starts, best first."""
        found = [self._base(*one) for one in self.snapshots]
        usable = [one for one in found if one.snapshot is not None or one.reach]
        return sorted(usable, key=lambda one: (-one.reach, one.lost_records, -one.about.turns))

    def _base(self, about: SnapshotHeader, snapshot: JournalSnapshot | None) -> _Base:
        reach = about.turns
        while reach + 1 in self.places:
            reach += 1
        return _Base(about, snapshot, reach, about.history_records - len(self.records_of(about)))

    def records_of(self, about: SnapshotHeader) -> list[bytes]:
        """Return the existing records of the history that belong to a snapshot."""
        return [self.records[one] for one in sorted(self.records) if one <= about.history_records]


@dataclass(frozen=True)
class SalvageResult:
    """The result of a salvage.

    Attributes:
        kept: the path of the damaged journal; None if there was no damage and nothing was done.
        turns: the number of turns in the new journal, including those that its snapshot replaces.
        snapshot_turn: the number of turns in its snapshot.
        unusable: the number of whole turns after a missing one, which cannot be used.
        damage: the damage that was found, one line each.
        lost_records: the number of records of the history that both files lack.
        missing: the trials of which the new journal only knows that they were suggested.
        gone: the files of turns of which nothing is left, all after ``turns``.
    """

    kept: Path | None
    turns: int
    snapshot_turn: int = 0
    unusable: int = 0
    damage: tuple[str, ...] = ()
    lost_records: int = 0
    missing: tuple[str, ...] = ()
    gone: tuple[Path, ...] = ()


def salvage(path: Path, replay: ReplayJournal = believe) -> SalvageResult:
    """Replace a damaged journal with one of its readable parts.

    Args:
        path: the journal's folder.
        replay: returns how many turns can be replayed from a snapshot.

    Raises:
        JournalLocked: a process has it open.
        JournalError: nothing can be used, or the disk rejects the new one. The damaged journal
            stays in its place.
    """
    new = path.with_name(path.name + _NEW_SUFFIX)
    if not path.exists() and new.exists():  # it was complete when its process died
        journal_files.put_in_place(new, path)
    verdict = examine(path, replay)
    if not verdict.damage and verdict.found is not None:
        return SalvageResult(None, verdict.found.turn, verdict.found.snapshot_turn)
    try:
        if new.exists():
            shutil.rmtree(new)
        new.mkdir()
        return _salvage(path, new, verdict.damage, replay)
    except OSError as error:
        where = error.filename or new
        raise JournalError(f"{where} cannot be read or written: {error.strerror}.") from error
    finally:
        shutil.rmtree(new, ignore_errors=True)


def _salvage(
    folder: Path, new: Path, damage: tuple[str, ...], replay: ReplayJournal
) -> SalvageResult:
    survey = _survey(folder, damage)
    lock = JournalLock(folder, survey.header.experiment)
    try:
        for base in survey.bases():
            replayed = _rebuild(survey, base, new, replay)
            if replayed is not None:
                break
        else:
            raise _nothing_left(
                folder, "no snapshot is whole, and its first turn is missing", damage
            )
        _copy_others(folder, new)
        kept = _swap(folder, new)
    finally:
        lock.close()
    unusable = sum(turn > replayed.turns for turn in survey.places)
    return SalvageResult(
        kept,
        replayed.turns,
        base.about.turns,
        unusable,
        damage,
        base.lost_records,
        replayed.missing if base.lost_records else (),
        tuple(turns_file(folder, one) for one in survey.gone if one >= base.about.segment),
    )


def _rebuild(survey: _Survey, base: _Base, new: Path, replay: ReplayJournal) -> ReplayExtent | None:
    """Write a journal from a start, as far as it can be replayed; return None if it cannot."""
    reach = base.reach
    while True:
        for path in new.iterdir():
            path.unlink()
        if base.snapshot is not None:
            _write_snapshot(survey, base.about, base.snapshot, new)
        turns = (_payload(*survey.places[turn]) for turn in range(base.about.turns + 1, reach + 1))
        _write_segment(new, survey.header, base.about, turns)
        replayed = replay(recover(new))
        if not replayed.problem:
            return replayed
        if replayed.turns < max(1, base.about.turns):
            return None
        reach = min(replayed.turns, reach - 1)


def _write_snapshot(
    survey: _Survey, about: SnapshotHeader, snapshot: JournalSnapshot, new: Path
) -> None:
    """Write a snapshot, and the existing records of the history that it needs."""
    content, records = b"", survey.records_of(about)
    if about.history_bytes:
        header = HistoryHeader(experiment_id=about.experiment_id)
        content = b"".join(pack(*one) for one in enumerate([encode(header), *records]))
        journal_files.write_durably(new / HISTORY, content)
        journal_files.write_durably(new / HISTORY_COPY, content)
    about = msgspec.structs.replace(about, history_bytes=len(content), history_records=len(records))
    frames = pack(0, encode(about)) + pack(1, encode(snapshot))
    journal_files.write_durably(snapshot_file(new, about.segment), frames)


def _nothing_left(folder: Path, why: str, damage: tuple[str, ...]) -> JournalError:
    found = " ".join(damage)
    return JournalError(f"nothing of {folder} can be used: {why}. {found}")


def _survey(folder: Path, damage: tuple[str, ...]) -> _Survey:
    """Return the journal's identity and all of its undamaged parts."""
    owner = owner_of(folder)
    header: JournalHeader | None = None
    places: dict[int, tuple[Path, JournalFrame]] = {}
    ambiguous: set[int] = set()
    segments = {
        *journal_files.numbers(folder, SNAPSHOT_SUFFIX),
        *journal_files.numbers(folder, TURNS_SUFFIX),
    }
    there: set[int] = set()
    for number in journal_files.numbers(folder, TURNS_SUFFIX):
        path = turns_file(folder, number)
        for frame in all_whole_frames(path):
            if not (frame.payload[:1] and frame.payload[0] in _LIST_CODES):
                try:
                    found = decode_header(frame.payload, SegmentHeader, path).of_journal()
                except JournalCorrupt:  # a different file has its name
                    break
                if found.experiment_id != owner:
                    break
                header = header or found
                there.add(number)
                continue
            there.add(number)
            place = path, frame._replace(payload=b"")
            if _payload(*places.setdefault(frame.number, place)) != frame.payload:
                ambiguous.add(frame.number)
    if header is None:
        raise _nothing_left(folder, "no header of a segment is whole", damage)
    return _Survey(
        header,
        {turn: place for turn, place in places.items() if turn not in ambiguous},
        _whole_snapshots(folder, owner),
        whole_records(folder, owner),
        tuple(sorted(segments - there)),
    )


def _whole_snapshots(
    folder: Path, owner: str
) -> list[tuple[SnapshotHeader, JournalSnapshot | None]]:
    """Return the beginning of the experiment, and its undamaged snapshots."""
    beginning = SnapshotHeader(
        experiment_id=owner, segment=1, turns=0, history_bytes=0, history_records=0
    )
    found: dict[int, tuple[SnapshotHeader, JournalSnapshot | None]] = {-1: (beginning, None)}
    for number in journal_files.numbers(folder, SNAPSHOT_SUFFIX):
        with suppress(JournalCorrupt):  # reported by `examine`
            about, snapshot = read_snapshot(snapshot_file(folder, number))
            if about.experiment_id == owner:
                found[about.turns] = about, snapshot
    return list(found.values())


def _payload(path: Path, place: JournalFrame) -> bytes:
    with open(path, "rb") as file:
        frame = frame_at(file, place.offset, place.end)
    if frame is None:
        raise JournalError(f"{path} changes while it is read.")
    return frame.payload


def _write_segment(
    folder: Path, header: JournalHeader, about: SnapshotHeader, turns: Iterator[bytes]
) -> None:
    number, before = about.segment, about.turns
    first = SegmentHeader(**header.fields(), segment=number, turns_before=before)
    path = turns_file(folder, number)
    with open(path, "xb") as file:
        file.write(pack(before, encode(first)))
        file.writelines(pack(turn, payload) for turn, payload in enumerate(turns, before + 1))
        file.flush()
        os.fsync(file.fileno())


def _copy_others(folder: Path, new: Path) -> None:
    """Copy the files that other modules keep beside the journal."""
    ours = (HISTORY, HISTORY_COPY, LOCK)
    for path in folder.iterdir():
        is_ours = path.name in ours or path.suffix in (TURNS_SUFFIX, SNAPSHOT_SUFFIX, PART_SUFFIX)
        if path.is_file() and not is_ours:
            journal_files.write_durably(new / path.name, path.read_bytes())


def _swap(path: Path, new: Path) -> Path:
    """Move the new journal to its place; return the path of the damaged one."""
    journal_files.sync_folder(new)
    day = dt.datetime.now().astimezone().strftime("%Y%m%d-%H%M%S-%f")
    kept = path.with_name(f"{path.name}{journal_files.DAMAGED_INFIX}{day}")
    if kept.exists():
        raise JournalError(f"{kept} is there already; try again.")
    journal_files.put_in_place(path, kept)
    journal_files.put_in_place(new, path)
    return kept
