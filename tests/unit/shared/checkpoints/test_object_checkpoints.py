"""The commit protocol on an object store: which objects are sent and remain, in which order."""

from __future__ import annotations

import hashlib
import json
import os
import shutil
from pathlib import Path
from types import SimpleNamespace

import pytest

from tests.simulation.memory_objects import MemoryObjects
from tests.support.searches.checkpoints import KEY, contents, fill, info, put
from tunemq_shared.base import retrying
from tunemq_shared.base.errors import CheckpointCorrupt, StoreError
from tunemq_shared.base.retrying import CancelToken, StoreUnavailable, TransferCancelled
from tunemq_shared.checkpoints import object_checkpoints
from tunemq_shared.checkpoints.local_store import LocalCheckpointStore
from tunemq_shared.checkpoints.manifest import COMMITTED, FileEntry, make_manifest, parse_manifest
from tunemq_shared.checkpoints.object_checkpoints import (
    TIMEOUT_S,
    UploadedCheckpoint,
    collect,
    delete_checkpoint,
    delete_objects,
    download,
    list_checkpoints,
    read_manifest,
    upload,
)
from tunemq_shared.objects.object_client import StoreRequestDenied
from tunemq_shared.objects.object_store import ObjectInfo

NEXT = "train_0/checkpoint_1-000002"
OTHER = "train_1/checkpoint_1-000001"


class Recorded(MemoryObjects):
    """Records the writes in order, and fails on request."""

    def __init__(self) -> None:
        super().__init__()
        self.written: list[str] = []
        self.fail_at: str | None = None
        self.failures = 0

    def put_bytes(self, key: str, data: bytes) -> None:
        if self.failures and self.fail_at is not None and key.endswith(self.fail_at):
            self.failures -= 1
            raise StoreUnavailable(f"{key} cannot be written now.")
        super().put_bytes(key, data)
        self.written.append(key)


@pytest.fixture
def objects() -> Recorded:
    return Recorded()


@pytest.fixture
def cache(tmp_path: Path) -> LocalCheckpointStore:
    (tmp_path / "cache").mkdir()
    return LocalCheckpointStore(tmp_path / "cache", durable=False)


def write(cache: LocalCheckpointStore, key: str = KEY, **files: bytes) -> Path:
    """Write a checkpoint with these files into the cache."""
    source = cache.root.parent / f"source-{os.urandom(4).hex()}"
    source.mkdir(parents=True)
    for name, data in files.items():
        (source / name).write_bytes(data)
    put(cache, source, key, state={"key": key})
    return cache.root / key


def send(objects: MemoryObjects, folder: Path, base: Path | None = None) -> UploadedCheckpoint:
    key = f"{folder.parent.name}/{folder.name}"
    return upload(objects, key, folder, base and base / "committed.json", CancelToken(60))


def name(data: bytes) -> str:
    return hashlib.sha256(data).hexdigest()


@pytest.mark.parity(114)
def test_files_are_sent_first_and_the_manifest_last(objects, cache):
    folder = write(cache, a=b"1", b=b"2")
    sent = send(objects, folder)
    assert set(objects.written[:-1]) == {f"{KEY}/{name(b'1')}", f"{KEY}/{name(b'2')}"}
    assert objects.written[-1] == f"{KEY}/manifest.json"
    assert sent.sent == sent.size == 2
    assert sent.shared == ()
    assert (folder / "committed.json").read_bytes() == sent.manifest
    assert hashlib.sha256(objects.objects[f"{KEY}/manifest.json"]).hexdigest() == sent.sha256
    assert list_checkpoints(objects) == [KEY]


def test_equal_files_of_one_checkpoint_are_one_object(objects, cache, tmp_path):
    sent = send(objects, write(cache, a=b"same", b=b"same", c=b"", d=b""))
    assert len(objects.written) == 3
    assert (sent.sent, sent.size) == (4, 8)
    download(objects, KEY, sent.sha256, tmp_path / "other" / KEY, CancelToken(60))
    assert contents(tmp_path / "other" / KEY / "files") == {
        "a": b"same",
        "b": b"same",
        "c": b"",
        "d": b"",
    }


