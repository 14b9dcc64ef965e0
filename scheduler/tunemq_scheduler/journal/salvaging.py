"""Salvage: a new journal of what can be read of a damaged one, which is kept aside.

A state is made of *all* turns before it. So what counts is the longest row of turns without a gap,
from a snapshot that is whole, or from the beginning. The last generation of files is kept for this:
where the newest snapshot is damaged, the one before it and the turns since give the same state.
"""

from __future__ import annotations

import datetime as dt
import os
import shutil
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Final, NamedTuple

from tunemq_scheduler.journal import layout, version1
from tunemq_scheduler.journal.contents import (
    JOURNAL_VERSION,
    JournalHeader,
    SegmentHeader,
    SnapshotHeader,
    decode_header,
    tunemq_version,
)
from tunemq_scheduler.journal.frames import Frame, frame_at, pack, whole_frames_behind
from tunemq_scheduler.journal.history import Extent, read_history
from tunemq_scheduler.journal.layout import (
    HISTORY,
    LOCK,
    PART_SUFFIX,
    SNAPSHOT_SUFFIX,
    TURNS_SUFFIX,
    snapshot_file,
    turns_file,
)
from tunemq_scheduler.journal.lock import JournalLock
from tunemq_scheduler.journal.reading import read_snapshot, recover
from tunemq_shared.errors import JournalCorrupt, JournalError
from tunemq_shared.messages import encode

_NEW_SUFFIX: Final = ".salvaged"
#: The payload of a segment's header begins like this: a map; that of a turn is a list.
_LIST_CODES: Final = frozenset({*range(0x90, 0xA0), 0xDC, 0xDD})


class _Place(NamedTuple):
    """Where a whole turn lies."""

    path: Path
    frame: Frame


@dataclass(frozen=True)
class Salvaged:
    """What became of a journal.

    Attributes:
        kept: where the damaged one is now; None where nothing was damaged and nothing was done.
        turns: so many turns are in the new journal, those that its snapshot stands for included.
        snapshot_turn: so many of them are in its snapshot.
        unusable: whole turns that are behind a missing one, and so of no use.
        damage: what was found, a line each.
    """

    kept: Path | None
    turns: int
    snapshot_turn: int = 0
    unusable: int = 0
    damage: tuple[str, ...] = ()


def salvage(path: Path) -> Salvaged:
    """Put a journal of what can be read in the place of a damaged one.

    Raises:
        JournalLocked: a process has it open.
        JournalError: nothing of it is of use, or the disk refuses to take the new one. The damaged
            one is where it was.
    """
    new = path.with_name(path.name + _NEW_SUFFIX)
    if not path.exists() and new.exists():  # it was complete when its process died
        layout.put_in_place(new, path, sync=True)
    try:
        found = recover(path)
        for _ in found.turns:
            pass
    except JournalCorrupt as error:
        damage = str(error)
    else:
        return Salvaged(None, found.turn, found.snapshot_turn)
    try:
        if new.exists():
            shutil.rmtree(new)
        new.mkdir()
        return _salvage_file(path, new, damage) if path.is_file() else _salvage(path, new, damage)
    except OSError as error:
        raise JournalError(f"{new} cannot be written: {error.strerror}.") from error
    finally:
        shutil.rmtree(new, ignore_errors=True)


def _salvage(folder: Path, new: Path, damage: str) -> Salvaged:
    header, places = _survey(folder)
    lock = JournalLock(folder, header.experiment)
    try:
        bases = [*_whole_snapshots(folder, header), None]
        base = max(bases, key=lambda one: (_reach(one, places), one is not None))
        before, reach = base.turns if base else 0, _reach(base, places)
        if base is None and not reach:
            raise JournalError(
                f"of {folder} nothing is of use: no snapshot is whole, and its first turn is "
                "missing."
            )
        number = base.segment if base else 1
        if base is not None:
            source = snapshot_file(folder, number)
            _write(snapshot_file(new, number), source.read_bytes())
            if base.history_bytes:
                _write(new / HISTORY, (folder / HISTORY).read_bytes()[: base.history_bytes])
        turns = (_payload(places[turn]) for turn in range(before + 1, reach + 1))
        _write_segment(new, header, number, before, turns)
        _copy_others(folder, new)
        kept = _swap(folder, new)
    finally:
        lock.close()
    unusable = sum(turn > reach for turn in places)
    return Salvaged(kept, reach, before, unusable, (damage,))


def _salvage_file(path: Path, new: Path, damage: str) -> Salvaged:
    header, payloads, unusable = version1.read_in_part(path)
    today = {**header.fields(), "version": JOURNAL_VERSION, "tunemq": tunemq_version()}
    _write_segment(new, JournalHeader(**today), 1, 0, iter(payloads))
    return Salvaged(_swap(path, new), len(payloads), 0, unusable, (damage,))


def _survey(folder: Path) -> tuple[JournalHeader, dict[int, _Place]]:
    """Whose journal it is, and all whole turns, wherever they are."""
    header: JournalHeader | None = None
    places: dict[int, _Place] = {}
    for number in layout.numbers(folder, TURNS_SUFFIX):
        path = turns_file(folder, number)
        for frame in _all_whole(path):
            if frame.payload[:1] and frame.payload[0] in _LIST_CODES:
                places[frame.number] = _Place(path, frame._replace(payload=b""))
            else:
                header = decode_header(frame.payload, SegmentHeader, path).of_journal()
    if header is None:
        raise JournalError(f"of {folder} nothing is of use: no header of a segment is whole.")
    return header, places


def _all_whole(path: Path) -> Iterator[Frame]:
    with open(path, "rb") as file:
        size = os.fstat(file.fileno()).st_size
        first = frame_at(file, 0, size)
        if first is not None:
            yield first
        yield from whole_frames_behind(file, first.end - 1 if first else 0, size)


def _whole_snapshots(folder: Path, header: JournalHeader) -> list[SnapshotHeader]:
    found = []
    for number in layout.numbers(folder, SNAPSHOT_SUFFIX):
        try:
            about, _ = read_snapshot(snapshot_file(folder, number))
            extent = Extent(about.history_bytes, about.history_records)
            read_history(folder, extent, header.experiment_id)
        except JournalCorrupt:  # the report says what was damaged first
            continue
        found.append(about)
    return found


def _reach(base: SnapshotHeader | None, places: dict[int, _Place]) -> int:
    """Up to which turn all are there."""
    turn = base.turns if base is not None else 0
    while turn + 1 in places:
        turn += 1
    return turn


def _payload(place: _Place) -> bytes:
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
    layout.put_in_place(layout.write_part(path, content, sync=True), path, sync=True)


def _copy_others(folder: Path, new: Path) -> None:
    """What others keep beside the journal goes with it."""
    ours = (HISTORY, LOCK)
    for path in folder.iterdir():
        is_ours = path.name in ours or path.suffix in (TURNS_SUFFIX, SNAPSHOT_SUFFIX, PART_SUFFIX)
        if path.is_file() and not is_ours:
            _write(new / path.name, path.read_bytes())


def _swap(path: Path, new: Path) -> Path:
    """Put the new journal in its place; returns where the damaged one is."""
    layout.sync_folder(new)
    day = dt.datetime.now().astimezone().strftime("%Y%m%d-%H%M%S")
    kept = path.with_name(f"{path.name}{layout.DAMAGED_INFIX}{day}")
    if kept.exists():
        raise JournalError(f"{kept} is there already; try again.")
    layout.put_in_place(path, kept, sync=True)
    layout.put_in_place(new, path, sync=True)
    return kept
