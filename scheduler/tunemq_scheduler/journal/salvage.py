"""Salvage: a new journal of what can be read of a damaged one, which is kept aside.

A state is made of *all* turns before it. So what counts is the longest row of turns without a gap,
from a snapshot that is whole, or from the beginning. The last generation of files is kept for this:
where the newest snapshot is damaged, the one before it and the turns since give the same state. A
frame says which turn it is, so it does not matter in which file it lies. Each record of the history
is in two files; trials whose record both have lost are named, and the search continues without
them.
"""

from __future__ import annotations

import datetime as dt
import os
import shutil
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Final, NamedTuple

import msgspec

from tunemq_scheduler.journal import journal_layout
from tunemq_scheduler.journal.damage_check import (
    ReplayExtent,
    ReplayJournal,
    believe,
    examine,
    owner_of,
)
from tunemq_scheduler.journal.journal_contents import (
    HistoryHeader,
    JournalHeader,
    JournalSnapshot,
    SegmentHeader,
    SnapshotHeader,
    decode_header,
)
from tunemq_scheduler.journal.journal_frames import JournalFrame, all_whole_frames, frame_at, pack
from tunemq_scheduler.journal.journal_layout import (
    HISTORY,
    HISTORY_COPY,
    LOCK,
    PART_SUFFIX,
    SNAPSHOT_SUFFIX,
    TURNS_SUFFIX,
    snapshot_file,
    turns_file,
)
from tunemq_scheduler.journal.journal_lock import JournalLock
from tunemq_scheduler.journal.journal_reader import read_snapshot, recover
from tunemq_scheduler.journal.trial_history import whole_records
from tunemq_shared.base.errors import JournalCorrupt, JournalError
from tunemq_shared.protocol.messages import encode

_NEW_SUFFIX: Final = ".salvaged"
#: The payload of a segment's header begins like this: a map; that of a turn is a list.
_LIST_CODES: Final = frozenset({*range(0x90, 0xA0), 0xDC, 0xDD})


class _TurnLocation(NamedTuple):
    """Where a whole turn lies."""

    path: Path
    frame: JournalFrame


class _Base(NamedTuple):
    """Something to which turns may be added; ``about`` is None for the beginning."""

    about: SnapshotHeader | None
    snapshot: JournalSnapshot | None
    turns: int
    #: Up to which turn all are there.
    reach: int
    #: How many records of the history are gone that belong to it.
    lost_records: int


@dataclass(frozen=True)
class _Survey:
    """All that is whole of a journal, wherever it lies."""

    header: JournalHeader
    places: dict[int, _TurnLocation]
    snapshots: list[tuple[SnapshotHeader, JournalSnapshot]]
    records: dict[int, bytes]
    #: The segments that are missing, empty or of another experiment.
    gone: tuple[int, ...]

    def bases(self) -> list[_Base]:
        """What turns may be added to, the best first."""
        found = [self._base(None, None), *(self._base(*one) for one in self.snapshots)]
        usable = [one for one in found if one.about is not None or one.reach]
        return sorted(usable, key=lambda one: (-one.reach, one.lost_records, -one.turns))

    def _base(self, about: SnapshotHeader | None, snapshot: JournalSnapshot | None) -> _Base:
        before = reach = about.turns if about is not None else 0
        while reach + 1 in self.places:
            reach += 1
        lost = about.history_records - len(self.records_of(about)) if about is not None else 0
        return _Base(about, snapshot, before, reach, lost)

    def records_of(self, about: SnapshotHeader) -> list[bytes]:
        """The records of the history that belong to a snapshot, and are there."""
        return [self.records[one] for one in sorted(self.records) if one <= about.history_records]


