"""What every `Store` promises, and what `LocalStore` promises beside that.

An implementation runs the suite by subclassing `StoreContract` with a ``store`` fixture, and says
how to damage what it keeps.
"""

from __future__ import annotations

import errno
import hashlib
import json
import math
import os
import signal
import subprocess
import sys
import threading
from abc import ABC, abstractmethod
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.support import eventually
from tunemq_shared import copying
from tunemq_shared.checkpoint import Checkpoint
from tunemq_shared.errors import CheckpointCorrupt, CheckpointError, ConfigError, StoreError
from tunemq_shared.local_store import LocalStore
from tunemq_shared.manifest import CheckpointInfo, make_manifest
from tunemq_shared.messages import CheckpointRef
from tunemq_shared.store import Committed, Store
from tunemq_shared.store_sink import StoreSink
from tunemq_shared.stores import open_store

KEY = "train_0/checkpoint_1-000001"


def info(**changes: Any) -> CheckpointInfo:
    given: dict[str, Any] = {
        "trial": "t0",
        "epoch": 1,
        "n": 1,
        "step": 5,
        "metrics": {},
        "state": {},
    }
    return CheckpointInfo(**{**given, **changes})


def put(store: Store, source: Path, key: str = KEY, **changes: Any) -> Committed:
    return store.put_checkpoint(key, source, info(**changes))


def contents(folder: Path) -> dict[str, bytes]:
    """Every file and empty folder below a folder."""
    return {
        str(path.relative_to(folder)): path.read_bytes() if path.is_file() else b"<empty>"
        for path in sorted(folder.rglob("*"))
        if path.is_file() or not any(path.iterdir())
    }


@pytest.fixture
def source(tmp_path: Path) -> Path:
    folder = tmp_path / "source"
    (folder / "deep" / "er").mkdir(parents=True)
    (folder / "hollow").mkdir()
    (folder / "model.bin").write_bytes(os.urandom(3 * 2**20 + 17))
    (folder / "deep" / "er" / "state").write_bytes(b"state")
    (folder / "nothing").touch()
    (folder / "odd name\n\udcff").write_bytes(b"odd")
    return folder