def test_files_of_the_base_are_not_sent_again(objects, cache):
    first = write(cache, a=b"old", b=b"unchanged")
    send(objects, first)
    second = write(cache, NEXT, a=b"new", b=b"unchanged")
    sent = send(objects, second, first)
    shared = f"{KEY}/{name(b'unchanged')}"
    assert sent.shared == (shared,)
    assert (sent.sent, sent.size) == (3, 12)
    assert objects.written[3:] == [f"{NEXT}/{name(b'new')}", f"{NEXT}/manifest.json"]
    third = write(cache, OTHER, b=b"unchanged")
    assert send(objects, third, second).shared == (shared,)
    assert objects.written[5:] == [f"{OTHER}/manifest.json"]


def test_without_a_base_all_files_are_sent(objects, cache, tmp_path):
    first = write(cache, a=b"same")
    send(objects, first)
    for number, base in enumerate((None, tmp_path / "none", tmp_path / "bad"), 2):
        (tmp_path / "bad").mkdir(exist_ok=True)
        (tmp_path / "bad" / "committed.json").write_bytes(b"{")
        folder = write(cache, f"train_0/checkpoint_1-00000{number}", a=b"same")
        assert send(objects, folder, base).sent == 4


@pytest.mark.parametrize("damage", ["lost", "cut short"])
def test_object_of_the_base_that_the_store_lacks_is_sent_again(
    cache, tmp_path, minio, bucket, damage
):
    first = write(cache, lost=b"unchanged", whole=b"also unchanged", empty=b"")
    with minio.objects(bucket, "runs/one") as objects:
        assert send(objects, first).shared == ()
        if damage == "lost":
            objects.delete([f"{KEY}/{name(b'unchanged')}"])
        else:
            objects.put_bytes(f"{KEY}/{name(b'unchanged')}", b"")
        second = write(cache, NEXT, lost=b"unchanged", whole=b"also unchanged", empty=b"")
        sent = send(objects, second, first)
        assert sent.sent == len(b"unchanged")
        assert sent.shared == tuple(sorted(f"{KEY}/{name(at)}" for at in (b"", b"also unchanged")))
        download(objects, NEXT, sent.sha256, tmp_path / "other" / NEXT, CancelToken(60))
        third = write(cache, OTHER, lost=b"unchanged")
        assert send(objects, third, second).shared == (f"{NEXT}/{name(b'unchanged')}",)


def test_store_that_forbids_what_it_lacks_gets_all_files_again(objects, cache, monkeypatch):
    """Amazon's S3 answers so to a role without the right to list."""
    first = write(cache, a=b"unchanged")
    send(objects, first)

    def deny(key: str, size: int) -> bool:
        raise StoreRequestDenied(f"{key} cannot be read, {size} bytes", code)

    monkeypatch.setattr(objects, "has", deny)
    code = "AccessDenied"
    second = write(cache, NEXT, a=b"unchanged")
    assert send(objects, second, first).shared == ()
    code = "InvalidAccessKeyId"
    with pytest.raises(StoreRequestDenied):
        send(objects, write(cache, OTHER, a=b"unchanged"), second)


@pytest.mark.parametrize("lost", ["manifest.json", name(b"1")])
def test_committed_checkpoint_that_the_store_lacks_is_sent_again(objects, cache, lost):
    folder = write(cache, a=b"1", b=b"2")
    first = send(objects, folder)
    everything = dict(objects.objects)
    del objects.objects[f"{KEY}/{lost}"]
    assert send(objects, folder) == first
    assert objects.objects == everything


def test_upload_killed_anywhere_has_the_same_result_when_repeated(objects, cache):
    base = write(cache, a=b"old", b=b"unchanged")
    send(objects, base)
    folder = write(cache, NEXT, a=b"new", b=b"unchanged")
    first = send(objects, folder, base)
    everything = dict(objects.objects)
    (folder / "committed.json").unlink()
    assert send(objects, folder, base) == first
    assert objects.objects == everything


def test_files_committed_by_a_killed_process_are_not_sent_again(objects, cache):
    base = write(cache, a=b"unchanged")
    send(objects, base)
    folder = write(cache, NEXT, a=b"unchanged", b=b"new")
    first = send(objects, folder, base)
    objects.written.clear()
    # The manifest in the store stays, with any base that is passed now.
    assert send(objects, folder) == first._replace(sent=0)
    assert objects.written == []
    (folder / "committed.json").write_bytes((base / "committed.json").read_bytes())
    assert send(objects, folder, base) == first


