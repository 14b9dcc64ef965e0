"""The journal: whole turns or none, snapshots, one writer, other versions."""

from __future__ import annotations

import dataclasses
import errno
import os
import pickle
import shutil
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import msgspec
import pytest

from tests.support.journal_records import read_records, read_turns
from tests.support.synced_files import SyncedFiles
from tests.unit.scheduler.journals import HEADER, TURNS, begun, state_of
from tunemq_scheduler.journal import journal_files as layout_module
from tunemq_scheduler.journal import journal_writer
from tunemq_scheduler.journal.journal_files import FILE_NAME, turns_file
from tunemq_scheduler.journal.journal_frames import MARK, all_whole_frames, pack
from tunemq_scheduler.journal.journal_headers import JournalSnapshot
from tunemq_scheduler.journal.journal_reader import read_header, recover
from tunemq_scheduler.journal.journal_writer import Journal
from tunemq_shared.base.errors import JournalCorrupt, JournalError, JournalFull, JournalLocked
from tunemq_shared.protocol import messages as m


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    return tmp_path / "journal"


@pytest.fixture
def written(folder: Path) -> Path:
    """Write a journal with all turns and close it."""
    with Journal.create(folder, HEADER) as journal:
        for turn in TURNS:
            journal.append(turn)
    return folder


def snapshot(journal: Journal, state: bytes, *finished: tuple[str, bytes]) -> bool:
    return journal.snapshot(JournalSnapshot(state=state, algorithms={"search": b"{}"}), finished)


def test_journal_written_and_read_is_unchanged(written: Path) -> None:
    assert read_header(written) == HEADER
    assert list(read_turns(written)) == TURNS
    assert list(read_records(written)) == [entry for turn in TURNS for entry in turn]
    found = recover(written)
    assert (found.header, found.snapshot, found.finished, found.cut) == (HEADER, None, {}, 0)
    assert (list(found.turns), found.turn) == (TURNS, len(TURNS))
    assert list(found.turns) == TURNS  # the second time


def test_journal_continues_where_it_ended(written: Path) -> None:
    journal, found = Journal.resume(written)
    with journal:
        assert list(found.turns) == TURNS
        journal.append(TURNS[0])
        assert list(found.turns) == TURNS  # unchanged
    assert list(read_turns(written)) == [*TURNS, TURNS[0]]
    assert recover(written).turn == len(TURNS) + 1


def test_torn_turn_is_cut_and_its_bytes_are_reported(written: Path) -> None:
    path = turns_file(written, 1)
    os.truncate(path, path.stat().st_size - 3)
    torn = path.stat().st_size
    journal, found = Journal.resume(written)
    with journal:
        assert found.cut == torn - path.stat().st_size > 0
        assert list(found.turns) == TURNS[:-1]
        journal.append(TURNS[0])
    assert list(read_turns(written)) == [*TURNS[:-1], TURNS[0]]


def test_damage_before_whole_turns_is_rejected_with_its_offset_and_the_fix(written: Path) -> None:
    path = turns_file(written, 1)
    whole = bytearray(path.read_bytes())
    offset = len(whole) - sum(24 + len(m.encode(turn)) for turn in TURNS)
    whole[offset + 30] ^= 0x10
    path.write_bytes(whole)
    with pytest.raises(JournalCorrupt, match=f"at byte {offset}: .*tunemq journal salvage") as told:
        Journal.resume(written)
    assert str(pickle.loads(pickle.dumps(told.value))) == str(told.value)
    with pytest.raises(JournalCorrupt, match=str(path)):
        list(read_turns(written))


def test_wrong_length_is_not_taken_for_a_torn_end(written: Path) -> None:
    path = turns_file(written, 1)
    whole = bytearray(path.read_bytes())
    offset = len(whole) - sum(24 + len(m.encode(turn)) for turn in TURNS)
    whole[offset + 12] ^= 0x40  # the header now announces a GiB
    path.write_bytes(whole)
    with pytest.raises(JournalCorrupt, match=f"at byte {offset}"):
        recover(written)


def test_turn_is_not_written_into_a_file_that_took_over_the_journals_descriptor(
    folder: Path, tmp_path: Path
) -> None:
    """A callback closed one descriptor too many, and then opened a file."""
    other = tmp_path / "other"
    with Journal.create(folder, HEADER) as journal:
        journal.append(TURNS[0])
        os.close(journal._descriptor)
        with other.open("wb") as file:
            os.dup2(file.fileno(), journal._descriptor)
            with pytest.raises(JournalError, match="code in the search's process closed it"):
                journal.append(TURNS[1])
    assert other.read_bytes() == b""
    assert list(read_turns(folder)) == TURNS[:1]


