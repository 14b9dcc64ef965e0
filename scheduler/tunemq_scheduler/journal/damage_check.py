"""Checks a journal for damage, for `tunemq journal check` and `salvage`."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Final, NamedTuple

from tunemq_scheduler.journal.ended_trials import read_history, whole_records
from tunemq_scheduler.journal.journal_files import (
    HISTORY_COPY,
    SNAPSHOT_SUFFIX,
    TURNS_SUFFIX,
    numbers,
    snapshot_file,
    turns_file,
)
from tunemq_scheduler.journal.journal_frames import all_whole_frames
from tunemq_scheduler.journal.journal_headers import SegmentHeader, SnapshotHeader, decode_header
from tunemq_scheduler.journal.journal_reader import (
    RecoveredJournal,
    read_segment,
    read_snapshot,
    recover,
)
from tunemq_shared.base.errors import JournalCorrupt


class ReplayExtent(NamedTuple):
    """How many turns of a journal can be replayed from its snapshot.

    Attributes:
        turns: the number of turns from the start of the experiment; -1 if even the snapshot cannot
            be loaded.
        problem: why the next one cannot be replayed; empty if all can.
        missing: the ids of trials that were suggested and of which the journal has no record.
    """

    turns: int
    problem: str = ""
    missing: tuple[str, ...] = ()


#: The kinds of numbered files: their suffix, their path by number, and their header.
_HEADERS: Final[
    tuple[tuple[str, Callable[[Path, int], Path], type[SegmentHeader | SnapshotHeader]], ...]
] = (
    (TURNS_SUFFIX, turns_file, SegmentHeader),
    (SNAPSHOT_SUFFIX, snapshot_file, SnapshotHeader),
)

ReplayJournal = Callable[[RecoveredJournal], ReplayExtent]


def believe(found: RecoveredJournal) -> ReplayExtent:
    """Accept all turns without replay, for turns that the runner cannot interpret."""
    return ReplayExtent(found.turn)


@dataclass(frozen=True)
class JournalCheckResult:
    """The result of a check.

    Attributes:
        found: the journal's contents; None if it cannot be read as it is.
        damage: one sentence per damaged place; empty if there is none.
    """

    found: RecoveredJournal | None
    damage: tuple[str, ...]


def examine(path: Path, replay: ReplayJournal) -> JournalCheckResult:
    """Read all files of a journal, including those of the previous snapshot, and replay it.

    Raises:
        JournalError: there is none, a file cannot be read, or another version wrote it.
    """
    damage: dict[str, None] = {}
    found: RecoveredJournal | None = None
    try:
        found = recover(path)
    except JournalCorrupt as error:
        damage[_told(error)] = None
    damage.update(dict.fromkeys(_damaged_files(path, found)))
    if found is not None:
        replayed = replay(found)
        if replayed.problem:
            damage[
                f"{path} cannot be replayed behind turn {replayed.turns}: {replayed.problem}"
            ] = None
    return JournalCheckResult(found, tuple(damage))


def owner_of(folder: Path) -> str:
    """Return the id of the experiment that owns most files of a journal; empty if unknown.

    Raises:
        JournalError: a file cannot be read.
    """
    found: Counter[str] = Counter()
    for suffix, file, kind in _HEADERS:
        for number in numbers(folder, suffix):
            if payload := _first_payload(path := file(folder, number)):
                with suppress(JournalCorrupt):  # a different file has its name
                    found[decode_header(payload, kind, path).experiment_id] += 1
    return found.most_common(1)[0][0] if found else ""


def _first_payload(path: Path) -> bytes:
    """Return the payload of a file's first frame; empty if that is damaged."""
    first = next(all_whole_frames(path), None)
    return first.payload if first is not None and first.offset == 0 else b""


def _damaged_files(folder: Path, found: RecoveredJournal | None) -> Iterator[str]:
    owner = found.header.experiment_id if found is not None else owner_of(folder)
    for suffix, file, _kind in reversed(_HEADERS):
        for number in numbers(folder, suffix):
            path = file(folder, number)
            try:
                if suffix == SNAPSHOT_SUFFIX:
                    its_owner = read_snapshot(path, number)[0].experiment_id
                else:
                    its_owner = read_segment(path, number).header.experiment_id
            except JournalCorrupt as error:
                yield _told(error)
                continue
            if owner and its_owner != owner:
                yield f"{path} is of experiment {its_owner}, and not of {owner}."
    if found is None:
        whole_records(folder, owner)  # salvage needs its readable records
    elif (folder / HISTORY_COPY).exists():
        try:
            read_history(folder, found.history, owner, HISTORY_COPY)
        except JournalCorrupt as error:
            yield _told(error)


def _told(error: JournalCorrupt) -> str:
    return f"{error.path} is damaged at byte {error.offset}: {error.reason}."
