"""Salvage: the longest row of turns without a gap, the damaged journal kept."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from tests.unit.scheduler.journals import TURNS, begun, state_of, version1
from tunemq_scheduler.journal import Journal, read_turns, recover
from tunemq_scheduler.journal.frames import Frames
from tunemq_scheduler.journal.layout import snapshot_file, turns_file
from tunemq_scheduler.journal.salvaging import salvage
from tunemq_shared import messages as m
from tunemq_shared.errors import JournalCorrupt, JournalError


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    return tmp_path / "journal"


def flip(path: Path, place: int) -> None:
    data = bytearray(path.read_bytes())
    data[place] ^= 1
    path.write_bytes(data)


def test_a_journal_that_is_not_damaged_is_left_alone(folder: Path) -> None:
    begun(folder, TURNS)
    before = {path: path.read_bytes() for path in folder.iterdir()}
    done = salvage(folder)
    assert (done.kept, done.turns, done.snapshot_turn) == (None, len(TURNS), 3)
    assert {path: path.read_bytes() for path in folder.iterdir()} == before


@pytest.mark.parametrize("name", ["000002.snapshot", "000003.snapshot", "000003.turns"])
def test_whichever_byte_is_damaged_what_is_salvaged_is_a_prefix(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, name: str
) -> None:
    for sync in ("fsync", "fdatasync"):  # the disk's own pace is not what is looked at
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


def test_a_history_that_both_generations_need_is_not_made_up(folder: Path) -> None:
    begun(folder, TURNS, snapshot_before=(1, 2, 3))
    flip(folder / "history", 30)
    with pytest.raises(JournalError, match="nothing is of use"):
        salvage(folder)
    with pytest.raises(JournalCorrupt):
        recover(folder)
    assert list(folder.parent.iterdir()) == [folder]


def test_turns_behind_a_missing_one_are_of_no_use_and_counted(folder: Path) -> None:
    begun(folder, TURNS, snapshot_before=())
    frames = list(Frames(turns_file(folder, 1)))
    flip(turns_file(folder, 1), frames[3].offset + 1)
    done = salvage(folder)
    assert (done.turns, done.unusable) == (2, len(TURNS) - 3)
    assert list(read_turns(folder)) == TURNS[:2]
    assert done.kept is not None
    assert turns_file(done.kept, 1).stat().st_size == frames[-1].end


def test_of_a_journal_without_any_header_nothing_is_of_use(folder: Path) -> None:
    begun(folder, TURNS, snapshot_before=())
    flip(turns_file(folder, 1), 30)
    with pytest.raises(JournalError, match="no header of a segment is whole"):
        salvage(folder)
    assert list(folder.parent.iterdir()) == [folder]


def test_where_the_first_turns_are_gone_and_no_snapshot_is_whole_nothing_is_of_use(
    folder: Path,
) -> None:
    begun(folder, TURNS, snapshot_before=(1, 2, 3))
    for number in (3, 4):
        flip(snapshot_file(folder, number), 40)
    with pytest.raises(JournalError, match="no snapshot is whole, and its first turn is missing"):
        salvage(folder)
    assert list(folder.parent.iterdir()) == [folder]


def test_one_of_version_1_is_salvaged_as_one_of_today(folder: Path) -> None:
    version1(folder)
    data = folder.read_bytes()
    offset = len(data) - sum(8 + len(m.encode(turn)) for turn in TURNS[2:])
    flip(folder, offset + 9)
    done = salvage(folder)
    assert (done.turns, done.unusable) == (2, len(TURNS) - 3)
    assert list(read_turns(folder)) == TURNS[:2]
    assert done.kept is not None
    assert done.kept.is_file()


def test_a_salvage_that_was_cut_short_between_its_renames_is_completed(folder: Path) -> None:
    states = begun(folder, TURNS)
    folder.rename(folder.with_name("journal.salvaged"))
    assert salvage(folder).kept is None
    assert state_of(recover(folder)) == states[-1]
