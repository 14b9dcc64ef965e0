"""Promises of `LocalCheckpointStore` beyond the contract of all stores."""

from __future__ import annotations

import errno
import fcntl
import hashlib
import json
import os
import shutil
import signal
import subprocess
import sys
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.support.failpoints import FAILPOINTS
from tests.support.searches.checkpoints import KEY, contents, fill, put
from tests.support.synced_files import SyncedFiles
from tunemq_shared.base import failpoints
from tunemq_shared.base.errors import CheckpointCorrupt, CheckpointError, ConfigError, StoreError
from tunemq_shared.base.retrying import StoreUnavailable
from tunemq_shared.checkpoints import folder_listing, hashed_copy
from tunemq_shared.checkpoints.checkpoint import METADATA_FILE, Checkpoint
from tunemq_shared.checkpoints.local_store import LocalCheckpointStore
from tunemq_shared.checkpoints.manifest import make_manifest
from tunemq_shared.checkpoints.open_store import open_store
from tunemq_shared.checkpoints.store import CollectedGarbage

#: Puts a checkpoint, hangs in the middle and announces that.
KILLED_WRITER = """
import sys, time
from pathlib import Path
from tunemq_shared.checkpoints import hashed_copy as copying
from tunemq_shared.checkpoints.local_store import LocalCheckpointStore
from tunemq_shared.checkpoints.manifest import CheckpointInfo

write_all = copying.write_all

def write_one_piece(fd, data):
    write_all(fd, data)
    print("writing", flush=True)
    sys.stdin.readline()

copying.write_all = write_one_piece
info = CheckpointInfo(trial="t0", attempt=1, n=1, step=1, metrics={}, state={})
LocalCheckpointStore(sys.argv[1]).put_checkpoint(sys.argv[2], Path(sys.argv[3]), info)
"""


def collect(store: LocalCheckpointStore) -> CollectedGarbage:
    return store.collect({}, lambda _: False)


@pytest.fixture(params=[True, False], ids=["durable", "quick"])
def store(tmp_path: Path, request: pytest.FixtureRequest) -> Iterator[LocalCheckpointStore]:
    store = LocalCheckpointStore(tmp_path / "experiment", durable=request.param)
    store.root.mkdir()
    yield store
    # No test leaves a partial checkpoint behind.
    staging = tmp_path / "experiment" / ".staging"
    assert not staging.exists() or not list(staging.iterdir())


@pytest.fixture
def source(tmp_path: Path) -> Path:
    return fill(tmp_path / "source")


def test_layout_is_readable_without_tunemq(store: LocalCheckpointStore, source: Path) -> None:
    put(store, source)
    folder = store.root / KEY
    assert sorted(os.listdir(folder)) == ["files", "manifest.json"]
    assert json.loads((folder / "manifest.json").read_text())["trial"] == "t0"
    assert contents(folder / "files") == contents(source)