def test_temporary_failure_of_the_store_is_retried(objects, cache, monkeypatch):
    monkeypatch.setattr(CancelToken, "pause", lambda _self, _seconds: None)
    told: list[str] = []
    objects.fail_at, objects.failures = "manifest.json", 3
    upload(objects, KEY, write(cache, a=b"1"), None, CancelToken(60), told.append)
    assert told == [*[f"{KEY}/manifest.json cannot be written now."] * 3, ""]
    assert list_checkpoints(objects) == [KEY]


def test_file_that_changed_in_the_cache_is_not_committed(objects, cache):
    folder = write(cache, a=b"1")
    path = folder / "files" / "a"
    path.chmod(0o644)
    path.write_bytes(b"2")
    with pytest.raises(CheckpointCorrupt):
        send(objects, folder)
    assert list_checkpoints(objects) == []
    assert not (folder / "committed.json").exists()


def test_cancelled_upload_commits_nothing(objects, cache):
    cancel = CancelToken()
    cancel.cancel()
    with pytest.raises(TransferCancelled):
        upload(objects, KEY, write(cache, a=b"1"), None, cancel)
    assert list_checkpoints(objects) == []


@pytest.mark.parametrize("replaced", ["files", "files/a", "files/sub", "manifest.json", "."])
def test_upload_follows_no_link_that_replaces_a_file_or_folder(replaced, objects, cache, tmp_path):
    source = tmp_path / "source"
    (source / "sub").mkdir(parents=True)
    (source / "a").write_bytes(b"1")
    (source / "sub" / "b").write_bytes(b"2")
    put(cache, source)
    folder = cache.root / KEY
    path = folder / replaced
    path.rename(tmp_path / "moved")  # the link's target is right in every byte
    path.symlink_to(tmp_path / "moved")
    with pytest.raises(StoreError, match=r"cannot be (read|sent)"):
        send(objects, folder)
    assert f"{KEY}/manifest.json" not in objects.written


def test_upload_is_not_blocked_by_a_fifo_at_the_name_that_its_process_would_use(objects, cache):
    folder = write(cache)
    os.mkfifo(folder / f".{COMMITTED}.{os.getpid()}")
    send(objects, folder)
    assert (folder / COMMITTED).is_file()


def test_checkpoint_whose_file_is_longer_than_the_disk_is_not_read(objects, cache, monkeypatch):
    folder = write(cache, a=b"1")
    (folder / "manifest.json").chmod(0o600)
    manifest = parse_manifest(KEY, (folder / "manifest.json").read_bytes())
    huge = FileEntry("a", shutil.disk_usage(folder).total + 1, name(b"1"))
    (folder / "manifest.json").write_bytes(make_manifest(manifest, [huge], [], {}))
    with pytest.raises(CheckpointCorrupt, match="larger than the disk"):
        send(objects, folder)


def test_manifest_larger_than_its_limit_is_not_read(objects, cache):
    folder = write(cache, a=b"1")
    with (folder / "manifest.json").open("ab") as file:
        file.truncate(64 * 2**20 + 1)
    with pytest.raises(StoreError, match="more than 67108864 bytes"):
        send(objects, folder)


def test_checkpoint_missing_in_the_cache_is_an_error_that_names_it(objects, tmp_path):
    with pytest.raises(StoreError, match=f"{KEY} cannot be read from .*manifest.json: No such"):
        upload(objects, KEY, tmp_path / KEY, None, CancelToken(60))


def test_download_is_a_checkpoint_of_the_cache(objects, cache, tmp_path):
    put(cache, fill(tmp_path / "source"))
    sent = send(objects, cache.root / KEY)
    other = LocalCheckpointStore(tmp_path / "other")
    manifest = download(objects, KEY, sent.sha256, other.root / KEY, CancelToken(60))
    opened = other.open_checkpoint(KEY, sent.sha256)
    assert contents(opened.path) == contents(tmp_path / "source")
    assert opened.manifest == manifest == read_manifest(objects, KEY, sent.sha256)
    assert not list((other.root / ".staging").iterdir())