def test_turn_is_not_written_into_a_journal_that_was_replaced(folder: Path) -> None:
    """A backup was put back while the search ran."""
    with Journal.create(folder, HEADER) as journal:
        journal.append(TURNS[0])
        path = turns_file(folder, 1)
        path.with_suffix(".new").write_bytes(path.read_bytes())
        path.with_suffix(".new").replace(path)
        with pytest.raises(JournalError, match="another program replaced or removed it"):
            journal.append(TURNS[1])
    assert list(read_turns(folder)) == TURNS[:1]


def test_existing_journal_is_not_overwritten(written: Path) -> None:
    with pytest.raises(JournalError, match="exists already"):
        Journal.create(written, HEADER)
    assert list(read_turns(written)) == TURNS


def test_missing_journal_is_named(folder: Path) -> None:
    for look in (recover, read_header, Journal.resume, lambda path: list(read_turns(path))):
        with pytest.raises(JournalError, match=r"journal does not exist"):
            look(folder)


# --- snapshots ------------------------------------------------------------------------------------


def test_snapshot_replaces_the_turns_before_it(folder: Path) -> None:
    with Journal.create(folder, HEADER) as journal:
        journal.append(TURNS[0])
        assert snapshot(journal, b"one", ("a", b"1"), ("b", b"1"))
        journal.append(TURNS[1])
        assert snapshot(journal, b"two", ("c", b"1"), ("a", b"2"))
        journal.append(TURNS[2])
        journal.append(TURNS[3])
    found = recover(folder)
    assert found.snapshot == JournalSnapshot(state=b"two", algorithms={"search": b"{}"})
    assert list(found.finished.items()) == [("a", b"2"), ("b", b"1"), ("c", b"1")]
    assert list(found.turns) == TURNS[2:4]
    assert (found.turn, found.snapshot_turn) == (4, 2)
    assert found.header == read_header(folder) == HEADER


def test_resumed_trial_is_no_longer_among_the_finished(folder: Path) -> None:
    with Journal.create(folder, HEADER) as journal:
        snapshot(journal, b"", ("a", b"1"), ("b", b"1"))
        snapshot(journal, b"", ("a", b""))
        snapshot(journal, b"", ("a", b"2"))
    assert list(recover(folder).finished.items()) == [("b", b"1"), ("a", b"2")]


def test_journal_keeps_the_last_two_generations(folder: Path) -> None:
    with Journal.create(folder, HEADER) as journal:
        for turn in TURNS:
            journal.append(turn)
            snapshot(journal, b"")
    names = sorted(path.name for path in folder.iterdir())
    last = len(TURNS) + 1
    assert names == [
        *(f"00000{n}.{what}" for n in (last - 1, last) for what in ("snapshot", "turns")),
        "history",
        "history.copy",
        "lock",
    ]
    with pytest.raises(JournalError, match=f"first {last - 2} turns of .* a snapshot stands"):
        list(read_turns(folder))


def test_journal_states_when_a_snapshot_is_due(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(journal_writer, "SEGMENT_BYTES", 4096)
    with Journal.create(folder, HEADER) as journal:
        turns = 0
        while not journal.wants_snapshot:
            journal.append(TURNS[0])
            turns += 1
        assert 4096 * 0.8 < turns * (24 + len(m.encode(TURNS[0]))) < 4096
        snapshot(journal, b"")
        assert not journal.wants_snapshot
    assert list(recover(folder).turns) == []


def test_journal_continues_after_a_snapshot(folder: Path) -> None:
    with Journal.create(folder, HEADER) as journal:
        journal.append(TURNS[0])
        snapshot(journal, b"one", ("a", b"1"))
        journal.append(TURNS[1])
    journal, found = Journal.resume(folder)
    with journal:
        assert (found.snapshot.state, list(found.turns)) == (b"one", [TURNS[1]])
        journal.append(TURNS[2])
        snapshot(journal, b"two", ("b", b"1"))
        journal.append(TURNS[3])
    found = recover(folder)
    assert (found.snapshot.state, list(found.turns)) == (b"two", [TURNS[3]])
    assert found.finished == {"a": b"1", "b": b"1"}
    assert found.turn == 4


def test_snapshot_on_a_full_disk_is_left_for_later(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(journal_writer, "SEGMENT_BYTES", 64)
    with Journal.create(folder, HEADER) as journal:
        journal.append(TURNS[0])
        names = sorted(path.name for path in folder.iterdir())
        for place in ("write_part", "put_in_place"):
            with monkeypatch.context() as patched:
                patched.setattr(layout_module, place, _raise_disk_full)
                assert not snapshot(journal, b"one", ("a", b"1"))
            assert not journal.wants_snapshot
            left = sorted(path.name for path in folder.iterdir())
            assert left == sorted([*names, "history", "history.copy"])
        journal.append(TURNS[1])
        assert snapshot(journal, b"two", ("b", b"1"))
    found = recover(folder)
    assert (found.snapshot.state, found.finished) == (b"two", {"b": b"1"})


def _raise_disk_full(*_args: object, **_more: object) -> None:
    raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))


