"""The journal's file: whole turns or nothing."""

from __future__ import annotations

from pathlib import Path

import pytest

from tunemq_scheduler.core.settings import RunnerSettings
from tunemq_scheduler.journal import (
    JOURNAL_VERSION,
    Journal,
    JournalHeader,
    read_entries,
    read_header,
    read_turns,
)
from tunemq_shared import messages as m
from tunemq_shared.errors import JournalCorrupt, JournalError

HEADER = JournalHeader(
    version=JOURNAL_VERSION,
    experiment="digits",
    experiment_id="abc",
    started=1.0,
    settings=RunnerSettings(max_failures=3),
)
TURNS = [
    [
        m.Entry(m.Tick(float(turn))),
        m.Entry(m.HostFreed("a", turn), (m.Decided("a", 1, "STOP", "why"),)),
    ]
    for turn in range(4)
]


@pytest.fixture
def journal(tmp_path: Path) -> Path:
    path = tmp_path / "journal"
    with Journal(path, HEADER) as open_journal:
        for turn in TURNS:
            open_journal.append(turn)
    return path


def test_what_was_written_is_read_back(journal: Path) -> None:
    assert read_header(journal) == HEADER
    assert list(read_turns(journal)) == TURNS
    assert list(read_entries(journal)) == [entry for turn in TURNS for entry in turn]


def test_a_torn_last_turn_is_left_out_wherever_it_was_cut(journal: Path) -> None:
    whole = journal.read_bytes()
    last = len(m.encode(TURNS[-1])) + 8
    for cut in range(len(whole) - last, len(whole)):
        journal.write_bytes(whole[:cut])
        assert list(read_turns(journal)) == TURNS[:-1]


def test_a_flipped_bit_in_the_last_turn_leaves_it_out(journal: Path) -> None:
    whole = bytearray(journal.read_bytes())
    last = len(m.encode(TURNS[-1])) + 8
    for place in range(len(whole) - last, len(whole)):
        damaged = bytearray(whole)
        damaged[place] ^= 0x10
        journal.write_bytes(damaged)
        assert list(read_turns(journal)) == TURNS[:-1]


def test_damage_before_whole_turns_is_refused_with_its_offset(journal: Path) -> None:
    whole = bytearray(journal.read_bytes())
    offset = len(m.encode(HEADER)) + 8
    whole[offset + 12] ^= 0x10
    journal.write_bytes(whole)
    with pytest.raises(JournalCorrupt, match=f"at byte {offset}"):
        list(read_turns(journal))


def test_a_journal_that_exists_is_not_written_over(journal: Path) -> None:
    with pytest.raises(JournalError, match="cannot be written"):
        Journal(journal, HEADER)


def test_another_version_is_refused_with_both_named(tmp_path: Path) -> None:
    path = tmp_path / "journal"
    header = JournalHeader(
        version=99, experiment="x", experiment_id="y", started=0.0, settings=RunnerSettings()
    )
    Journal(path, header).close()
    with pytest.raises(JournalError, match="version 99, this is 1"):
        read_header(path)


def test_a_full_disk_is_an_error_that_names_the_bytes_and_the_file() -> None:
    full = Path("/dev/full")
    journal = object.__new__(Journal)
    with full.open("wb") as file:
        journal.path, journal._sync, journal._fd = full, False, file.fileno()
        with pytest.raises(JournalError, match="could not be written to /dev/full: No space left"):
            journal.append(TURNS[0])
