"""The copy of a journal in an object store: how it is updated, and how it is restored."""

from __future__ import annotations

import re
import shutil
import threading
from collections.abc import Iterator
from pathlib import Path

import msgspec
import pytest

from tests.support.stores.object_servers import ObjectServer, running_minio
from tests.support.waiting import eventually
from tests.unit.scheduler.journals import (
    HEADER,
    TURNS,
    State,
    after,
    begun,
    state_of,
    take_snapshot,
)
from tunemq_scheduler.base.lease_holder import LeaseHolder
from tunemq_scheduler.cli.main import main
from tunemq_scheduler.experiment import bring_experiment as bringing
from tunemq_scheduler.journal import journal_copy
from tunemq_scheduler.journal.fetch_copy import fetch_journal, has_others, is_copy_ahead
from tunemq_scheduler.journal.journal_copy import JournalCopy
from tunemq_scheduler.journal.journal_files import FILE_NAME
from tunemq_scheduler.journal.journal_reader import recover
from tunemq_scheduler.journal.journal_writer import Journal
from tunemq_scheduler.storage.last_run import RunRecord, read_record
from tunemq_shared.base.errors import BugError, JournalError, RunSuperseded
from tunemq_shared.checkpoints.open_store import open_objects
from tunemq_shared.objects.object_store import NoSuchObject, ObjectInfo, ObjectStore
from tunemq_shared.protocol import messages as m
from tunemq_shared.signing.key_files import journal_signer

pytestmark = pytest.mark.integration

#: Signer of a farm without keys; tests/security/test_s07_forged_journals.py has one with keys.
SIGNER = journal_signer()
PIECE = "000000000000000-000000000000012"


@pytest.fixture
def objects(minio: ObjectServer, bucket: str) -> Iterator[ObjectStore]:
    with minio.objects(bucket, "e") as objects:
        yield objects


@pytest.fixture
def server(tmp_path: Path) -> Iterator[ObjectServer]:
    """A MinIO that a test may stop."""
    with running_minio(tmp_path / "server") as server:
        server.create_bucket("mine")
        yield server


def names(objects: ObjectStore) -> list[str]:
    return [one.key.removeprefix(f"{FILE_NAME}/") for one in objects.list(f"{FILE_NAME}/")]


def is_copied(copied: JournalCopy) -> None:
    eventually(lambda: not copied.is_behind, within=60, message=lambda: f"{copied.notices()}")


def fetched(objects: ObjectStore, folder: Path) -> State:
    return state_of(fetch_journal(objects, folder, SIGNER))


def test_journal_is_copied_to_the_store_at_once_and_can_be_fetched(
    objects: ObjectStore, tmp_path: Path
) -> None:
    state: State = ((), ())
    with Journal.create(tmp_path / "journal", HEADER) as journal:
        copied = JournalCopy(journal, objects, SIGNER)
        for n, turn in enumerate(TURNS):
            if n % 2:
                take_snapshot(journal, state)
            journal.append(turn)
            state = after(state, turn)
            is_copied(copied)
            assert copied.turn == journal.turn == n + 1
            assert fetched(objects, tmp_path / f"fetched{n}") == state
        assert copied.close(within_s=60)
        assert copied.notices() == []
    other, found = Journal.resume(tmp_path / f"fetched{len(TURNS) - 1}")
    with other:
        assert found.header == HEADER
        other.append(TURNS[0])
    # The copy keeps nothing that only older snapshots needed.
    assert {name.split("/")[1].partition(".")[0] for name in names(objects)} == {
        "000003",
        "000004",
        "history",
        "ready",
    }


@pytest.mark.parametrize("left", ["all", "nothing"])
def test_command_brings_the_copy_of_an_ended_search_up_to_date(
    minio: ObjectServer, bucket: str, objects: ObjectStore, tmp_path: Path, capsys, left
) -> None:
    header = msgspec.structs.replace(HEADER, store=minio.address(bucket, "e"))
    with Journal.create(tmp_path / "journal", header) as journal:
        copied = JournalCopy(journal, objects, SIGNER)
        journal.append(TURNS[0])
        assert copied.close(within_s=60)
        journal.append(TURNS[1])  # when the store was backed up, this was not there
    if left == "nothing":
        objects.delete([one.key for one in objects.list()])
    assert main("x", ["journal", "copy", str(tmp_path)]) == 0
    assert "has the journal of" in capsys.readouterr().out
    assert fetched(objects, tmp_path / "fetched") == after(after(((), ()), TURNS[0]), TURNS[1])
    assert main("x", ["journal", "copy", str(tmp_path)]) == 0  # again