@pytest.mark.parametrize("name", ["000002.turns", "000003.turns", "000003.snapshot", "history"])
def test_missing_file_of_a_journal_is_named(folder: Path, name: str) -> None:
    begun(folder, TURNS)
    before = state_of(recover(folder))
    (folder / name).unlink()
    # The last generation but one, which salvage needs, gives the same state as the last.
    if name in {"000002.turns", "000003.snapshot"}:
        assert state_of(recover(folder)) == before
    else:
        with pytest.raises(JournalError, match=name):
            recover(folder)


# --- errors of the disk ---------------------------------------------------------------------------


def test_full_disk_is_told_from_other_errors_and_leaves_nothing_of_the_turn(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with Journal.create(folder, HEADER) as journal:
        journal.append(TURNS[0])
        write = os.pwrite

        def half(descriptor: int, data: bytes, offset: int) -> int:
            if len(data) < 20:
                raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
            return write(descriptor, data[: len(data) // 2], offset)

        size = turns_file(folder, 1).stat().st_size
        with monkeypatch.context() as patched:
            patched.setattr(os, "pwrite", half)
            with pytest.raises(JournalFull, match=r"No space left on device \(\d+ bytes are free"):
                journal.append(TURNS[1])
        assert turns_file(folder, 1).stat().st_size == size
        journal.append(TURNS[1])
    assert list(read_turns(folder)) == TURNS[:2]


def test_turn_is_synced_before_append_returns(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    disk = SyncedFiles(monkeypatch)
    with Journal.create(folder, HEADER) as journal:
        for turn in TURNS[:3]:
            journal.append(turn)
            assert disk.has(turns_file(folder, 1))


def test_snapshot_is_synced_before_it_counts(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    disk = SyncedFiles(monkeypatch)
    with Journal.create(folder, HEADER) as journal:
        journal.append(TURNS[0])
        assert snapshot(journal, b"state")
    assert len(disk.renamed) == 3  # two segments and the snapshot
    assert disk.unsynced == []


def test_journal_writes_nothing_after_a_failed_write(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with Journal.create(folder, HEADER) as journal:
        journal.append(TURNS[0])

        def broken(*_args: object) -> int:
            raise OSError(errno.EIO, os.strerror(errno.EIO))

        with monkeypatch.context() as patched:
            patched.setattr(os, "fdatasync", broken)
            with pytest.raises(JournalError, match="Input/output error") as told:
                journal.append(TURNS[1])
        assert not isinstance(told.value, JournalFull)
        with pytest.raises(JournalError, match="Input/output error"):
            journal.append(TURNS[2])
    assert list(read_turns(folder)) == TURNS[:2]


# --- the lock -------------------------------------------------------------------------------------

HOLDER = """
import sys
from pathlib import Path
from tunemq_scheduler.journal.journal_writer import Journal
journal, _ = Journal.resume(Path(sys.argv[1]))
print("has it", flush=True)
sys.stdin.read()
"""


@pytest.fixture
def holder(written: Path) -> Iterator[subprocess.Popen[str]]:
    """Start another process that has the journal open."""
    with subprocess.Popen(
        [sys.executable, "-c", HOLDER, str(written)],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
    ) as process:
        assert process.stdout.readline() == "has it\n"
        yield process
        process.kill()


def test_second_process_gets_the_holder_of_the_journal_until_it_is_gone(
    written: Path, holder: subprocess.Popen[str]
) -> None:
    expected = (
        rf"process {holder.pid} on {os.uname().nodename} has had it since .*, for.* digits;"
        r" last heard \d+ s ago"
    )
    with pytest.raises(JournalLocked, match=expected):
        Journal.resume(written)
    with pytest.raises(JournalLocked, match=expected):
        Journal.create(written, HEADER)
    assert list(read_turns(written)) == TURNS  # reading needs no lock
    holder.kill()
    holder.wait()
    Journal.resume(written)[0].close()


def test_no_other_user_can_hold_the_lock_of_a_journal(written: Path) -> None:
    (written / layout_module.LOCK).chmod(0o644)  # as earlier versions made it
    journal, _ = Journal.resume(written)
    with journal:
        assert (written / layout_module.LOCK).stat().st_mode & 0o777 == 0o600


def test_second_open_in_the_same_process_is_rejected(written: Path) -> None:
    journal, _ = Journal.resume(written)
    with journal, pytest.raises(JournalLocked, match=f"process {os.getpid()}"):
        Journal.resume(written)
    Journal.resume(written)[0].close()


def test_forked_process_does_not_keep_the_lock(written: Path) -> None:
    journal, _ = Journal.resume(written)
    (ours, childs), (told, tell) = os.pipe(), os.pipe()
    child = os.fork()
    if not child:
        os.close(tell)
        os.write(childs, b"!")
        os.read(told, 1)
        os._exit(0)
    try:
        os.read(ours, 1)
        journal._lock.forget()  # as when its process dies
        Journal.resume(written)[0].close()
    finally:
        for descriptor in (ours, childs, told, tell):
            os.close(descriptor)
        assert os.waitpid(child, 0)[1] == 0


# --- other versions -------------------------------------------------------------------------------


@pytest.mark.parametrize(("field", "named"), [("version", "journal version"), ("protocol", "mess")])
def test_journal_of_another_version_is_rejected_with_both_versions(
    folder: Path, field: str, named: str
) -> None:
    header = msgspec.structs.replace(HEADER, **{field: 99}, tunemq="7.8.9")
    Journal.create(folder, header).close()
    ours = getattr(HEADER, field)
    for look in (recover, read_header, Journal.resume):
        with pytest.raises(JournalError, match=rf"{named}.* 99 \(TuneMQ 7.8.9\), this is {ours}"):
            look(folder)


def test_record_of_a_newer_tunemq_is_rejected(folder: Path) -> None:
    with Journal.create(folder, HEADER) as journal:
        journal._append(m.encode([[["made-up", 1], []]]))
    with pytest.raises(JournalError, match="does not know, so another version wrote it"):
        list(recover(folder).turns)


def test_recovered_journal_describes_all_its_fields() -> None:
    from tunemq_scheduler.journal.journal_reader import RecoveredJournal

    named = [field.name for field in dataclasses.fields(RecoveredJournal) if field.repr]
    assert [name for name in named if f"{name}:" not in (RecoveredJournal.__doc__ or "")] == []


def test_journal_deleted_while_it_is_written_is_reported_with_its_folder(written) -> None:
    journal, _ = Journal.resume(written)
    with journal:
        shutil.move(written, written.with_name("moved"))
        told = rf"{written} cannot be written: another program removed or moved it"
        with pytest.raises(JournalError, match=told):
            journal.append(TURNS[0])


def test_fifo_in_place_of_a_segment_does_not_block_its_reader(tmp_path):
    folder = tmp_path / "journal"
    folder.mkdir()
    os.mkfifo(folder / "000001.turns")
    with pytest.raises(JournalError, match="it is no regular file"):
        read_header(folder)


@pytest.mark.parametrize("size", [2**40, 2 * 2**20])
def test_s15_file_full_of_marks_in_place_of_a_journal_is_rejected_at_once(tmp_path, size):
    """A trial may have written it, and the farm's scheduler reads it when the search is removed."""
    folder = tmp_path / FILE_NAME
    folder.mkdir()
    path = turns_file(folder, 1)
    path.write_bytes(MARK * (2**20 // len(MARK)))
    os.truncate(path, size)
    with pytest.raises(JournalCorrupt, match="its header"):
        read_header(folder)


def test_whole_frame_behind_very_many_marks_is_found(tmp_path):
    path = tmp_path / "frames"
    path.write_bytes(b"x" + MARK * 600_000 + pack(7, b"whole"))
    assert [frame.payload for frame in all_whole_frames(path)] == [b"whole"]