def test_download_killed_after_its_end_is_valid(objects, cache, tmp_path):
    sent = send(objects, write(cache, a=b"1"))
    folder = tmp_path / "other" / KEY
    download(objects, KEY, sent.sha256, folder, CancelToken(60))
    download(objects, KEY, sent.sha256, folder, CancelToken(60))
    (folder / "committed.json").write_bytes(b"another")
    with pytest.raises(StoreError, match=f"{KEY} cannot be put into"):
        download(objects, KEY, sent.sha256, folder, CancelToken(60))


@pytest.mark.parametrize(
    ("damage", "message"),
    [
        (b"2", r"file 'a' is damaged: expected SHA-256 \w+, got \w+ in the object"),
        (None, r"file 'a' is missing: expected the object .*, found none"),
    ],
)
def test_damage_in_the_store_leaves_nothing_in_the_cache(objects, cache, tmp_path, damage, message):
    sent = send(objects, write(cache, a=b"1"))
    if damage is None:
        del objects.objects[f"{KEY}/{name(b'1')}"]
    else:
        objects.objects[f"{KEY}/{name(b'1')}"] = damage
    with pytest.raises(CheckpointCorrupt, match=message):
        download(objects, KEY, sent.sha256, tmp_path / "other" / KEY, CancelToken(60))
    assert contents(tmp_path / "other") == {".staging": b"<empty>"}


def test_swapped_objects_are_detected(objects, cache, tmp_path):
    sent = send(objects, write(cache, a=b"1", b=b"2"))
    one, two = (f"{KEY}/{name(data)}" for data in (b"1", b"2"))
    objects.objects[one], objects.objects[two] = objects.objects[two], objects.objects[one]
    with pytest.raises(CheckpointCorrupt, match="is damaged: expected SHA-256"):
        download(objects, KEY, sent.sha256, tmp_path / "other" / KEY, CancelToken(60))


@pytest.mark.security
@pytest.mark.parametrize(
    "at",
    ["../../etc/passwd", "/etc/passwd", "a/b", f"a/../{name(b'1')}", f"a/b/c/{name(b'1')}", ""],
)
def test_manifest_cannot_name_foreign_objects(objects, cache, tmp_path, at):
    sent = send(objects, write(cache, a=b"1"))
    manifest = json.loads(sent.manifest)
    manifest["objects"] = {name(b"1"): at}
    forged = json.dumps(manifest).encode()
    objects.put_bytes(f"{KEY}/manifest.json", forged)
    with pytest.raises(CheckpointCorrupt, match="is not the key of an object"):
        download(objects, KEY, hashlib.sha256(forged).hexdigest(), tmp_path / KEY, CancelToken(60))


def test_manifest_that_was_never_uploaded_is_rejected(objects, cache, tmp_path):
    forged = (write(cache, a=b"1") / "manifest.json").read_bytes()
    objects.put_bytes(f"{KEY}/manifest.json", forged)
    with pytest.raises(CheckpointCorrupt, match="does not say where its files are"):
        read_manifest(objects, KEY, hashlib.sha256(forged).hexdigest())


@pytest.mark.parity(111, 114)
def test_deleting_keeps_objects_that_others_refer_to(objects, cache, tmp_path):
    first = write(cache, a=b"old", b=b"unchanged")
    send(objects, first)
    sent = send(objects, write(cache, NEXT, a=b"new", b=b"unchanged"), first)
    objects.put_bytes(f"{KEY}/notes.txt", b"of a person")
    delete_checkpoint(objects, KEY, keep=[name(b"unchanged")])
    delete_checkpoint(objects, KEY, keep=[name(b"unchanged")])
    left = {key for key in objects.objects if key.startswith(f"{KEY}/")}
    assert left == {f"{KEY}/{name(b'unchanged')}", f"{KEY}/notes.txt"}
    download(objects, NEXT, sent.sha256, tmp_path / "other" / NEXT, CancelToken(60))
    delete_checkpoint(objects, NEXT)
    delete_objects(objects, sent.shared)
    assert list(objects.objects) == [f"{KEY}/notes.txt"]


@pytest.mark.parametrize(
    "key", ["a", "a/b", "../a/b", "a/b/..", "a/b/c/d", "result.json", ".a/b/c"]
)
def test_foreign_object_is_not_removed(objects, key):
    with pytest.raises(StoreError, match="is not the key of a checkpoint's object"):
        delete_objects(objects, [key])


