"""S07: the copy of a journal in a store is the scheduler's, or nothing in it is believed or run."""

from __future__ import annotations

import os
import shutil
from collections.abc import Iterator
from pathlib import Path

import msgspec
import pytest

from tests.support.commands import run_tunemq
from tests.support.keys import a_key, key_folder, of_scheduler, of_worker
from tests.support.stores.object_servers import ObjectServer
from tests.support.waiting import eventually
from tests.unit.scheduler.journals import HEADER, TURNS
from tunemq_scheduler.base.lease_holder import LeaseHolder
from tunemq_scheduler.experiment.bring_experiment import bring_experiment
from tunemq_scheduler.journal.copy_layout import CopiedObject, parse_key
from tunemq_scheduler.journal.fetch_copy import fetch_journal
from tunemq_scheduler.journal.journal_copy import JournalCopy
from tunemq_scheduler.journal.journal_files import FILE_NAME
from tunemq_scheduler.journal.journal_writer import Journal
from tunemq_scheduler.settings.saved_tuner import TUNER_FILE
from tunemq_scheduler.storage.last_run import RunRecord, store_record, stored_record
from tunemq_shared.base.errors import ConfigError, JournalError
from tunemq_shared.code.config_packing import PICKLED
from tunemq_shared.objects.object_store import NoSuchObject, ObjectStore
from tunemq_shared.protocol import messages as m
from tunemq_shared.signing.key_files import journal_signer
from tunemq_shared.signing.message_signing import MessageSigner

pytestmark = [pytest.mark.integration, pytest.mark.security]

SEARCH = "digits"


class Planted:
    """A value that creates a file when it is unpickled."""

    def __init__(self, trace: Path) -> None:
        self.trace = trace

    def __reduce__(self) -> tuple[object, tuple[str]]:
        return os.mkdir, (str(self.trace),)


@pytest.fixture
def objects(minio: ObjectServer, bucket: str) -> Iterator[ObjectStore]:
    with minio.objects(bucket, f"farm/{SEARCH}") as objects:
        yield objects


@pytest.fixture
def message_signer(tmp_path: Path) -> MessageSigner:
    keys = of_scheduler(key_folder(tmp_path / "keys"))
    return journal_signer(keys.journal_keys(SEARCH))


def turns_with(planted: Planted) -> list[list[m.JournalRecord]]:
    import cloudpickle

    value = msgspec.msgpack.Ext(PICKLED, cloudpickle.dumps(planted))
    config = msgspec.msgpack.encode({"lr": value})
    return [[m.JournalRecord(m.ConfigSuggested(0, "abc_00000", config, "", {"cpu": 1.0}))]]


def copied(
    objects: ObjectStore,
    folder: Path,
    message_signer: MessageSigner,
    turns: list[list[m.JournalRecord]] = TURNS,
) -> None:
    """Make a copy of a journal with these turns."""
    folder.mkdir(parents=True)
    (folder / TUNER_FILE).write_bytes(b"the tuner")
    with Journal.create(folder / FILE_NAME, HEADER) as journal:
        for turn in turns:
            journal.append(turn)
        copy = JournalCopy(journal, objects, message_signer)
        assert copy.close(within_s=60)


def all_of(objects: ObjectStore) -> dict[str, bytes]:
    return {
        one.key: objects.get_bytes(one.key, limit=2**20) for one in objects.list(f"{FILE_NAME}/")
    }


def put_all(objects: ObjectStore, content: dict[str, bytes]) -> None:
    for key, data in content.items():
        objects.put_bytes(key, data)


def test_s07_signed_copy_is_fetched_with_the_key_and_shown_without(
    objects: ObjectStore, tmp_path: Path, message_signer: MessageSigner
):
    copied(objects, tmp_path / "search", message_signer)
    assert fetch_journal(objects, tmp_path / "with", message_signer).turn == len(TURNS)
    assert fetch_journal(objects, tmp_path / "without", journal_signer()).turn == len(TURNS)