class StoreContract(ABC):
    """The suite."""

    @abstractmethod
    def damage(self, store: Any, key: str, name: str, content: bytes | None) -> None:
        """Replace or remove a file of a checkpoint, behind the store's back."""

    @abstractmethod
    def with_manifest(self, store: Any, key: str, manifest: bytes) -> str:
        """Make a checkpoint out of a manifest alone; returns the manifest's hash."""

    def test_what_was_put_is_what_is_opened(self, store: Store, source: Path) -> None:
        committed = put(store, source)
        opened = store.open_checkpoint(KEY, committed.sha256)
        assert contents(opened.path) == contents(source)
        assert committed.key == KEY
        assert (
            committed.size
            == opened.manifest.size
            == sum(path.stat().st_size for path in source.rglob("*") if path.is_file())
        )

    def test_the_manifest_says_what_the_checkpoint_is_of(self, store: Store, source: Path) -> None:
        state = {"iteration": 5, "time_total_s": 0.1, "big": 2**60, "list": [1, None, "x"]}
        committed = put(store, source, metrics={"loss": 0.5, "bad": math.nan}, state=state)
        manifest = store.open_checkpoint(KEY, committed.sha256).manifest
        assert (manifest.trial, manifest.epoch, manifest.n, manifest.step) == ("t0", 1, 1, 5)
        assert manifest.state == state
        assert manifest.metrics["loss"] == 0.5
        assert math.isnan(manifest.metrics["bad"])
        hashes = {file.name: file.sha256 for file in manifest.files}
        expected = hashlib.sha256((source / "model.bin").read_bytes()).hexdigest()
        assert hashes["model.bin"] == expected

    def test_the_source_may_change_afterwards(self, store: Store, source: Path) -> None:
        committed = put(store, source)
        (source / "model.bin").write_bytes(b"next")
        (source / "deep" / "er" / "state").unlink()
        assert store.open_checkpoint(KEY, committed.sha256)

    def test_an_empty_folder_is_a_checkpoint(self, store: Store, tmp_path: Path) -> None:
        (tmp_path / "empty").mkdir()
        committed = put(store, tmp_path / "empty")
        assert contents(store.open_checkpoint(KEY, committed.sha256).path) == {}

    def test_a_key_is_never_written_twice(self, store: Store, source: Path) -> None:
        committed = put(store, source)
        with pytest.raises(StoreError, match=f"{KEY} is there already"):
            put(store, source)
        assert store.open_checkpoint(KEY, committed.sha256)

    def test_checkpoints_are_listed_until_they_are_deleted(
        self, store: Store, source: Path
    ) -> None:
        assert store.list_checkpoints() == []
        keys = ["train_0/checkpoint_1-000001", "train_0/checkpoint_2-000001", "train_1/c"]
        for key in reversed(keys):
            put(store, source, key)
        assert store.list_checkpoints() == keys
        store.delete_checkpoint(keys[1])
        assert store.list_checkpoints() == [keys[0], keys[2]]
        with pytest.raises(StoreError, match="checkpoint_2-000001"):
            store.open_checkpoint(keys[1], "0" * 64)

    def test_deleting_what_is_not_there_is_no_error(self, store: Store, source: Path) -> None:
        store.delete_checkpoint(KEY)
        put(store, source)
        store.delete_checkpoint(KEY)
        store.delete_checkpoint(KEY)
        assert store.list_checkpoints() == []

    def test_a_deleted_key_may_be_written(self, store: Store, source: Path) -> None:
        put(store, source)
        store.delete_checkpoint(KEY)
        assert store.open_checkpoint(KEY, put(store, source).sha256)

    @pytest.mark.parametrize(
        "key",
        [
            "",
            "one",
            "a/b/c",
            "../a/b",
            "a/..",
            "/a/b",
            "a//b",
            "a/",
            "a/b/",
            "./a",
            "a/\0",
            ".staging/a",
            "a/.b",
        ],
    )
    def test_a_key_that_leads_elsewhere_is_refused(
        self, store: Store, source: Path, key: str
    ) -> None:
        for use in (
            lambda: put(store, source, key),
            lambda: store.open_checkpoint(key, "0" * 64),
            lambda: store.delete_checkpoint(key),
        ):
            with pytest.raises(StoreError, match="is not the key of a checkpoint"):
                use()

    # --- what may be saved -----------------------------------------------------------------------

    def test_links_inside_become_what_they_point_to(self, store: Store, tmp_path: Path) -> None:
        source = tmp_path / "linked"
        (source / "step_3").mkdir(parents=True)
        (source / "step_3" / "weights").write_bytes(b"w")
        (source / "latest").symlink_to("step_3")
        (source / "best").symlink_to(source / "step_3" / "weights")
        committed = put(store, source)
        path = store.open_checkpoint(KEY, committed.sha256).path
        assert contents(path) == {"best": b"w", "latest/weights": b"w", "step_3/weights": b"w"}
        assert not any(found.is_symlink() for found in path.rglob("*"))

    def test_a_source_that_is_itself_a_link_is_followed(
        self, store: Store, source: Path, tmp_path: Path
    ) -> None:
        (tmp_path / "link").symlink_to(source)
        committed = put(store, tmp_path / "link")
        assert contents(store.open_checkpoint(KEY, committed.sha256).path) == contents(source)

    @pytest.mark.parametrize(
        ("target", "message"),
        [
            ("../outside", r"bad' in a checkpoint is a link to '.*outside' outside of it"),
            ("/etc/passwd", r"bad' in a checkpoint is a link to '/etc/passwd' outside of it"),
            ("nowhere", r"bad' in a checkpoint is a link that leads nowhere"),
            ("bad", r"bad' in a checkpoint is a link that leads nowhere"),
            ("..", r"outside of it"),
            (".", r"bad' in a checkpoint is a link to a folder it is in"),
        ],
    )
    def test_other_links_are_refused_by_name(
        self, store: Store, source: Path, target: str, message: str
    ) -> None:
        (source.parent / "outside").write_bytes(b"secret")
        (source / "bad").symlink_to(target)
        with pytest.raises(CheckpointError, match=message):
            put(store, source)
        assert store.list_checkpoints() == []

    def test_pipes_and_devices_are_refused_by_name(self, store: Store, source: Path) -> None:
        os.mkfifo(source / "pipe")
        with pytest.raises(
            CheckpointError, match=r"files and folders only, and '.*pipe' is neither"
        ):
            put(store, source)

    def test_what_is_no_folder_is_refused(self, store: Store, source: Path) -> None:
        for path in (source / "model.bin", source / "missing"):
            with pytest.raises(CheckpointError, match="must be a folder"):
                put(store, path)

    def test_state_that_json_cannot_hold_is_refused(self, store: Store, source: Path) -> None:
        with pytest.raises(CheckpointError, match="plain values"):
            put(store, source, state={"a": object()})
        assert store.list_checkpoints() == []

    def test_a_file_that_changes_meanwhile_is_found(
        self, store: Store, source: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        write_all = copying.write_all

        def write_and_append(fd: int, data: memoryview) -> None:
            write_all(fd, data)
            with (source / "model.bin").open("ab") as file:
                file.write(bytes(2**20))

        monkeypatch.setattr(copying, "write_all", write_and_append)
        with pytest.raises(CheckpointError, match=r"model.bin' changed while it was saved"):
            put(store, source)
        assert store.list_checkpoints() == []

    # --- what is found when it is opened ---------------------------------------------------------

    @pytest.mark.parametrize(
        ("name", "content", "message"),
        [
            ("files/deep/er/state", b"stale", r"file 'deep/er/state' is damaged: expected SHA-256"),
            ("files/deep/er/state", b"st", r"'deep/er/state' is damaged: expected 5 bytes, got 2"),
            ("files/deep/er/state", None, r"the file 'deep/er/state' is missing"),
            ("files/nothing", b"x", r"'nothing' is damaged: expected 0 bytes, got 1"),
            (
                "manifest.json",
                b"{}",
                r"manifest.json is damaged: expected SHA-256 .*, got 44136fa3",
            ),
        ],
    )
    def test_damage_is_found_and_named(
        self, store: Store, source: Path, name: str, content: bytes | None, message: str
    ) -> None:
        committed = put(store, source)
        self.damage(store, KEY, name, content)
        with pytest.raises(CheckpointCorrupt, match=f"{KEY}: .*{message}"):
            store.open_checkpoint(KEY, committed.sha256)

    def test_a_flipped_bit_in_a_large_file_is_found(self, store: Store, source: Path) -> None:
        committed = put(store, source)
        spoilt = bytearray((source / "model.bin").read_bytes())
        spoilt[-1] ^= 1
        self.damage(store, KEY, "files/model.bin", bytes(spoilt))
        with pytest.raises(CheckpointCorrupt, match=r"'model.bin' is damaged: expected SHA-256"):
            store.open_checkpoint(KEY, committed.sha256)

    def test_another_hash_than_the_callers_is_refused(self, store: Store, source: Path) -> None:
        put(store, source)
        with pytest.raises(CheckpointCorrupt, match="expected SHA-256 " + "0" * 64):
            store.open_checkpoint(KEY, "0" * 64)

    @pytest.mark.parametrize(
        "name",
        ["/etc/passwd", "../other/file", "a/../../b", "..", ".", "", "a//b", "a/./b", "a/", "a\0b"],
    )
    @pytest.mark.parametrize("field", ["files", "folders"])
    def test_names_that_lead_out_of_the_checkpoint_are_refused(
        self, store: Store, name: str, field: str
    ) -> None:
        content = json.loads(make_manifest(info(), (), ()))
        entry = {"name": name, "size": 0, "sha256": hashlib.sha256().hexdigest()}
        content[field] = [entry if field == "files" else name]
        sha256 = self.with_manifest(store, KEY, json.dumps(content).encode())
        with pytest.raises(CheckpointCorrupt, match="is not the name of a file below it"):
            store.open_checkpoint(KEY, sha256)

    @pytest.mark.parametrize(
        ("changes", "message"),
        [
            ({"version": 99}, "is of version 99"),
            ({"files": "all"}, "is not one"),
            ({"epoch": "first"}, "is not one"),
            ({"files": [{"name": "a", "size": 0, "sha256": ""}] * 2}, "'a' is listed twice"),
        ],
    )
    def test_what_is_no_manifest_is_refused(
        self, store: Store, changes: dict[str, Any], message: str
    ) -> None:
        content = {**json.loads(make_manifest(info(), (), ())), **changes}
        sha256 = self.with_manifest(store, KEY, json.dumps(content).encode())
        with pytest.raises(CheckpointCorrupt, match=message):
            store.open_checkpoint(KEY, sha256)

    @pytest.mark.parametrize("data", [b"", b"[]", b"\xff", b"[" * 100_000])
    def test_a_manifest_that_is_no_json_is_refused(self, store: Store, data: bytes) -> None:
        sha256 = self.with_manifest(store, KEY, data)
        with pytest.raises(CheckpointCorrupt, match="is not one"):
            store.open_checkpoint(KEY, sha256)

    # --- with a trial's session -------------------------------------------------------------------

    def test_a_session_saves_and_restores_through_its_sink(
        self, store: Store, source: Path
    ) -> None:
        sink = StoreSink(store, "t0", "train_0")
        event = sink.save(source, epoch=2, n=3, step=7, state={"iteration": 7}, metrics={"a": 1.0})
        assert event.key == "train_0/checkpoint_2-000003"
        assert (event.trial, event.epoch, event.n, event.step) == ("t0", 2, 3, 7)
        path, state = sink.open(CheckpointRef(key=event.key, sha256=event.sha256, step=7))
        assert state == {"iteration": 7}
        assert contents(path) == contents(source)

    @pytest.mark.parity(38, 44)
    def test_a_dict_checkpoint_survives_the_store(self, store: Store) -> None:
        sink = StoreSink(store, "t0", "train_0")
        with Checkpoint.from_dict({"weights": (1, 2)}).as_directory() as folder:
            event = sink.save(Path(folder), epoch=1, n=1, step=1, state={}, metrics={})
        path, _ = sink.open(CheckpointRef(key=event.key, sha256=event.sha256, step=1))
        assert Checkpoint.from_directory(path).to_dict() == {"weights": (1, 2)}

    def test_metadata_may_change_after_a_checkpoint_was_saved(
        self, store: Store, source: Path
    ) -> None:
        Checkpoint(source).set_metadata({"note": "first"})
        committed = put(store, source)
        opened = store.open_checkpoint(KEY, committed.sha256)
        Checkpoint(opened.path).update_metadata({"note": "second"})
        again = store.open_checkpoint(KEY, committed.sha256)
        assert Checkpoint(again.path).get_metadata() == {"note": "second"}


#: Puts a checkpoint and hangs in the middle of it, saying so.
KILLED_WRITER = """
import sys, time
from pathlib import Path
from tunemq_shared import copying
from tunemq_shared.local_store import LocalStore
from tunemq_shared.manifest import CheckpointInfo

write_all = copying.write_all

def write_one_piece(fd, data):
    write_all(fd, data)
    print("writing", flush=True)
    sys.stdin.readline()

copying.write_all = write_one_piece
info = CheckpointInfo(trial="t0", epoch=1, n=1, step=1, metrics={}, state={})
LocalStore(sys.argv[1]).put_checkpoint(sys.argv[2], Path(sys.argv[3]), info)
"""


class TestLocalStore(StoreContract):
    """Checkpoints in a local folder."""

    @pytest.fixture(params=[True, False], ids=["durable", "quick"])
    def store(self, tmp_path: Path, request: pytest.FixtureRequest) -> Iterator[LocalStore]:
        store = LocalStore(tmp_path / "experiment", durable=request.param)
        yield store
        # Whatever a test did, nothing of it is left half done.
        staging = tmp_path / "experiment" / ".staging"
        assert not staging.exists() or not list(staging.iterdir())

    def damage(self, store: LocalStore, key: str, name: str, content: bytes | None) -> None:
        file = store.root / key / name
        file.unlink() if content is None else file.write_bytes(content)

    def with_manifest(self, store: LocalStore, key: str, manifest: bytes) -> str:
        (store.root / key / "files").mkdir(parents=True)
        (store.root / key / "manifest.json").write_bytes(manifest)
        return hashlib.sha256(manifest).hexdigest()

    def test_the_layout_is_readable_without_us(self, store: LocalStore, source: Path) -> None:
        put(store, source)
        folder = store.root / KEY
        assert sorted(os.listdir(folder)) == ["files", "manifest.json"]
        assert json.loads((folder / "manifest.json").read_text())["trial"] == "t0"
        assert contents(folder / "files") == contents(source)

    def test_a_missing_folder_is_found(self, store: LocalStore, source: Path) -> None:
        committed = put(store, source)
        (store.root / KEY / "files" / "hollow").rmdir()
        with pytest.raises(CheckpointCorrupt, match="folder 'hollow' is missing"):
            store.open_checkpoint(KEY, committed.sha256)

    @pytest.mark.parametrize("place", ["nothing", "deep", "extra"])
    def test_links_put_into_a_checkpoint_are_refused(
        self, store: LocalStore, source: Path, place: str
    ) -> None:
        committed = put(store, source)
        path = store.root / KEY / "files" / place
        if path.exists():
            path.rename(store.root / "moved")
        path.symlink_to(store.root / "moved")
        with pytest.raises(CheckpointCorrupt, match="is a link or device"):
            store.open_checkpoint(KEY, committed.sha256)

    def test_files_that_are_a_link_are_refused(self, store: LocalStore, source: Path) -> None:
        committed = put(store, source)
        files = store.root / KEY / "files"
        files.rename(store.root / "moved")
        files.symlink_to(store.root / "moved")
        with pytest.raises(CheckpointCorrupt, match="files is not a folder"):
            store.open_checkpoint(KEY, committed.sha256)

    def test_an_empty_folder_in_the_way_is_taken(self, store: LocalStore, source: Path) -> None:
        (store.root / KEY).parent.mkdir(parents=True)
        assert put(store, source)

    def test_of_two_writers_of_a_key_one_wins(
        self, store: LocalStore, source: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        def somebody_was_faster(self: Path, target: Path) -> None:
            raise OSError(errno.ENOTEMPTY, "Directory not empty")

        monkeypatch.setattr(Path, "rename", somebody_was_faster)
        with pytest.raises(StoreError, match="was written by somebody else"):
            put(store, source)

    @pytest.mark.parametrize(
        ("number", "message"),
        [
            (errno.ENOSPC, r"cannot be written: .*experiment: No space left.* bytes are free\)"),
            (errno.EROFS, r"cannot be written: .*experiment: Read-only file system\.$"),
        ],
    )
    def test_a_failing_disk_is_an_error_with_path_and_bytes(
        self,
        store: LocalStore,
        source: Path,
        monkeypatch: pytest.MonkeyPatch,
        number: int,
        message: str,
    ) -> None:
        def fail(fd: int, data: memoryview) -> None:
            raise OSError(number, os.strerror(number))

        monkeypatch.setattr(copying, "write_all", fail)
        with pytest.raises(StoreError, match=message):
            put(store, source)
        assert store.list_checkpoints() == []
        assert threading.active_count() == 1

    def test_a_root_that_is_a_file_is_an_error_with_its_path(
        self, tmp_path: Path, source: Path
    ) -> None:
        (tmp_path / "file").touch()
        store = LocalStore(tmp_path / "file")
        with pytest.raises(StoreError, match=r"file/\.staging: Not a directory|file: File exists"):
            put(store, source)
        with pytest.raises(StoreError, match=r"cannot be listed: .*Not a directory"):
            store.list_checkpoints()

    def test_other_things_in_the_folder_are_no_checkpoints(
        self, store: LocalStore, source: Path
    ) -> None:
        put(store, source)
        (store.root / "result.json").touch()
        (store.root / "train_0" / "artifacts").mkdir()
        (store.root / "train_0" / "artifacts" / "manifest.json").touch()
        assert store.list_checkpoints() == [KEY]

    def test_a_killed_writer_leaves_nothing_at_the_key_and_is_swept(
        self, store: LocalStore, source: Path
    ) -> None:
        command = [sys.executable, "-c", KILLED_WRITER, store.root, KEY, source]
        pipes: dict[str, Any] = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE}
        with subprocess.Popen(command, **pipes) as writer:
            try:
                assert writer.stdout is not None
                assert writer.stdout.readline() == b"writing\n"
                assert store.list_checkpoints() == []
                # Somebody who sweeps meanwhile does not disturb a living writer.
                assert store.sweep() == 0
                assert len(list((store.root / ".staging").iterdir())) == 1
            finally:
                writer.send_signal(signal.SIGKILL)
        assert not (store.root / KEY).exists()
        assert store.sweep() > 0
        assert list((store.root / ".staging").iterdir()) == []
        assert put(store, source)

    def test_a_swept_staging_folder_is_made_again(
        self, store: LocalStore, source: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        make = Path.mkdir
        swept: list[Path] = []

        def make_and_lose(self: Path, *args: Any, **kwargs: Any) -> None:
            make(self, *args, **kwargs)
            if self.parent.name == ".staging" and not swept:
                swept.append(self)
                self.rmdir()

        monkeypatch.setattr(Path, "mkdir", make_and_lose)
        assert put(store, source)
        assert swept

    def test_sweeping_an_empty_store_is_no_error(self, store: LocalStore) -> None:
        assert store.sweep() == 0

    def test_several_threads_write_at_once(self, store: LocalStore, source: Path) -> None:
        keys = [f"train_{n}/checkpoint_1-000001" for n in range(4)]
        threads = [threading.Thread(target=put, args=(store, source, key)) for key in keys]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        assert store.list_checkpoints() == keys
        eventually(lambda: threading.active_count() == 1)


def test_an_address_means_a_store(tmp_path: Path) -> None:
    for address in (str(tmp_path), f"file://{tmp_path}", f"file://localhost{tmp_path}"):
        store = open_store(address)
        assert isinstance(store, LocalStore)
        assert store.root == tmp_path
    with pytest.raises(ConfigError, match="s3://bucket"):
        open_store("s3://bucket")
