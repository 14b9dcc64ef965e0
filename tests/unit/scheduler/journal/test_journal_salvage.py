"""Salvage: the longest run of turns without a gap; the damaged journal is kept."""

from __future__ import annotations

import os
import shutil
from pathlib import Path

import msgspec
import pytest

from tests.support.journal_records import read_turns
from tests.unit.scheduler.journals import (
    HEADER,
    TURNS,
    begun,
    state_of,
    take_snapshot,
)
from tunemq_scheduler.cli.journal_command import told_lost
from tunemq_scheduler.journal.damage_check import ReplayExtent, believe, examine
from tunemq_scheduler.journal.journal_files import snapshot_file, turns_file
from tunemq_scheduler.journal.journal_frames import JournalFrames
from tunemq_scheduler.journal.journal_reader import RecoveredJournal, recover
from tunemq_scheduler.journal.journal_writer import Journal
from tunemq_scheduler.journal.salvage import salvage
from tunemq_shared.base.errors import JournalCorrupt, JournalError


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    return tmp_path / "journal"


def flip(path: Path, place: int) -> None:
    data = bytearray(path.read_bytes())
    data[place] ^= 1
    path.write_bytes(data)


def test_salvage_leaves_an_undamaged_journal_alone(folder: Path) -> None:
    begun(folder, TURNS)
    before = {path: path.read_bytes() for path in folder.iterdir()}
    done = salvage(folder)
    assert (done.kept, done.turns, done.snapshot_turn) == (None, len(TURNS), 3)
    assert {path: path.read_bytes() for path in folder.iterdir()} == before


@pytest.mark.parametrize("name", ["000002.snapshot", "000003.snapshot", "000003.turns"])
def test_salvage_of_any_damaged_byte_gives_a_prefix(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, name: str
) -> None:
    for sync in ("fsync", "fdatasync"):  # do not measure the disk's speed
        monkeypatch.setattr(os, sync, lambda _: None)
    states = begun(tmp_path / "whole", TURNS)
    size = (tmp_path / "whole" / name).stat().st_size
    for place in range(size % 23, size, 23):
        folder = tmp_path / f"{place}" / "journal"
        folder.parent.mkdir()
        begun(folder, TURNS)
        flip(folder / name, place)
        done = salvage(folder)
        found = recover(folder)
        assert state_of(found) == states[found.turn]
        assert found.turn == done.turns
        if name.endswith("snapshot"):
            assert found.turn == len(TURNS)
        Journal.resume(folder)[0].close()


@pytest.mark.parametrize("how", ["removed", "emptied"])
def test_salvage_missing_file_of_turns_names_it_and_its_turns(folder: Path, how: str) -> None:
    begun(folder, TURNS)
    path = turns_file(folder, 3)
    path.unlink() if how == "removed" else path.write_bytes(b"")
    done = salvage(folder)
    assert (done.turns, done.gone) == (3, (path,))
    told = told_lost(done)
    assert "Lost: all turns behind turn 3" in told
    assert str(path) in told
    assert "the last" not in told


@pytest.mark.parametrize("name", ["history", "history.copy"])
def test_salvage_flipped_bit_in_one_history_loses_nothing(folder: Path, name: str) -> None:
    states = begun(folder, TURNS, snapshot_before=(1, 2, 3))
    size = (folder / name).stat().st_size
    for place in range(0, size, 7):
        flip(folder / name, place)
        (told,) = examine(folder, believe).damage
        assert str(folder / name) in told
        done = salvage(folder)
        assert (done.turns, done.lost_records, done.missing) == (len(TURNS), 0, ())
        assert state_of(recover(folder)) == states[-1]
        assert not examine(folder, believe).damage