def test_durable_checkpoint_is_synced_before_its_key_shows_it(
    tmp_path: Path, source: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    # The store also syncs a large file while it copies it, but those syncs miss its end.
    monkeypatch.setattr(hashed_copy, "_SYNC_EVERY", 2**20)
    disk = SyncedFiles(monkeypatch)
    (tmp_path / "experiment").mkdir()
    put(LocalCheckpointStore(tmp_path / "experiment"), source)
    names = [path.name for path in source.rglob("*") if path.is_file()]
    assert sorted(disk.renamed) == sorted([*names, "manifest.json"])
    assert disk.unsynced == []


def test_missing_folder_is_detected(store: LocalCheckpointStore, source: Path) -> None:
    committed = put(store, source)
    (store.root / KEY / "files" / "hollow").rmdir()
    with pytest.raises(CheckpointCorrupt, match="folder 'hollow' is missing"):
        store.open_checkpoint(KEY, committed.sha256)


@pytest.mark.parametrize("place", ["nothing", "deep", "extra"])
def test_links_put_into_a_checkpoint_are_rejected(
    store: LocalCheckpointStore, source: Path, place: str
) -> None:
    committed = put(store, source)
    path = store.root / KEY / "files" / place
    if path.exists():
        path.rename(store.root / "moved")
    path.symlink_to(store.root / "moved")
    with pytest.raises(CheckpointCorrupt, match="is a link or device"):
        store.open_checkpoint(KEY, committed.sha256)


def test_files_that_are_links_are_rejected(store: LocalCheckpointStore, source: Path) -> None:
    committed = put(store, source)
    files = store.root / KEY / "files"
    files.rename(store.root / "moved")
    files.symlink_to(store.root / "moved")
    with pytest.raises(CheckpointCorrupt, match="files is not a folder"):
        store.open_checkpoint(KEY, committed.sha256)


def test_empty_folder_at_the_key_is_used(store: LocalCheckpointStore, source: Path) -> None:
    (store.root / KEY).parent.mkdir(parents=True)
    assert put(store, source)


def test_one_of_two_writers_of_a_key_wins(
    store: LocalCheckpointStore, source: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def another_process_is_faster(self: Path, target: Path) -> None:
        raise OSError(errno.ENOTEMPTY, "Directory not empty")

    monkeypatch.setattr(Path, "rename", another_process_is_faster)
    with pytest.raises(StoreError, match="another process has already written"):
        put(store, source)


@pytest.mark.parametrize(
    ("number", "message"),
    [
        (errno.ENOSPC, r"cannot be written: .*experiment: No space left.* bytes are free\)"),
        (errno.EROFS, r"cannot be written: .*experiment: Read-only file system\.$"),
    ],
)
def test_failing_disk_is_an_error_with_path_and_bytes(
    store: LocalCheckpointStore,
    source: Path,
    monkeypatch: pytest.MonkeyPatch,
    number: int,
    message: str,
) -> None:
    def fail(fd: int, data: memoryview) -> None:
        raise OSError(number, os.strerror(number))

    monkeypatch.setattr(hashed_copy, "write_all", fail)
    with pytest.raises(StoreError, match=message):
        put(store, source)
    assert store.list_checkpoints() == []
    assert "tunemq-hasher" not in [thread.name for thread in threading.enumerate()]


def test_root_that_is_a_file_is_an_error_with_its_path(tmp_path: Path, source: Path) -> None:
    (tmp_path / "file").touch()
    store = LocalCheckpointStore(tmp_path / "file")
    with pytest.raises(StoreError, match=r"file/\.staging: Not a directory|file: File exists"):
        put(store, source)
    with pytest.raises(StoreError, match=r"cannot be listed: .*Not a directory"):
        store.list_checkpoints()


def test_other_entries_of_the_folder_are_no_checkpoints(
    store: LocalCheckpointStore, source: Path
) -> None:
    put(store, source)
    (store.root / "result.json").touch()
    (store.root / "train_0" / "artifacts").mkdir()
    (store.root / "train_0" / "artifacts" / "manifest.json").touch()
    assert store.list_checkpoints() == [KEY]


@pytest.mark.parity(114)
def test_killed_writer_leaves_nothing_at_the_key_and_is_collected(
    store: LocalCheckpointStore, source: Path
) -> None:
    command = [sys.executable, "-c", KILLED_WRITER, store.root, KEY, source]
    pipes: dict[str, Any] = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE}
    with subprocess.Popen(command, **pipes) as writer:
        try:
            assert writer.stdout is not None
            assert writer.stdout.readline() == b"writing\n"
            assert store.list_checkpoints() == []
            # Garbage collection meanwhile does not disturb a live writer.
            assert collect(store) == (0, 0)
            assert len(list((store.root / ".staging").iterdir())) == 2
        finally:
            writer.send_signal(signal.SIGKILL)
    assert not (store.root / KEY).exists()
    files, size = collect(store)
    assert files > 0
    assert size > 0
    assert list((store.root / ".staging").iterdir()) == []
    assert put(store, source)


def test_collecting_keeps_live_busy_and_foreign_files(
    store: LocalCheckpointStore, source: Path
) -> None:
    keys = [f"train_0/checkpoint_1-00000{n}" for n in range(1, 4)]
    hashes = {key: put(store, source, key).sha256 for key in keys}
    looks_like_one = store.root / "train_0" / "mine"
    (looks_like_one / "files").mkdir(parents=True)
    (looks_like_one / "manifest.json").write_text("{}")
    shutil.copytree(store.root / keys[2], store.root / "train_0" / "best")
    removed = store.collect({keys[0]: hashes[keys[0]]}, lambda key: key == keys[1])
    assert store.list_checkpoints() == ["train_0/best", *keys[:2], "train_0/mine"]
    assert removed.objects == 5  # its files, and the manifest
    assert removed.bytes > 3 * 2**20
    assert store.open_checkpoint(keys[1], hashes[keys[1]])


def test_collecting_from_an_empty_store_is_no_error(store: LocalCheckpointStore) -> None:
    assert collect(store) == (0, 0)


def test_several_threads_write_at_once(store: LocalCheckpointStore, source: Path) -> None:
    keys = [f"train_{n}/checkpoint_1-000001" for n in range(4)]
    threads = [threading.Thread(target=put, args=(store, source, key)) for key in keys]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert store.list_checkpoints() == keys
    assert "tunemq-hasher" not in [thread.name for thread in threading.enumerate()]


def test_too_many_files_are_rejected_before_any_is_copied(
    store: LocalCheckpointStore, source: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(folder_listing, "MAX_FILES", 4)
    with pytest.raises(CheckpointError, match=r"source' has more than 4 files, .* archive"):
        put(store, source)
    assert not list(store.root.iterdir())


@pytest.mark.parametrize("name", [name for name in FAILPOINTS if name.startswith("cache.")])
def test_failpoint_fails_like_the_disk(
    store: LocalCheckpointStore, source: Path, monkeypatch: pytest.MonkeyPatch, name: str
) -> None:
    monkeypatch.setenv(failpoints.VARIABLE, f"{name}=error")
    failpoints._disarm()
    with pytest.raises(StoreError, match=rf"{KEY} cannot be written: .*failpoint {name}"):
        put(store, source)
    assert store.list_checkpoints() == ([KEY] if name == "cache.after_rename" else [])
    monkeypatch.undo()
    failpoints._disarm()


def test_file_that_fails_among_several_stops_the_others(
    store: LocalCheckpointStore, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    source = tmp_path / "large"
    source.mkdir()
    for n in range(8):
        (source / f"{n}.bin").write_bytes(bytes(2 * 2**20))
    began: list[int] = []

    def fail(fd: int, data: memoryview) -> None:
        began.append(fd)
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(hashed_copy, "write_all", fail)
    with pytest.raises(StoreError, match="bytes are free"):
        put(store, source)
    assert len(began) < 8
    assert not [thread for thread in threading.enumerate() if "tunemq" in thread.name]


def test_several_large_files_round_trip(store: LocalCheckpointStore, tmp_path: Path) -> None:
    source = tmp_path / "large"
    source.mkdir()
    for n in range(5):
        (source / f"{n}.bin").write_bytes(os.urandom(2**20 + n * 700_001))
    committed = put(store, source)
    opened = store.open_checkpoint(KEY, committed.sha256)
    assert contents(opened.path) == contents(source)
    assert [file.name for file in opened.manifest.files] == [f"{n}.bin" for n in range(5)]


# --- copies of an object store's checkpoints ------------------------------------------------------


def committed_copy(store: LocalCheckpointStore, source: Path, *, written: bool) -> tuple[str, str]:
    """Write a checkpoint with ``committed.json``; return the hashes of both JSON files."""
    first = put(store, source).sha256
    manifest = store.read_manifest(KEY, first)
    objects = {file.sha256: f"{KEY}/{file.sha256}" for file in manifest.files}
    data = make_manifest(manifest, manifest.files, manifest.folders, objects)
    (store.root / KEY / "committed.json").write_bytes(data)
    if not written:
        (store.root / KEY / "manifest.json").unlink()
    return first, hashlib.sha256(data).hexdigest()


@pytest.mark.parametrize("written", [True, False])
def test_copy_is_opened_by_the_hash_of_either_manifest(
    store: LocalCheckpointStore, source: Path, written: bool
) -> None:
    first, second = committed_copy(store, source, written=written)
    assert store.open_checkpoint(KEY, second).manifest.objects
    assert store.open_checkpoint(KEY, ("", second)).path
    assert store.open_checkpoint(KEY, (first, second)).path
    assert store.list_checkpoints() == [KEY]
    if written:
        assert store.open_checkpoint(KEY, first).manifest.objects == {}
    else:
        with pytest.raises(CheckpointCorrupt, match=rf"committed.json is damaged: .*{second}"):
            store.open_checkpoint(KEY, first)


def test_copy_that_fits_neither_manifest_names_both(
    store: LocalCheckpointStore, source: Path
) -> None:
    committed_copy(store, source, written=True)
    expected = "expected SHA-256 0+ or 1+, got"
    with pytest.raises(
        CheckpointCorrupt, match=f"manifest.json .*{expected}.*committed.json .*{expected}"
    ):
        store.open_checkpoint(KEY, ("0" * 64, "1" * 64))


def test_missing_checkpoint_is_damage_and_a_missing_store_is_not(
    store: LocalCheckpointStore, source: Path
) -> None:
    store.root.rmdir()
    with pytest.raises(StoreUnavailable, match=r"there is no folder .*experiment"):
        store.open_checkpoint(KEY, "0" * 64)
    store.root.mkdir()
    put(store, source, "train_1/other")
    with pytest.raises(CheckpointCorrupt, match=rf"{KEY}: it is not in .*experiment"):
        store.open_checkpoint(KEY, "0" * 64)


def test_folder_of_a_store_that_is_not_mounted_is_never_made(
    store: LocalCheckpointStore, source: Path
) -> None:
    store.root.rename(store.root.with_name("elsewhere"))
    with pytest.raises(StoreUnavailable, match=r"no folder .*experiment on this machine.*mounted"):
        put(store, source)
    assert not store.root.exists()


# --- fetching a copy ------------------------------------------------------------------------------


def test_downloaded_folder_is_a_private_copy(
    store: LocalCheckpointStore, source: Path, tmp_path: Path
) -> None:
    committed = put(store, source)
    manifest = store.get_checkpoint(KEY, committed.sha256, tmp_path / "mine")
    assert contents(tmp_path / "mine") == contents(source)
    assert manifest == store.read_manifest(KEY, committed.sha256)
    (tmp_path / "mine" / "model.bin").write_bytes(b"changed")
    assert store.open_checkpoint(KEY, committed.sha256)


@pytest.mark.parametrize(
    ("content", "message"),
    [(b"stale", "expected SHA-256"), (b"st", "expected 5 bytes, got 2"), (None, "is missing")],
)
def test_damaged_checkpoint_is_not_downloaded(
    store: LocalCheckpointStore, source: Path, tmp_path: Path, content: bytes | None, message: str
) -> None:
    committed = put(store, source)
    file = store.root / KEY / "files" / "deep" / "er" / "state"
    file.unlink() if content is None else file.write_bytes(content)
    (tmp_path / "there").mkdir()
    with pytest.raises(CheckpointCorrupt, match=f"'deep/er/state' .*{message}"):
        store.get_checkpoint(KEY, committed.sha256, tmp_path / "there" / "mine")
    assert list((tmp_path / "there").iterdir()) == []


def test_existing_folder_is_left_alone(
    store: LocalCheckpointStore, source: Path, tmp_path: Path
) -> None:
    committed = put(store, source)
    (tmp_path / "mine").mkdir()
    (tmp_path / "mine" / "notes").write_text("notes")
    with pytest.raises(StoreError, match=r"cannot be copied to .*mine: .*not empty"):
        store.get_checkpoint(KEY, committed.sha256, tmp_path / "mine")
    assert contents(tmp_path / "mine") == {"notes": b"notes"}


@pytest.mark.parametrize("change", ["changed", "removed"])
def test_edited_metadata_is_downloaded_unchanged(
    store: LocalCheckpointStore, source: Path, tmp_path: Path, change: str
) -> None:
    Checkpoint(source).set_metadata({"note": "first"})
    committed = put(store, source)
    opened = Checkpoint(store.open_checkpoint(KEY, committed.sha256).path)
    if change == "changed":
        opened.set_metadata({"note": "another"})
    else:
        Path(opened.path, METADATA_FILE).unlink()
    expected = opened.get_metadata()
    assert expected != {"note": "first"}
    store.get_checkpoint(KEY, committed.sha256, tmp_path / "mine")
    assert Checkpoint(tmp_path / "mine").get_metadata() == expected


@pytest.mark.parity(157)
def test_address_selects_the_store(tmp_path: Path) -> None:
    for address in (str(tmp_path), f"file://{tmp_path}", f"file://localhost{tmp_path}"):
        store = open_store(address)
        assert isinstance(store, LocalCheckpointStore)
        assert store.root == tmp_path
    with pytest.raises(ConfigError, match=r"gs://bucket"):
        open_store("gs://bucket")


# --- copies for trials ---


def test_copy_has_only_the_files_of_the_manifest(
    store: LocalCheckpointStore, source: Path, tmp_path: Path
) -> None:
    committed = put(store, source)
    files = store.root / KEY / "files"
    (files / "added").write_text("by a trial")

    store.get_checkpoint(KEY, committed.sha256, tmp_path / "copy")

    assert contents(tmp_path / "copy") == contents(source)


@pytest.mark.parametrize("is_whole", [True, False])
def test_large_copy_shares_the_blocks_of_the_original_and_is_verified(
    store: LocalCheckpointStore,
    source: Path,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    is_whole: bool,
) -> None:
    shared: list[int] = []

    def ioctl(out: int, request: int, original: int) -> None:
        """Answer as XFS and Btrfs do; ext4 has no such request."""
        assert request == 0x40049409
        size = os.fstat(original).st_size
        os.pwrite(out, os.pread(original, size, 0) if is_whole else bytes(size), 0)
        shared.append(out)

    (source / "large").write_bytes(os.urandom(3 * 2**20))
    committed = put(store, source)
    assert shared == []
    monkeypatch.setattr(fcntl, "ioctl", ioctl)

    if is_whole:
        store.get_checkpoint(KEY, committed.sha256, tmp_path / "copy")
        assert contents(tmp_path / "copy") == contents(source)
    else:
        with pytest.raises(CheckpointCorrupt, match="is damaged: expected SHA-256"):
            store.get_checkpoint(KEY, committed.sha256, tmp_path / "copy")
    large = [file for file in source.rglob("*") if file.stat().st_size > 2**20]
    assert len(shared) == len(large) > 0