@pytest.mark.parametrize("signs", ["nobody", "another key", "another search", "a worker's key"])
def test_s07_forged_copy_with_a_greater_number_is_refused(
    objects: ObjectStore, tmp_path: Path, message_signer: MessageSigner, signs: str
):
    folder = key_folder(tmp_path / "others")
    forger = {
        "nobody": journal_signer(),
        "another key": journal_signer([a_key()]),
        "another search": journal_signer(of_scheduler(folder).journal_keys("another")),
        "a worker's key": MessageSigner("journals", [of_worker(folder)._file.orders[0]]),
    }[signs]
    copied(objects, tmp_path / "search", message_signer)
    trace = tmp_path / "trace"
    copied(objects, tmp_path / "forged", forger, turns_with(Planted(trace)))
    assert {key.split("/")[1] for key in all_of(objects)} == {"000002"}
    with pytest.raises(JournalError, match=r"cannot be trusted.*journal/000002/ready"):
        fetch_journal(objects, tmp_path / "fetched", message_signer)
    with pytest.raises(JournalError, match=r"cannot be trusted.*last heard \d+ s ago"):
        bring_experiment_from(objects, tmp_path / "brought", message_signer)
    assert not trace.exists()


def bring_experiment_from(
    objects: ObjectStore, folder: Path, message_signer: MessageSigner
) -> None:
    """As `--take-over` does."""
    from tunemq_scheduler.experiment import bring_experiment as bringing

    with pytest.MonkeyPatch.context() as patched:
        patched.setattr(bringing, "open_objects", lambda _address: objects)
        bring_experiment("s3://unused/farm/digits", str(folder), message_signer)


@pytest.mark.parametrize("spelling", ["0000009", "9", "00009", "000009 ", "+00009", "000000"])
def test_s07_copy_with_a_misspelt_name_is_ignored(
    objects: ObjectStore, tmp_path: Path, spelling: str
):
    none = journal_signer()
    copied(objects, tmp_path / "search", none, TURNS[:2])
    ours = all_of(objects)
    copied(objects, tmp_path / "forged", none, TURNS)
    forged = all_of(objects)
    objects.delete(forged)
    put_all(objects, ours)
    put_all(objects, {key.replace("000002", spelling, 1): data for key, data in forged.items()})
    assert fetch_journal(objects, tmp_path / "fetched", none).turn == 2
    # Nor does it move the number of the next copy, nor is it removed with older ones.
    copied(objects, tmp_path / "next", none, TURNS)
    assert fetch_journal(objects, tmp_path / "after", none).turn == len(TURNS)
    assert f"{FILE_NAME}/000002/ready" in all_of(objects)


def test_s07_copies_are_counted_beyond_six_digits(objects: ObjectStore, tmp_path: Path):
    none = journal_signer()
    objects.put_bytes(f"{FILE_NAME}/999999/ready", b"\0abc")
    copied(objects, tmp_path / "search", none)
    assert f"{FILE_NAME}/1000000/ready" in all_of(objects)
    assert fetch_journal(objects, tmp_path / "fetched", none).turn == len(TURNS)


@pytest.mark.parametrize("change", ["bit", "moved", "of another copy", "of an older search"])
def test_s07_signed_piece_that_was_changed_or_moved_is_refused(
    objects: ObjectStore, tmp_path: Path, message_signer: MessageSigner, change: str
):
    copied(objects, tmp_path / "old", message_signer, TURNS[:3])
    old = all_of(objects)
    copied(objects, tmp_path / "search", message_signer)
    (turns,) = [key for key in all_of(objects) if ".turns/" in key]
    content = all_of(objects)[turns]
    if change == "bit":
        objects.put_bytes(turns, content[:-1] + bytes([content[-1] ^ 1]))
    elif change == "moved":
        objects.delete([turns])
        objects.put_bytes(turns.replace("000001.turns", "000002.turns"), content)
        objects.put_bytes(turns, content[:41] + content[41:][::-1])
    elif change == "of another copy":
        older = next(data for key, data in old.items() if ".turns/" in key)
        objects.delete([turns])
        name = f"{turns.rpartition('/')[0]}/{0:015d}-{len(older) - 41:015d}"
        objects.put_bytes(name, older)
    else:
        header = msgspec.structs.replace(HEADER, experiment_id="an older one")
        ready = CopiedObject(2, "ready")
        objects.put_bytes(
            ready.key, message_signer.close(header.experiment_id.encode(), b"", ready.name.encode())
        )
    with pytest.raises(JournalError, match=r"cannot be trusted|was altered"):
        fetch_journal(objects, tmp_path / "fetched", message_signer)


