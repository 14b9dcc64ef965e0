"""What is damaged of a journal: `tunemq journal check` and `salvage` share this verdict."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import NamedTuple

from tunemq_scheduler.journal.journal_contents import SegmentHeader, SnapshotHeader, decode_header
from tunemq_scheduler.journal.journal_frames import all_whole_frames
from tunemq_scheduler.journal.journal_layout import (
    HISTORY_COPY,
    SNAPSHOT_SUFFIX,
    TURNS_SUFFIX,
    numbers,
    snapshot_file,
    turns_file,
)
from tunemq_scheduler.journal.journal_reader import (
    RecoveredJournal,
    read_segment,
    read_snapshot,
    recover,
)
from tunemq_scheduler.journal.trial_history import read_history, whole_records
from tunemq_shared.base.errors import JournalCorrupt


class ReplayExtent(NamedTuple):
    """How far the turns of a journal follow from its snapshot.

    Attributes:
        turns: so many turns from the beginning of the experiment; -1: not even the snapshot can be
            loaded.
        problem: why the next one does not; empty where all do.
        missing: the ids of trials that were suggested, and of which nothing is known.
    """

    turns: int
    problem: str = ""
    missing: tuple[str, ...] = ()


ReplayJournal = Callable[[RecoveredJournal], ReplayExtent]


def believe(found: RecoveredJournal) -> ReplayExtent:
    """Replay nothing: for journals whose turns mean nothing to the core."""
    return ReplayExtent(found.turn)


@dataclass(frozen=True)
class JournalCheckResult:
    """What there is of a journal.

    Attributes:
        found: what it comes to; None where it cannot be read as it is.
        damage: what is wrong with its files, a sentence each; empty where it is whole.
    """

    found: RecoveredJournal | None
    damage: tuple[str, ...]


def examine(path: Path, replay: ReplayJournal) -> JournalCheckResult:
    """Read all files of a journal, those of the generation before included, and replay it.

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
    """The id of the experiment to which most files of a journal belong; empty where none says.

    Raises:
        JournalError: a file cannot be read.
    """
    found: Counter[str] = Counter()
    for one in numbers(folder, TURNS_SUFFIX):
        if payload := _first_payload(path := turns_file(folder, one)):
            with suppress(JournalCorrupt):  # another file has its name
                found[decode_header(payload, SegmentHeader, path).experiment_id] += 1
    for one in numbers(folder, SNAPSHOT_SUFFIX):
        if payload := _first_payload(path := snapshot_file(folder, one)):
            with suppress(JournalCorrupt):
                found[decode_header(payload, SnapshotHeader, path).experiment_id] += 1
    return found.most_common(1)[0][0] if found else ""


def _first_payload(path: Path) -> bytes:
    """What the first frame of a file holds; nothing where that is damaged."""
    first = next(all_whole_frames(path), None)
    return first.payload if first is not None and first.offset == 0 else b""


def _damaged_files(folder: Path, found: RecoveredJournal | None) -> Iterator[str]:
    owner = found.header.experiment_id if found is not None else owner_of(folder)
    for number in numbers(folder, SNAPSHOT_SUFFIX):
        yield from _damage_of(snapshot_file(folder, number), _snapshot_owner, number, owner)
    for number in numbers(folder, TURNS_SUFFIX):
        yield from _damage_of(turns_file(folder, number), _segment_owner, number, owner)
    if found is None:
        whole_records(folder, owner)  # salvage needs what can be read of it
    elif (folder / HISTORY_COPY).exists():
        try:
            read_history(folder, found.history, owner, HISTORY_COPY)
        except JournalCorrupt as error:
            yield _told(error)


def _snapshot_owner(path: Path, number: int) -> str:
    return read_snapshot(path, number)[0].experiment_id


def _segment_owner(path: Path, number: int) -> str:
    return read_segment(path, number).header.experiment_id


def _damage_of(
    path: Path, read: Callable[[Path, int], str], number: int, owner: str
) -> Iterator[str]:
    try:
        its_owner = read(path, number)
    except JournalCorrupt as error:
        yield _told(error)
        return
    if owner and its_owner != owner:
        yield f"{path} is of experiment {its_owner}, and not of {owner}."


def _told(error: JournalCorrupt) -> str:
    return f"{error.path} is damaged at byte {error.offset}: {error.reason}."