def test_copy_fetched_while_it_grows_is_a_state_that_was_written(
    objects: ObjectStore, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(journal_copy, "PERIOD_S", 0.05)
    monkeypatch.setattr(journal_copy, "_MERGED", 4)
    states: list[State] = [((), ())]
    is_over = threading.Event()

    def write(journal: Journal) -> None:
        while not is_over.is_set():
            if len(states) % 7 == 0 and copied.turn > journal.turn - 14:
                take_snapshot(journal, states[-1])
            states.append(after(states[-1], TURNS[len(states) % len(TURNS)]))
            journal.append(TURNS[(len(states) - 1) % len(TURNS)])

    with Journal.create(tmp_path / "journal", HEADER) as journal:
        copied = JournalCopy(journal, objects, SIGNER)
        thread = threading.Thread(target=write, args=(journal,))
        thread.start()
        try:
            for n in range(20):
                eventually(lambda: copied.turn > 5)
                safe = copied.turn
                found = fetch_journal(objects, tmp_path / f"{n}", SIGNER)
                assert found.turn >= safe
                assert state_of(found) == states[found.turn]
        finally:
            is_over.set()
            thread.join()
        assert journal.position.snapshot > 5
        assert copied.close(within_s=60)


def test_pieces_are_uploaded_once_and_small_ones_are_merged(
    objects: ObjectStore, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(journal_copy, "PERIOD_S", 0.001)
    monkeypatch.setattr(journal_copy, "_MERGED", 8)
    put: list[str] = []
    put_bytes = objects.put_bytes
    monkeypatch.setattr(
        objects, "put_bytes", lambda key, data: (put.append(key), put_bytes(key, data))
    )
    with Journal.create(tmp_path / "journal", HEADER) as journal:
        copied = JournalCopy(journal, objects, SIGNER)
        for _ in range(20):
            journal.append(TURNS[0])
            is_copied(copied)
        assert copied.close(within_s=60)
    assert len(put) == len(set(put))
    pieces = [name for name in names(objects) if ".turns/" in name]
    assert len(pieces) < 10
    assert fetch_journal(objects, tmp_path / "fetched", SIGNER).turn == 20


def test_copy_is_ahead_only_of_an_older_undamaged_journal(
    objects: ObjectStore, tmp_path: Path
) -> None:
    folder, backup = tmp_path / "journal", tmp_path / "backup"
    assert not is_copy_ahead(objects, folder, SIGNER)  # there is none
    with Journal.create(folder, HEADER) as journal:
        copied = JournalCopy(journal, objects, SIGNER)
        journal.append(TURNS[0])
        is_copied(copied)
        shutil.copytree(folder, backup)
        journal.append(TURNS[1])
        assert copied.close(within_s=60)
        journal.append(TURNS[2])
    assert not is_copy_ahead(objects, folder, SIGNER)
    assert is_copy_ahead(objects, backup, SIGNER)
    objects.delete([one.key for one in objects.list(FILE_NAME) if ".turns/" in one.key][:1])
    assert not is_copy_ahead(objects, backup, SIGNER)


def test_copy_of_another_search_has_others_than_a_journal_without_its_first_turns(
    objects: ObjectStore, tmp_path: Path
) -> None:
    """No turn of the copy can be compared: a snapshot replaced those of the journal."""
    begun(tmp_path / "first", TURNS, snapshot_before=(4,))
    header = msgspec.structs.replace(HEADER, experiment_id="another")
    with Journal.create(tmp_path / "second", header) as journal:
        copied = JournalCopy(journal, objects, SIGNER)
        journal.append(TURNS[0])
        assert copied.close(within_s=60)

    assert has_others(objects, tmp_path / "first", SIGNER)
    assert not has_others(objects, tmp_path / "second", SIGNER)


def copy_of_many_pieces(journal: Journal, objects: ObjectStore, turns: int = 4) -> JournalCopy:
    """Make a copy in which each turn is a separate object."""
    copied = JournalCopy(journal, objects, SIGNER)
    for n in range(turns):
        journal.append(TURNS[n])
        is_copied(copied)
    return copied


def pieces(objects: ObjectStore, file: str = ".turns") -> list[str]:
    return [one.key for one in objects.list(f"{FILE_NAME}/") if f"{file}/" in one.key]


def lose(objects: ObjectStore, key: str, how: str = "gone") -> None:
    """Damage an object, as a power cut of the store's machine may do."""
    if how == "gone":
        objects.delete([key])
    else:
        objects.put_bytes(key, objects.get_bytes(key, limit=2**20)[:-1] if how == "short" else b"")


@pytest.mark.parametrize("until", [2, 99], ids=["for a moment", "for good"])
def test_piece_missing_in_two_listings_counts_as_lost(
    objects: ObjectStore, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, until: int
) -> None:
    with Journal.create(tmp_path / "journal", HEADER) as journal:
        assert copy_of_many_pieces(journal, objects).close(within_s=60)
    listed, looks = objects.list, 0

    def lacks_one(prefix: str) -> list[ObjectInfo]:
        """Omit an object that just became part of a longer one, which only the next list has."""
        nonlocal looks
        looks += 1
        found = list(listed(prefix))
        *_, third, _ = [one for one in found if ".turns/" in one.key]
        return [one for one in found if looks >= until or one is not third]

    monkeypatch.setattr(objects, "list", lacks_one)
    found = fetch_journal(objects, tmp_path / "fetched", SIGNER)
    assert looks == 2
    if until == 2:
        assert (found.turn, found.lost) == (4, "")
    else:
        assert found.turn == 2
        assert re.search(
            r"lacks bytes \d+ to \d+ of 000001.turns.* up to turn 2; 1 whole turn behind",
            found.lost,
        )


@pytest.mark.parametrize("how", ["gone", "short", "empty"])
def test_copy_is_fetched_up_to_the_piece_that_the_store_lost(
    objects: ObjectStore, tmp_path: Path, how: str
) -> None:
    with Journal.create(tmp_path / "journal", HEADER) as journal:
        assert copy_of_many_pieces(journal, objects).close(within_s=60)
    lose(objects, pieces(objects)[-2], how)
    found = fetch_journal(objects, tmp_path / "fetched", SIGNER)
    assert state_of(found) == after(after(((), ()), TURNS[0]), TURNS[1])
    assert "up to turn 2" in found.lost
    other, _ = Journal.resume(tmp_path / "fetched")
    with other:
        other.append(TURNS[0])
    lose(objects, pieces(objects)[0])
    with pytest.raises(
        JournalError, match=r"lacks bytes 0 to \d+ of 000001.turns.*cannot be used: restore"
    ):
        fetch_journal(objects, tmp_path / "nothing", SIGNER)


@pytest.mark.parametrize("file", ["000004.snapshot", "000003.turns", "000004.turns", "history"])
def test_copy_with_a_lost_file_is_fetched_from_another_generation(
    objects: ObjectStore, tmp_path: Path, file: str
) -> None:
    state: State = ((), ())
    with Journal.create(tmp_path / "journal", HEADER) as journal:
        copied = JournalCopy(journal, objects, SIGNER)
        for n, turn in enumerate(TURNS):
            if n % 2:
                take_snapshot(journal, state)
            journal.append(turn)
            state = after(state, turn)
            is_copied(copied)
        assert copied.close(within_s=60)
    if file == "history":  # its last piece
        lose(objects, pieces(objects, file)[-1])
    else:
        objects.delete(pieces(objects, file))
    found = fetch_journal(objects, tmp_path / "fetched", SIGNER)
    # If a snapshot or segment is missing, another generation has its turns, except for the last
    # ones.
    assert found.turn == len(TURNS) - (file == "000004.turns")
    assert ("damaged" in found.lost) == (file == "history")


@pytest.mark.parametrize("how", ["gone", "short", "empty"])
def test_pieces_lost_while_the_store_was_away_are_sent_again(
    server: ObjectServer, tmp_path: Path, how: str
) -> None:
    with (
        server.objects("mine", "e") as objects,
        Journal.create(tmp_path / "journal", HEADER) as journal,
    ):
        copied = copy_of_many_pieces(journal, objects)
        lose(objects, pieces(objects)[-2], how)
        lose(objects, f"{FILE_NAME}/000001/ready")
        server.kill()
        journal.append(TURNS[4])
        notices: list[str] = []
        eventually(lambda: notices.extend(copied.notices()) or notices)
        server.start()
        is_copied(copied)
        notices += copied.notices()
        assert any("lost 2 pieces" in one and "sent again" in one for one in notices), notices
        found = fetch_journal(objects, tmp_path / "fetched", SIGNER)
        assert (found.turn, found.lost) == (5, "")
        assert copied.close(within_s=60)
        assert copied.notices() == []


@pytest.mark.parametrize("at_close", [False, True])
def test_pieces_that_the_store_lost_silently_are_sent_again(
    objects: ObjectStore, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, at_close: bool
) -> None:
    monkeypatch.setattr(journal_copy, "LOOK_S", 1e9 if at_close else 0.01)
    with Journal.create(tmp_path / "journal", HEADER) as journal:
        copied = copy_of_many_pieces(journal, objects)
        before = names(objects)
        lose(objects, pieces(objects)[-2])
        if not at_close:
            eventually(lambda: names(objects) == before)
        assert copied.close(within_s=60)
        assert names(objects) == before


def test_large_append_is_copied_in_pieces(objects: ObjectStore, tmp_path: Path) -> None:
    big = [m.JournalRecord(m.NodeWarned("n" * 300_000))]
    with Journal.create(tmp_path / "journal", HEADER) as journal:
        for _ in range(40):
            journal.append(big)
        copied = JournalCopy(journal, objects, SIGNER)
        assert copied.close(within_s=60)
    sizes = [one.size for one in objects.list(f"{FILE_NAME}/") if ".turns/" in one.key]
    assert len(sizes) > 2
    assert max(sizes) <= 4 * 2**20 + 1  # the rest is the head of the signed object
    assert list(fetch_journal(objects, tmp_path / "fetched", SIGNER).turns) == [big] * 40


def test_reopened_journal_gets_a_new_copy_and_then_the_old_one_is_removed(
    objects: ObjectStore, tmp_path: Path
) -> None:
    folder = tmp_path / "journal"
    states = begun(folder, TURNS)
    journal, _ = Journal.resume(folder)
    with journal:
        assert JournalCopy(journal, objects, SIGNER).close(within_s=60)
    first = names(objects)
    assert {name.split("/")[0] for name in first} == {"000001"}
    journal, _ = Journal.resume(folder)
    with journal:
        journal.append(TURNS[0])
        assert JournalCopy(journal, objects, SIGNER).close(within_s=60)
    assert {name.split("/")[0] for name in names(objects)} == {"000002"}
    # Late writes of the old scheduler to its old copy change nothing.
    for name in first:
        objects.put_bytes(f"{FILE_NAME}/{name}", b"late")
    assert fetched(objects, tmp_path / "fetched") == after(states[-1], TURNS[0])


def test_incomplete_copy_does_not_count(objects: ObjectStore, tmp_path: Path) -> None:
    folder = tmp_path / "journal"
    states = begun(folder, TURNS)
    journal, _ = Journal.resume(folder)
    with journal:
        assert JournalCopy(journal, objects, SIGNER).close(within_s=60)
    objects.put_bytes(f"{FILE_NAME}/000002/000003.snapshot/{PIECE}", b"half a copy")
    assert fetched(objects, tmp_path / "fetched") == states[-1]


def test_snapshot_without_its_segment_does_not_count(objects: ObjectStore, tmp_path: Path) -> None:
    with Journal.create(tmp_path / "journal", HEADER) as journal:
        copied = JournalCopy(journal, objects, SIGNER)
        journal.append(TURNS[0])
        assert copied.close(within_s=60)
    objects.put_bytes(f"{FILE_NAME}/000001/000002.snapshot/{PIECE}", b"it has just been put")
    assert fetched(objects, tmp_path / "fetched") == after(((), ()), TURNS[0])


def test_store_outage_does_not_block_the_writer_and_is_reported_once(
    server: ObjectServer, tmp_path: Path
) -> None:
    with (
        server.objects("mine", "e") as objects,
        Journal.create(tmp_path / "journal", HEADER) as journal,
    ):
        copied = JournalCopy(journal, objects, SIGNER)
        journal.append(TURNS[0])
        is_copied(copied)
        server.kill()
        for turn in TURNS:
            journal.append(turn)
        notices: list[str] = []
        eventually(lambda: notices.extend(copied.notices()) or notices)
        assert "the copy of the journal waits for its store" in notices[0]
        assert copied.turn == 1
        server.start()
        is_copied(copied)
        eventually(lambda: notices.extend(copied.notices()) or len(notices) > 1)
        assert notices[1:] == ["the copy of the journal continues"]
        assert copied.close(within_s=60)
        assert fetch_journal(objects, tmp_path / "fetched", SIGNER).turn == len(TURNS) + 1


def test_close_does_not_wait_for_a_store_that_is_away(server: ObjectServer, tmp_path: Path) -> None:
    with (
        server.objects("mine", "e") as objects,
        Journal.create(tmp_path / "journal", HEADER) as journal,
    ):
        server.kill()
        journal.append(TURNS[0])
        copied = JournalCopy(journal, objects, SIGNER)
        assert not copied.close(within_s=0.5)
        assert copied.turn == 0


def test_waiting_caller_is_called_when_the_copy_has_grown(
    objects: ObjectStore, tmp_path: Path
) -> None:
    called = threading.Event()
    with Journal.create(tmp_path / "journal", HEADER) as journal:
        copied = JournalCopy(journal, objects, SIGNER, copied=called.set)
        journal.append(TURNS[0])
        assert called.wait(60)
        assert copied.close(within_s=60)


def test_exception_in_the_copy_thread_is_raised_to_the_caller_of_its_notices(
    objects: ObjectStore, tmp_path: Path
) -> None:
    def fails() -> None:
        raise ValueError("a defect")

    with Journal.create(tmp_path / "journal", HEADER) as journal:
        copied = JournalCopy(journal, objects, SIGNER, copied=fails)
        copied.close(within_s=60)
        with pytest.raises(BugError, match="a defect"):
            copied.notices()


def test_copy_is_fetched_only_into_an_empty_folder_and_only_if_complete(
    objects: ObjectStore, tmp_path: Path
) -> None:
    with pytest.raises(NoSuchObject, match="there is no copy of a journal"):
        fetch_journal(objects, tmp_path / "none", SIGNER)
    folder = tmp_path / "journal"
    begun(folder, TURNS)
    journal, _ = Journal.resume(folder)
    with journal:
        assert JournalCopy(journal, objects, SIGNER).close(within_s=60)
    with pytest.raises(JournalError, match="is not empty"):
        fetch_journal(objects, folder, SIGNER)
    (piece,) = [one for one in objects.list(f"{FILE_NAME}/") if ".turns/" in one.key]
    whole = objects.get_bytes(piece.key, limit=2**20)
    objects.put_bytes(piece.key, whole[:200] + b"!" + whole[201:])
    with pytest.raises(JournalError, match=r"damaged at byte 0.*cannot be used"):
        fetch_journal(objects, tmp_path / "damaged", SIGNER)
    objects.put_bytes(piece.key, whole[:-1])
    with pytest.raises(JournalError, match=r"lacks bytes 0 to \d+ of 000003.turns.*cannot be used"):
        fetch_journal(objects, tmp_path / "damaged", SIGNER)
    assert not list((tmp_path / "damaged").iterdir())
    assert recover(folder).turn == len(TURNS)


@pytest.mark.parametrize("profile", ["", "ada"])
def test_journal_copy_rotated_keys_are_read_again(
    server: ObjectServer, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, profile: str
) -> None:
    file = tmp_path / "credentials"

    def write_keys() -> None:
        file.write_text(
            f"[{profile or 'default'}]\naws_access_key_id = {server.access_key}\n"
            f"aws_secret_access_key = {server.secret_key}\n"
        )

    write_keys()
    monkeypatch.setenv("AWS_SHARED_CREDENTIALS_FILE", str(file))
    address = server.address("mine", "e", **({"profile": profile} if profile else {}))
    with open_objects(address) as objects, Journal.create(tmp_path / "journal", HEADER) as journal:
        copied = JournalCopy(journal, objects, SIGNER)
        journal.append(TURNS[0])
        is_copied(copied)
        server.stop()
        server.secret_key = "r" * 40
        server.start()
        journal.append(TURNS[1])
        said: list[str] = []
        eventually(lambda: said.extend(copied.notices()) or "does not know these keys" in str(said))
        write_keys()
        is_copied(copied)
        assert copied.close(within_s=60)


def test_superseded_run_neither_hides_nor_removes_the_copy_of_the_later_one(
    objects: ObjectStore, tmp_path: Path
) -> None:
    def check() -> None:
        raise RunSuperseded

    for name in ("later", "earlier"):
        with Journal.create(tmp_path / name, HEADER) as journal:
            for turn in TURNS[: 2 if name == "later" else 1]:
                journal.append(turn)
            is_later = name == "later"
            copied = JournalCopy(
                journal, objects, SIGNER, check=(lambda: None) if is_later else check
            )
            assert copied.close(within_s=60) is is_later
            assert copied.notices() == []
    assert fetched(objects, tmp_path / "fetched") == after(after(((), ()), TURNS[0]), TURNS[1])


def test_interrupted_fetch_of_a_search_can_be_repeated(
    objects: ObjectStore, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The journal appears last, with the record of the last run: both count only together."""
    with Journal.create(tmp_path / "search", HEADER) as journal:
        for turn in TURNS:
            journal.append(turn)
        assert JournalCopy(journal, objects, SIGNER).close(within_s=60)
    objects.put_bytes("tuner.pkl/forged", b"x")  # a worker's key may write it
    holder = LeaseHolder.this_process()
    record = RunRecord(holder=holder, term=3, run=1, is_warm=True, events_key="tunemq:events:x")
    monkeypatch.setattr(bringing, "open_objects", lambda _address: objects)
    folder = tmp_path / "brought"

    def cut_off(*_: object) -> None:
        raise KeyboardInterrupt

    with monkeypatch.context() as patch:
        patch.setattr(bringing, "write_record", cut_off)
        with pytest.raises(KeyboardInterrupt):
            bringing.bring_experiment("s3://unused", str(folder), SIGNER, record)
    assert not (folder / FILE_NAME).exists()

    assert bringing.bring_experiment("s3://unused", str(folder), SIGNER, record) == ""
    assert recover(folder / FILE_NAME).turn == len(TURNS)
    assert read_record(str(folder)) == record
    assert [one.name for one in folder.iterdir()] == [FILE_NAME]


def test_copy_keeps_the_turns_before_a_snapshot_until_it_may_begin_with_it(
    objects: ObjectStore, tmp_path: Path
) -> None:
    """The results in these turns may be in no file of the store yet."""
    allowed = 0
    state: State = ((), ())
    with Journal.create(tmp_path / "journal", HEADER) as journal:
        copied = JournalCopy(journal, objects, SIGNER, may_copy=lambda number: number <= allowed)
        is_copied(copied)
        for turn in TURNS:
            journal.append(turn)
            is_copied(copied)
            take_snapshot(journal, state)
        assert not any("snapshot" in name for name in names(objects))
        found = fetch_journal(objects, tmp_path / "all", SIGNER)
        assert (found.turn, len(list(found.turns))) == (len(TURNS), len(TURNS))

        allowed = journal.position.snapshot
        journal.append(TURNS[0])
        eventually(lambda: any("snapshot" in name for name in names(objects)))
        assert copied.close()
    found = fetch_journal(objects, tmp_path / "rest", SIGNER)
    assert (found.turn, len(list(found.turns))) == (len(TURNS) + 1, 1)


def test_copy_that_lacks_removed_turns_continues_with_a_snapshot_once_the_store_has_their_results(
    server: ObjectServer, tmp_path: Path
) -> None:
    """The store is away while the journal takes two snapshots, and removes turns before them."""
    allowed = 0
    with server.objects("mine", "e") as objects, Journal.create(tmp_path / "j", HEADER) as journal:
        copied = JournalCopy(journal, objects, SIGNER, may_copy=lambda number: number <= allowed)
        journal.append(TURNS[0])
        is_copied(copied)
        state = take_snapshots_while_it_is_away(server, journal)
        said: list[str] = []

        def waits() -> bool:
            said.extend(copied.notices())
            return any("waits until the results" in text for text in said)

        eventually(waits)
        assert copied.is_behind
        assert copied.behind_s > 0
        allowed = journal.position.snapshot
        is_copied(copied)
        assert copied.close(within_s=60)
        assert fetched(objects, tmp_path / "fetched") == state


def test_copy_that_lacks_removed_turns_is_completed_at_its_end_whatever_the_store_has(
    server: ObjectServer, tmp_path: Path
) -> None:
    with server.objects("mine", "e") as objects, Journal.create(tmp_path / "j", HEADER) as journal:
        copied = JournalCopy(journal, objects, SIGNER, may_copy=lambda _number: False)
        journal.append(TURNS[0])
        is_copied(copied)
        state = take_snapshots_while_it_is_away(server, journal)
        assert copied.close(within_s=60)
        assert any("the store lacks results before it" in text for text in copied.notices())
        assert fetched(objects, tmp_path / "fetched") == state


def take_snapshots_while_it_is_away(server: ObjectServer, journal: Journal) -> State:
    server.stop()
    state = after(((), ()), TURNS[0])
    for turn in TURNS[1:4]:
        journal.append(turn)
        state = after(state, turn)
        take_snapshot(journal, state)
    server.start()
    return state