def test_s07_forged_piece_is_refused_where_the_store_lost_another_one(
    objects: ObjectStore, tmp_path: Path, message_signer: MessageSigner
):
    (tmp_path / "search").mkdir()
    with Journal.create(tmp_path / "search" / FILE_NAME, HEADER) as journal:
        copy = JournalCopy(journal, objects, message_signer)
        for turn in TURNS[:4]:
            journal.append(turn)
            eventually(lambda: not copy.is_behind)
        assert copy.close(within_s=60)
    *_, lost, last = (key for key in all_of(objects) if ".turns/" in key)
    content = all_of(objects)[last]
    objects.delete([lost])
    objects.put_bytes(last, content[:-1] + bytes([content[-1] ^ 1]))
    with pytest.raises(JournalError, match=r"cannot be trusted|was altered"):
        fetch_journal(objects, tmp_path / "fetched", message_signer)
    objects.put_bytes(last, content)
    assert fetch_journal(objects, tmp_path / "up to there", message_signer).turn == 2


def test_s07_copy_signed_with_a_key_that_was_dropped_is_refused_and_the_next_one_is_not(
    objects: ObjectStore, tmp_path: Path
):
    keys = key_folder(tmp_path / "keys")

    def sign_now() -> MessageSigner:
        return journal_signer(of_scheduler(keys).journal_keys(SEARCH))

    copied(objects, tmp_path / "before", sign_now(), TURNS[:2])
    older = all_of(objects)
    keys.rotate(["journals"])
    keys.promote(["journals"])
    assert fetch_journal(objects, tmp_path / "older", sign_now()).turn == 2
    copied(objects, tmp_path / "after", sign_now())
    keys.drop(["journals"])
    assert fetch_journal(objects, tmp_path / "newer", sign_now()).turn == len(TURNS)
    objects.delete(all_of(objects))
    put_all(objects, older)
    with pytest.raises(JournalError, match="cannot be trusted"):
        fetch_journal(objects, tmp_path / "gone", sign_now())


def test_s07_journal_files_beside_the_copy_count_for_no_scheduler(
    objects: ObjectStore, tmp_path: Path, message_signer: MessageSigner
):
    copied(objects, tmp_path / "search", message_signer, TURNS[:2])
    with Journal.create(tmp_path / FILE_NAME, HEADER) as journal:
        for turn in TURNS:
            journal.append(turn)
    for path in journal.folder.iterdir():
        objects.put_bytes(f"{FILE_NAME}/{path.name}", path.read_bytes())
    assert fetch_journal(objects, tmp_path / "without", journal_signer()).turn == 2
    assert fetch_journal(objects, tmp_path / "with", message_signer).turn == 2
    objects.delete([key for key in all_of(objects) if parse_key(key) is not None])
    with pytest.raises(NoSuchObject, match="no signed copy"):
        fetch_journal(objects, tmp_path / "none", message_signer)


def test_s07_tuner_comes_from_the_signed_copy_and_not_from_beside_it(
    objects: ObjectStore, tmp_path: Path, message_signer: MessageSigner
):
    copied(objects, tmp_path / "search", message_signer)
    objects.put_bytes(TUNER_FILE, b"planted")
    objects.put_bytes(".blobs/planted", b"planted")
    objects.put_bytes("abc_00000/result.json", b"{}")
    bring_experiment_from(objects, tmp_path / "brought", message_signer)
    assert (tmp_path / "brought" / TUNER_FILE).read_bytes() == b"the tuner"
    assert not (tmp_path / "brought" / ".blobs").exists()
    objects.delete([key for key in all_of(objects) if f"/{TUNER_FILE}/" in key])
    shutil.rmtree(tmp_path / "brought")
    bring_experiment_from(objects, tmp_path / "brought", message_signer)
    assert not (tmp_path / "brought" / TUNER_FILE).exists()


