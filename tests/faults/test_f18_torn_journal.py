"""F18: a journal that is cut, or has a bit flipped, at every byte of its last three records.

Recovery cuts off a torn end. It rejects damage before whole records and names the offset. It never
recovers a state that the experiment did not have.
"""

from __future__ import annotations

import os
import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

import pytest

import tunemq as tune
from tests.support.searches.searches import fit
from tests.unit.scheduler.journals import TURNS, State, after, begun, state_of
from tunemq.testing.comparable_state import comparable
from tunemq.testing.journal_replay import replay
from tunemq_scheduler.journal.ended_trials import FinishedTrial
from tunemq_scheduler.journal.journal_files import snapshot_file, turns_file
from tunemq_scheduler.journal.journal_frames import JournalFrame, JournalFrames
from tunemq_scheduler.journal.journal_reader import recover
from tunemq_scheduler.journal.journal_replay import replay_recovered
from tunemq_scheduler.journal.journal_writer import Journal
from tunemq_shared.base.errors import JournalCorrupt, JournalError
from tunemq_shared.protocol.messages import encode


class Written(NamedTuple):
    """A journal of six turns with snapshots, and its state after each number of turns."""

    folder: Path
    states: list[State]


@pytest.fixture
def written(tmp_path: Path) -> Written:
    folder = tmp_path / "journal"
    return Written(folder, begun(folder, TURNS))


def damaged(path: Path, begin: int, end: int, *, all_bits: bool = True) -> Iterator[int]:
    """Flip each bit between two bytes of a file, or one bit per byte; yield each byte's offset."""
    whole = path.read_bytes()
    for place in range(begin, end):
        for bit in range(8) if all_bits else (place % 8,):
            changed = bytearray(whole)
            changed[place] ^= 1 << bit
            path.write_bytes(changed)
            yield place
    path.write_bytes(whole)


def cut(path: Path, begin: int, end: int) -> Iterator[int]:
    """Cut a file at each byte between two offsets; yield the offset."""
    whole = path.read_bytes()
    for place in range(begin, end):
        path.write_bytes(whole[:place])
        yield place
    path.write_bytes(whole)


def last_records(path: Path) -> list[JournalFrame]:
    return list(JournalFrames(path))[-3:]


def test_f18_a_journal_cut_at_each_byte_of_its_last_three_records_is_a_prefix(
    written: Written,
) -> None:
    path, last = turns_file(written.folder, 3), len(TURNS)
    records = last_records(path)
    for place in cut(path, records[0].offset, records[-1].end):
        whole = sum(record.end <= place for record in records)
        found = recover(written.folder)
        assert state_of(found) == written.states[last - 3 + whole]
        assert found.cut == place - [records[0].offset, *(one.end for one in records)][whole]


def test_f18_flipped_bit_in_the_last_three_records_is_cut_off_or_refused(
    written: Written,
) -> None:
    path = turns_file(written.folder, 3)
    records = last_records(path)
    for record in records:
        for _ in damaged(path, record.offset, record.end):
            if record is records[-1]:
                assert state_of(recover(written.folder)) == written.states[-2]
                continue
            with pytest.raises(JournalCorrupt, match="tunemq journal salvage") as told:
                recover(written.folder)
            assert (told.value.path, told.value.offset) == (str(path), record.offset)


def test_f18_a_journal_that_was_cut_continues_from_the_turn_before(
    written: Written, tmp_path: Path
) -> None:
    path, last = turns_file(written.folder, 3), len(TURNS)
    records = last_records(path)
    for place in cut(path, records[0].offset, records[-1].end):
        whole = sum(record.end <= place for record in records)
        copied = tmp_path / "copied"
        shutil.copytree(written.folder, copied)
        journal, found = Journal.resume(copied)
        with journal:
            assert found.cut == place - path_end(records, whole)
            assert turns_file(copied, 3).stat().st_size == path_end(records, whole)
            journal.append(TURNS[0])
        expected = after(written.states[last - 3 + whole], TURNS[0])
        assert state_of(recover(copied)) == expected
        assert not recover(copied).cut
        shutil.rmtree(copied)


def path_end(records: list[JournalFrame], whole: int) -> int:
    """Return the end offset of a segment in which ``whole`` of the last three records are whole."""
    return [records[0].offset, *(record.end for record in records)][whole]


@pytest.mark.parametrize("name", ["snapshot", "segment", "history"])
def test_f18_damage_in_completed_journal_files_is_refused(written: Written, name: str) -> None:
    path = {
        "snapshot": snapshot_file(written.folder, 3),
        "segment": turns_file(written.folder, 3),
        "history": written.folder / "history",
    }[name]
    size = path.stat().st_size
    # The segment's header: it was durable before the snapshot that needs it.
    end = next(iter(JournalFrames(path))).end if name == "segment" else size
    for one in (cut(path, 0, end), damaged(path, 0, end, all_bits=False)):
        for place in one:
            with pytest.raises(JournalCorrupt, match=str(path)):
                recover(written.folder)
            if place % 16 == 0:
                with pytest.raises(JournalError):
                    Journal.resume(written.folder)
    assert state_of(recover(written.folder)) == written.states[-1]


def test_f18_bytes_that_a_crash_left_after_the_history_are_ignored(written: Written) -> None:
    path = written.folder / "history"
    size = path.stat().st_size
    more: list[FinishedTrial] = [("t9", b"never over")]
    with open(path, "ab") as file:
        file.write(encode(more))
    assert state_of(recover(written.folder)) == written.states[-1]
    for _ in damaged(path, size, path.stat().st_size):
        assert state_of(recover(written.folder)) == written.states[-1]
    journal, found = Journal.resume(written.folder)
    with journal:
        assert state_of(found) == written.states[-1]
    os.truncate(path, size)
    assert state_of(recover(written.folder)) == written.states[-1]


def _climbs(config):
    for step in range(1, 4):
        tune.report({"score": config["slope"] * step})


@pytest.mark.integration
def test_f18_search_with_a_cut_journal_is_in_an_earlier_state(tmp_path: Path) -> None:
    grid = fit(
        _climbs,
        {"slope": tune.grid_search([1.0, 2.0])},
        name="e",
        storage_path=str(tmp_path),
        metric="score",
        mode="max",
    )
    folder = Path(grid.experiment_path, "journal")
    path = turns_file(folder, 1)
    turns, settings = list(recover(folder).turns), recover(folder).header.settings
    states = [
        comparable(replay(settings, (entry for turn in turns[:n] for entry in turn)))
        for n in range(len(turns) + 1)
    ]
    records = last_records(path)
    for place in cut(path, records[0].offset, records[-1].end):
        whole = sum(record.end <= place for record in records)
        found = recover(folder)
        assert found.turn == len(turns) - 3 + whole
        assert comparable(replay_recovered(found)) == states[found.turn]
    for record in records[:-1]:
        for _ in damaged(path, record.offset, record.offset + 24):
            with pytest.raises(JournalCorrupt):
                recover(folder)
    for _ in damaged(path, records[-1].offset, records[-1].end):
        assert comparable(replay_recovered(recover(folder))) == states[-2]