@pytest.mark.parametrize("name", ["history", "history.copy"])
@pytest.mark.parametrize("how", ["removed", "empty", "cut", "foreign"])
def test_salvage_one_unusable_history_loses_nothing(
    folder: Path, tmp_path: Path, name: str, how: str
) -> None:
    states = begun(folder, TURNS, snapshot_before=(1, 2, 3))
    path = folder / name
    match how:
        case "removed":
            path.unlink()
        case "empty":
            path.write_bytes(b"")
        case "cut":
            os.truncate(path, path.stat().st_size // 2)
        case "foreign":
            shutil.copy(turns_file(folder, 4), path)
    damage = examine(folder, believe).damage
    assert damage or (how, name) == ("removed", "history.copy")
    assert (salvage(folder).kept is None) == (not damage)
    assert state_of(recover(folder)) == states[-1]
    Journal.resume(folder)[0].close()


def test_salvage_record_that_both_histories_lost_names_it(folder: Path) -> None:
    states = begun(folder, TURNS, snapshot_before=(1, 2, 3))
    record = list(JournalFrames(folder / "history"))[1]
    for name in ("history", "history.copy"):
        flip(folder / name, record.offset + 30)
    with pytest.raises(JournalCorrupt, match="tunemq journal salvage"):
        recover(folder)
    done = salvage(folder, lambda found: ReplayExtent(found.turn, "", ("abc_00000",)))
    assert (done.turns, done.lost_records, done.missing) == (len(TURNS), 1, ("abc_00000",))
    turns, finished = state_of(recover(folder))
    assert turns == states[-1][0]
    assert finished == tuple(dict(states[-1][1]).items())
    assert not examine(folder, believe).damage


def test_journal_without_history_copy_writes_all_of_it_with_its_next_snapshot(
    folder: Path,
) -> None:
    begun(folder, TURNS)
    (folder / "history.copy").unlink()  # as for a journal that was fetched from its store
    journal, found = Journal.resume(folder)
    with journal:
        take_snapshot(journal, state_of(found))
    assert (folder / "history.copy").read_bytes() == (folder / "history").read_bytes()


def test_salvage_swapped_segments_loses_nothing(folder: Path) -> None:
    states = begun(folder, TURNS)
    one, other = turns_file(folder, 2), turns_file(folder, 3)
    one.rename(folder / "x")
    other.rename(one)
    (folder / "x").rename(other)
    assert len(examine(folder, believe).damage) == 2
    assert salvage(folder).turns == len(TURNS)
    assert state_of(recover(folder)) == states[-1]


def test_salvage_segment_of_another_experiment_takes_no_turn_of_it(
    folder: Path, tmp_path: Path
) -> None:
    states = begun(folder, TURNS)
    header = msgspec.structs.replace(HEADER, experiment_id="another")
    other = Journal.create(tmp_path / "other", header)
    with other:
        for turn in TURNS:
            other.append(turn)
    shutil.copy(turns_file(tmp_path / "other", 1), turns_file(folder, 3))
    assert any("another" in one or "renamed" in one for one in examine(folder, believe).damage)
    assert salvage(folder).turns == 3
    assert state_of(recover(folder)) == states[3]


def test_salvage_snapshot_from_an_older_time_is_not_taken_for_the_newest(folder: Path) -> None:
    states = begun(folder, TURNS)
    shutil.copy(snapshot_file(folder, 2), snapshot_file(folder, 3))
    with pytest.raises(JournalCorrupt, match="snapshot 2, renamed"):
        recover(folder)
    assert salvage(folder).turns == len(TURNS)
    assert state_of(recover(folder)) == states[-1]


def test_salvage_turns_that_do_not_replay_are_left_out(folder: Path) -> None:
    begun(folder, TURNS, snapshot_before=())

    def replay(found: RecoveredJournal) -> ReplayExtent:
        return ReplayExtent(min(found.turn, 4), "KeyError: 'a'" if found.turn > 4 else "")

    assert "behind turn 4: KeyError" in examine(folder, replay).damage[0]
    done = salvage(folder, replay)
    assert (done.turns, done.unusable) == (4, 2)
    assert not examine(folder, replay).damage


def test_journal_create_refuses_folder_that_lost_its_segments(folder: Path) -> None:
    begun(folder, TURNS)
    for number in (2, 3):
        turns_file(folder, number).unlink()
    with pytest.raises(JournalError, match="exists already"):
        Journal.create(folder, HEADER)
    with pytest.raises(JournalError, match="no header of a segment is whole"):
        salvage(folder)


def test_salvage_counts_and_drops_turns_after_a_missing_one(folder: Path) -> None:
    begun(folder, TURNS, snapshot_before=())
    frames = list(JournalFrames(turns_file(folder, 1)))
    flip(turns_file(folder, 1), frames[3].offset + 1)
    done = salvage(folder)
    assert (done.turns, done.unusable) == (2, len(TURNS) - 3)
    assert list(read_turns(folder)) == TURNS[:2]
    assert done.kept is not None
    assert turns_file(done.kept, 1).stat().st_size == frames[-1].end


def test_salvage_of_a_journal_without_any_header_recovers_nothing(folder: Path) -> None:
    begun(folder, TURNS, snapshot_before=())
    flip(turns_file(folder, 1), 30)
    with pytest.raises(JournalError, match="no header of a segment is whole"):
        salvage(folder)
    assert list(folder.parent.iterdir()) == [folder]


def test_salvage_without_the_first_turns_and_a_whole_snapshot_recovers_nothing(
    folder: Path,
) -> None:
    begun(folder, TURNS, snapshot_before=(1, 2, 3))
    for number in (3, 4):
        flip(snapshot_file(folder, number), 40)
    with pytest.raises(JournalError, match="no snapshot is whole, and its first turn is missing"):
        salvage(folder)
    assert list(folder.parent.iterdir()) == [folder]


def test_salvage_interrupted_between_its_renames_is_completed(folder: Path) -> None:
    states = begun(folder, TURNS)
    folder.rename(folder.with_name("journal.salvaged"))
    assert salvage(folder).kept is None
    assert state_of(recover(folder)) == states[-1]