def test_s07_forged_record_of_the_last_run_is_refused(
    objects: ObjectStore, tmp_path: Path, message_signer: MessageSigner
):
    record = RunRecord(holder=LeaseHolder.this_process(), term=1, run=1, is_warm=False)
    store_record(objects, record, message_signer)
    assert stored_record(objects, message_signer) == record
    for forger in (journal_signer(), journal_signer([a_key()])):
        store_record(objects, msgspec.structs.replace(record, term=2**60), forger)
        with pytest.raises(JournalError, match="the scheduler of this farm did not write it"):
            stored_record(objects, message_signer)


def test_s07_commands_that_read_a_forged_journal_run_nothing_of_it(
    minio: ObjectServer,
    bucket: str,
    objects: ObjectStore,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
):
    keys = key_folder(tmp_path / "keys")
    message_signer = journal_signer(of_scheduler(keys).journal_keys(SEARCH))
    trace = tmp_path / "trace"
    copied(objects, tmp_path / "forged", journal_signer(), turns_with(Planted(trace)))
    address = minio.address(bucket, f"farm/{SEARCH}")
    commands = (
        ("journal", "show", address),
        ("journal", "check", address),
        ("checkpoints", "list", address),
    )
    for name, value in minio.environ.items():
        monkeypatch.setenv(name, value)
    for command in commands:
        run_tunemq(tmp_path, *command)
    monkeypatch.setenv("TUNEMQ_KEYS", str(keys.path / "scheduler.toml"))
    for command in commands:
        rejected = run_tunemq(tmp_path, *command, code=64)
        assert "cannot be trusted" in rejected.stderr, command
    assert not trace.exists()
    copied(objects, tmp_path / "search", message_signer)
    assert "SlotFreed" in run_tunemq(tmp_path, "journal", "show", address).stdout


def test_s07_key_of_journals_is_in_no_file_but_the_schedulers(tmp_path: Path):
    folder = key_folder(tmp_path / "keys", "ada")
    for path in folder.path.glob("*.toml"):
        assert ("[journals]" in path.read_text()) == (path.name == "scheduler.toml")
    worker = folder.path / "worker.toml"
    farm, _, _submitters = (folder.path / "scheduler.toml").read_text().partition("[submitters")
    worker.write_text(farm)
    with pytest.raises(ConfigError, match=r"\[journals\], which are the scheduler's alone"):
        of_worker(folder)


@pytest.mark.parametrize("is_signed", [True, False])
def test_s07_states_of_callbacks_are_not_taken_from_the_store_of_a_farm_with_keys(
    objects: ObjectStore, tmp_path: Path, message_signer: MessageSigner, is_signed: bool
):
    signer = message_signer if is_signed else journal_signer()
    copied(objects, tmp_path / "search", signer)
    objects.put_bytes("tuner.pkl", b"the tuner")
    objects.put_bytes("callbacks.json", b"{}")
    bring_experiment_from(objects, tmp_path / "brought", signer)
    assert (tmp_path / "brought" / "callbacks.json").exists() is not is_signed


def test_s07_folder_of_a_workers_name_gives_way_to_the_searchs_file(
    objects: ObjectStore, tmp_path: Path
):
    copied(objects, tmp_path / "search", journal_signer())
    objects.put_bytes("tuner.pkl", b"the tuner")
    objects.put_bytes("trial/params.json/attempt_1/x", b"first")
    brought = tmp_path / "brought"
    bring_experiment_from(objects, brought, journal_signer())
    objects.put_bytes("trial/params.json", b"{}")
    shutil.rmtree(brought / FILE_NAME)
    bring_experiment_from(objects, brought, journal_signer())
    assert (brought / "trial" / "params.json").read_bytes() == b"{}"