@dataclass(frozen=True)
class SalvageResult:
    """What became of a journal.

    Attributes:
        kept: where the damaged one is now; None where nothing was damaged and nothing was done.
        turns: so many turns are in the new journal, those that its snapshot stands for included.
        snapshot_turn: so many of them are in its snapshot.
        unusable: whole turns that are behind a missing one, and so of no use.
        damage: what was found, a line each.
        lost_records: how many records of the history neither of its files has.
        missing: the trials of which the new journal knows nothing but that they were suggested.
        gone: the files of turns of which nothing is left, all behind ``turns``.
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
    """Put a journal of what can be read in the place of a damaged one.

    Args:
        replay: says how far turns follow from a snapshot.

    Raises:
        JournalLocked: a process has it open.
        JournalError: nothing of it is of use, or the disk refuses to take the new one. The damaged
            one is where it was.
    """
    new = path.with_name(path.name + _NEW_SUFFIX)
    if not path.exists() and new.exists():  # it was complete when its process died
        journal_layout.put_in_place(new, path, sync=True)
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
    first = base.about.segment if base.about is not None else 1
    unusable = sum(turn > replayed.turns for turn in survey.places)
    return SalvageResult(
        kept,
        replayed.turns,
        base.turns,
        unusable,
        damage,
        base.lost_records,
        replayed.missing if base.lost_records else (),
        tuple(turns_file(folder, one) for one in survey.gone if one >= first),
    )


def _rebuild(survey: _Survey, base: _Base, new: Path, replay: ReplayJournal) -> ReplayExtent | None:
    """Write a journal of what belongs to a base, as far as it replays; None where it does not."""
    reach = base.reach
    while True:
        for path in new.iterdir():
            path.unlink()
        number = base.about.segment if base.about is not None else 1
        if base.about is not None and base.snapshot is not None:
            _write_snapshot(survey, base.about, base.snapshot, new)
        turns = (_payload(survey.places[turn]) for turn in range(base.turns + 1, reach + 1))
        _write_segment(new, survey.header, number, base.turns, turns)
        replayed = replay(recover(new))
        if not replayed.problem:
            return replayed
        if replayed.turns < max(1, base.turns):
            return None
        reach = min(replayed.turns, reach - 1)


def _write_snapshot(
    survey: _Survey, about: SnapshotHeader, snapshot: JournalSnapshot, new: Path
) -> None:
    """Write a snapshot, and the records of the history that it needs and that are there."""
    content, records = b"", survey.records_of(about)
    if about.history_bytes:
        header = HistoryHeader(experiment_id=about.experiment_id)
        content = b"".join(pack(*one) for one in enumerate([encode(header), *records]))
        _write(new / HISTORY, content)
        _write(new / HISTORY_COPY, content)
    about = msgspec.structs.replace(about, history_bytes=len(content), history_records=len(records))
    frames = pack(0, encode(about)) + pack(1, encode(snapshot))
    _write(snapshot_file(new, about.segment), frames)


def _nothing_left(folder: Path, why: str, damage: tuple[str, ...]) -> JournalError:
    found = " ".join(damage)
    return JournalError(f"of {folder} nothing is of use: {why}. {found}")


def _survey(folder: Path, damage: tuple[str, ...]) -> _Survey:
    """Whose journal it is, and all that is whole, wherever it is."""
    owner = owner_of(folder)
    header: JournalHeader | None = None
    places: dict[int, _TurnLocation] = {}
    ambiguous: set[int] = set()
    segments = {
        *journal_layout.numbers(folder, SNAPSHOT_SUFFIX),
        *journal_layout.numbers(folder, TURNS_SUFFIX),
    }
    there: set[int] = set()
    for number in journal_layout.numbers(folder, TURNS_SUFFIX):
        path = turns_file(folder, number)
        for frame in all_whole_frames(path):
            if not (frame.payload[:1] and frame.payload[0] in _LIST_CODES):
                try:
                    found = decode_header(frame.payload, SegmentHeader, path).of_journal()
                except JournalCorrupt:  # another file has its name
                    break
                if found.experiment_id != owner:
                    break
                header = header or found
                there.add(number)
                continue
            there.add(number)
            place = _TurnLocation(path, frame._replace(payload=b""))
            if _payload(places.setdefault(frame.number, place)) != frame.payload:
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


def _whole_snapshots(folder: Path, owner: str) -> list[tuple[SnapshotHeader, JournalSnapshot]]:
    found: dict[int, tuple[SnapshotHeader, JournalSnapshot]] = {}
    for number in journal_layout.numbers(folder, SNAPSHOT_SUFFIX):
        try:
            about, snapshot = read_snapshot(snapshot_file(folder, number))
        except JournalCorrupt:  # the verdict has it
            continue
        if about.experiment_id == owner:
            found[about.turns] = about, snapshot
    return list(found.values())


def _payload(place: _TurnLocation) -> bytes:
    with open(place.path, "rb") as file:
        frame = frame_at(file, place.frame.offset, place.frame.end)
    if frame is None:
        raise JournalError(f"{place.path} changes while it is read.")
    return frame.payload


def _write_segment(
    folder: Path, header: JournalHeader, number: int, before: int, turns: Iterator[bytes]
) -> None:
    first = SegmentHeader(**header.fields(), segment=number, turns_before=before)
    path = turns_file(folder, number)
    with open(path, "xb") as file:
        file.write(pack(before, encode(first)))
        file.writelines(pack(turn, payload) for turn, payload in enumerate(turns, before + 1))
        file.flush()
        os.fsync(file.fileno())


def _write(path: Path, content: bytes) -> None:
    journal_layout.put_in_place(
        journal_layout.write_part(path, content, sync=True), path, sync=True
    )


def _copy_others(folder: Path, new: Path) -> None:
    """What others keep beside the journal goes with it."""
    ours = (HISTORY, HISTORY_COPY, LOCK)
    for path in folder.iterdir():
        is_ours = path.name in ours or path.suffix in (TURNS_SUFFIX, SNAPSHOT_SUFFIX, PART_SUFFIX)
        if path.is_file() and not is_ours:
            _write(new / path.name, path.read_bytes())


def _swap(path: Path, new: Path) -> Path:
    """Put the new journal in its place; returns where the damaged one is."""
    journal_layout.sync_folder(new)
    day = dt.datetime.now().astimezone().strftime("%Y%m%d-%H%M%S-%f")
    kept = path.with_name(f"{path.name}{journal_layout.DAMAGED_INFIX}{day}")
    if kept.exists():
        raise JournalError(f"{kept} is there already; try again.")
    journal_layout.put_in_place(path, kept, sync=True)
    journal_layout.put_in_place(new, path, sync=True)
    return kept