def test_rest_of_an_experiment_is_never_collected(objects, cache):
    sent = send(objects, write(cache, a=b"1"))
    others = {
        "result.json",
        "train_0/result.json",
        "train_0/model/manifest.json",
        f"train_0/model/{name(b'1')}",
        f"{KEY}/notes.txt",
        f"deep/{KEY}/manifest.json",
        "train_0/checkpoint_1-000009/files/a",
        f".tunemq/checkpoint_1-000001/{name(b'1')}",
    }
    for key in others:
        objects.put_bytes(key, b"precious")
    everything = dict(objects.objects)
    assert collect(objects, {KEY: sent.sha256}, lambda _key: False) == (0, 0)
    assert objects.objects == everything
    assert collect(objects, {}, lambda _key: False) == (2, len(sent.manifest) + 1)
    assert set(objects.objects) == others


def test_slow_store_is_waited_for_as_long_as_it_answers(objects, cache, monkeypatch):
    clock = SimpleNamespace(now=0.0, monotonic=lambda: clock.now)
    monkeypatch.setattr(retrying, "time", clock)
    monkeypatch.setattr(object_checkpoints, "_AT_ONCE", 1)  # no other thread's answers count
    live = {}
    for number in range(9):
        key = f"train_{number}/checkpoint_1-000001"
        live[key] = send(objects, write(cache, key, model=b"m")).sha256
    objects.put_bytes(f"{NEXT}/{name(b'x')}", b"x")
    get_bytes = objects.get_bytes

    def slowly(key: str, *, limit: int) -> bytes:
        clock.now += TIMEOUT_S / 2
        return get_bytes(key, limit=limit)

    monkeypatch.setattr(objects, "get_bytes", slowly)
    assert collect(objects, live, lambda _key: False).objects == 1
    assert clock.now > 4 * TIMEOUT_S


def test_only_leftovers_of_a_crash_are_collected(objects, cache, tmp_path):
    first = write(cache, a=b"old", b=b"unchanged")
    send(objects, first)
    sent = send(objects, write(cache, NEXT, a=b"new", b=b"unchanged"), first)
    orphan = f"{OTHER}/{name(b'x')}"
    objects.put_bytes(orphan, b"x")
    # A scheduler deleted the first one and died before it had deleted all objects.
    del objects.objects[f"{KEY}/manifest.json"]
    collected = collect(objects, {NEXT: sent.sha256}, lambda _key: False)
    assert collected == (2, len(b"old") + len(b"x"))
    download(objects, NEXT, sent.sha256, tmp_path / "other" / NEXT, CancelToken(60))


def test_busy_checkpoints_are_queried_after_the_listing(cache):
    asked: list[str] = []

    class Committing(Recorded):
        """A store in which another process commits a checkpoint during the listing."""

        def list(self, prefix: str = ""):
            assert not asked
            yield from [ObjectInfo(key, 1, 0.0) for key in sorted(self.objects)]

    def is_busy(key: str) -> bool:
        asked.append(key)
        return True

    objects = Committing()
    send(objects, write(cache, a=b"1"))
    assert collect(objects, {}, is_busy) == (0, 0)
    assert set(asked) == {KEY}


def test_checkpoint_without_files_has_no_objects(objects, tmp_path):
    manifest = make_manifest(info(), (), ("hollow",))
    folder = tmp_path / "cache" / KEY
    (folder / "files" / "hollow").mkdir(parents=True)
    (folder / "manifest.json").write_bytes(manifest)
    sent = send(objects, folder)
    assert objects.written == [f"{KEY}/manifest.json"]
    download(objects, KEY, sent.sha256, tmp_path / "other" / KEY, CancelToken(60))
    assert contents(tmp_path / "other" / KEY / "files") == {"hollow": b"<empty>"}


def test_name_of_a_checkpoint_is_checked_first(objects, tmp_path):
    for use in (
        lambda: object_checkpoints.upload(objects, "../a", tmp_path, None, CancelToken(1)),
        lambda: download(objects, "a/../b", "0" * 64, tmp_path / "a" / "b", CancelToken(1)),
        lambda: delete_checkpoint(objects, "/a/b"),
    ):
        with pytest.raises(StoreError, match="is not the key of a checkpoint"):
            use()
