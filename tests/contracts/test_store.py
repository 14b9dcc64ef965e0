"""The contract of `CheckpointStore`, checked on each implementation.

An implementation runs the suite by subclassing `StoreContract` with a ``store`` fixture and a
``damage`` method: a local folder, MinIO, and `tunemq store serve`.
"""

from __future__ import annotations

import hashlib
import json
import math
import os
from abc import ABC, abstractmethod
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.support.searches.checkpoints import KEY, contents, fill, info, put
from tests.support.stores.object_servers import ObjectServer
from tunemq_shared.base.errors import CheckpointCorrupt, CheckpointError, StoreError
from tunemq_shared.checkpoints import hashed_copy
from tunemq_shared.checkpoints.checkpoint import Checkpoint
from tunemq_shared.checkpoints.local_store import LocalCheckpointStore
from tunemq_shared.checkpoints.manifest import CheckpointInfo, make_manifest
from tunemq_shared.checkpoints.remote_store import RemoteCheckpointStore
from tunemq_shared.checkpoints.store import CheckpointStore
from tunemq_shared.checkpoints.store_sink import StoreSink
from tunemq_shared.protocol.messages import CheckpointRef


@pytest.fixture
def source(tmp_path: Path) -> Path:
    return fill(tmp_path / "source")


class StoreContract(ABC):
    """The test suite of the contract."""

    @abstractmethod
    def damage(self, store: Any, key: str, name: str, content: bytes | None) -> None:
        """Replace or remove a file of a checkpoint, behind the store's back."""

    @abstractmethod
    def with_manifest(self, store: Any, key: str, manifest: bytes) -> str:
        """Make a checkpoint from a manifest alone; return the manifest's hash."""

    def test_stored_checkpoint_is_opened_unchanged(
        self, store: CheckpointStore, source: Path
    ) -> None:
        committed = put(store, source)
        opened = store.open_checkpoint(KEY, committed.sha256)
        assert contents(opened.path) == contents(source)
        assert committed.key == KEY
        assert (
            committed.size
            == opened.manifest.size
            == sum(path.stat().st_size for path in source.rglob("*") if path.is_file())
        )

    def test_manifest_names_the_trial_of_the_checkpoint(
        self, store: CheckpointStore, source: Path
    ) -> None:
        state = {"iteration": 5, "time_total_s": 0.1, "big": 2**60, "list": [1, None, "x"]}
        committed = put(store, source, metrics={"loss": 0.5, "bad": math.nan}, state=state)
        manifest = store.open_checkpoint(KEY, committed.sha256).manifest
        assert (manifest.trial, manifest.attempt, manifest.n, manifest.step) == ("t0", 1, 1, 5)
        assert manifest.state == state
        assert manifest.metrics["loss"] == 0.5
        assert math.isnan(manifest.metrics["bad"])
        hashes = {file.name: file.sha256 for file in manifest.files}
        expected = hashlib.sha256((source / "model.bin").read_bytes()).hexdigest()
        assert hashes["model.bin"] == expected

    def test_source_may_change_after_the_put(self, store: CheckpointStore, source: Path) -> None:
        committed = put(store, source)
        (source / "model.bin").write_bytes(b"next")
        (source / "deep" / "er" / "state").unlink()
        assert store.open_checkpoint(KEY, committed.sha256)

    def test_empty_folder_is_a_checkpoint(self, store: CheckpointStore, tmp_path: Path) -> None:
        (tmp_path / "empty").mkdir()
        committed = put(store, tmp_path / "empty")
        assert contents(store.open_checkpoint(KEY, committed.sha256).path) == {}

    def test_key_is_never_written_twice(self, store: CheckpointStore, source: Path) -> None:
        committed = put(store, source)
        with pytest.raises(StoreError, match=f"{KEY} is there already"):
            put(store, source)
        assert store.open_checkpoint(KEY, committed.sha256)

    def test_checkpoints_are_listed_until_they_are_deleted(
        self, store: CheckpointStore, source: Path
    ) -> None:
        assert store.list_checkpoints() == []
        keys = [f"{name}-000001" for name in ("a/checkpoint_1", "a/checkpoint_2", "b/checkpoint_1")]
        for key in reversed(keys):
            put(store, source, key)
        assert store.list_checkpoints() == keys
        store.delete_checkpoint(keys[1])
        assert store.list_checkpoints() == [keys[0], keys[2]]
        with pytest.raises(StoreError, match="checkpoint_2-000001"):
            store.open_checkpoint(keys[1], "0" * 64)

    @pytest.mark.parity(111)
    def test_deleting_a_missing_checkpoint_is_no_error(
        self, store: CheckpointStore, source: Path
    ) -> None:
        store.delete_checkpoint(KEY)
        put(store, source)
        store.delete_checkpoint(KEY)
        store.delete_checkpoint(KEY)
        assert store.list_checkpoints() == []

    def test_deleted_key_may_be_written(self, store: CheckpointStore, source: Path) -> None:
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
    def test_key_that_leads_elsewhere_is_rejected(
        self, store: CheckpointStore, source: Path, key: str
    ) -> None:
        for use in (
            lambda: put(store, source, key),
            lambda: store.open_checkpoint(key, "0" * 64),
            lambda: store.delete_checkpoint(key),
        ):
            with pytest.raises(StoreError, match="is not the key of a checkpoint"):
                use()

    # --- what may be saved -----------------------------------------------------------------------

    def test_links_inside_are_replaced_by_their_targets(
        self, store: CheckpointStore, tmp_path: Path
    ) -> None:
        source = tmp_path / "linked"
        (source / "step_3").mkdir(parents=True)
        (source / "step_3" / "weights").write_bytes(b"w")
        (source / "latest").symlink_to("step_3")
        (source / "best").symlink_to(source / "step_3" / "weights")
        committed = put(store, source)
        path = store.open_checkpoint(KEY, committed.sha256).path
        assert contents(path) == {"best": b"w", "latest/weights": b"w", "step_3/weights": b"w"}
        assert not any(found.is_symlink() for found in path.rglob("*"))

    def test_source_that_is_a_link_is_followed(
        self, store: CheckpointStore, source: Path, tmp_path: Path
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
    def test_other_links_are_rejected_by_name(
        self, store: CheckpointStore, source: Path, target: str, message: str
    ) -> None:
        (source.parent / "outside").write_bytes(b"secret")
        (source / "bad").symlink_to(target)
        with pytest.raises(CheckpointError, match=message):
            put(store, source)
        assert store.list_checkpoints() == []

    def test_pipes_and_devices_are_rejected_by_name(
        self, store: CheckpointStore, source: Path
    ) -> None:
        os.mkfifo(source / "pipe")
        with pytest.raises(
            CheckpointError, match=r"files and folders only, and '.*pipe' is neither"
        ):
            put(store, source)

    def test_source_that_is_no_folder_is_rejected(
        self, store: CheckpointStore, source: Path
    ) -> None:
        for path in (source / "model.bin", source / "missing"):
            with pytest.raises(CheckpointError, match="must be a folder"):
                put(store, path)

    def test_state_that_json_cannot_hold_is_rejected(
        self, store: CheckpointStore, source: Path
    ) -> None:
        with pytest.raises(CheckpointError, match="plain values"):
            put(store, source, state={"a": object()})
        assert store.list_checkpoints() == []

    def test_file_that_changes_meanwhile_is_detected(
        self, store: CheckpointStore, source: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        write_all = hashed_copy.write_all

        def write_and_append(fd: int, data: memoryview) -> None:
            write_all(fd, data)
            with (source / "model.bin").open("ab") as file:
                file.write(bytes(2**20))

        monkeypatch.setattr(hashed_copy, "write_all", write_and_append)
        with pytest.raises(CheckpointError, match=r"model.bin' changed while it was saved"):
            put(store, source)
        assert store.list_checkpoints() == []

    # --- opening ---------------------------------------------------------------------------------

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
    def test_damage_is_detected_and_named(
        self, store: CheckpointStore, source: Path, name: str, content: bytes | None, message: str
    ) -> None:
        committed = put(store, source)
        self.damage(store, KEY, name, content)
        with pytest.raises(CheckpointCorrupt, match=f"{KEY}: .*{message}"):
            store.open_checkpoint(KEY, committed.sha256)

    def test_flipped_bit_in_a_large_file_is_detected(
        self, store: CheckpointStore, source: Path
    ) -> None:
        committed = put(store, source)
        spoilt = bytearray((source / "model.bin").read_bytes())
        spoilt[-1] ^= 1
        self.damage(store, KEY, "files/model.bin", bytes(spoilt))
        with pytest.raises(CheckpointCorrupt, match=r"'model.bin' is damaged: expected SHA-256"):
            store.open_checkpoint(KEY, committed.sha256)

    def test_hash_other_than_the_callers_is_rejected(
        self, store: CheckpointStore, source: Path
    ) -> None:
        put(store, source)
        with pytest.raises(CheckpointCorrupt, match="expected SHA-256 " + "0" * 64):
            store.open_checkpoint(KEY, "0" * 64)

    @pytest.mark.parametrize(
        "name",
        ["/etc/passwd", "../other/file", "a/../../b", "..", ".", "", "a//b", "a/./b", "a/", "a\0b"],
    )
    @pytest.mark.parametrize("field", ["files", "folders"])
    def test_names_that_lead_out_of_the_checkpoint_are_rejected(
        self, store: CheckpointStore, name: str, field: str
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
            ({"attempt": "first"}, "is not one"),
            ({"files": [{"name": "a", "size": 0, "sha256": ""}] * 2}, "'a' is listed twice"),
        ],
    )
    def test_invalid_manifest_is_rejected(
        self, store: CheckpointStore, changes: dict[str, Any], message: str
    ) -> None:
        content = {**json.loads(make_manifest(info(), (), ())), **changes}
        sha256 = self.with_manifest(store, KEY, json.dumps(content).encode())
        with pytest.raises(CheckpointCorrupt, match=message):
            store.open_checkpoint(KEY, sha256)

    @pytest.mark.parametrize("data", [b"", b"[]", b"\xff", b"[" * 100_000])
    def test_manifest_that_is_no_json_is_rejected(
        self, store: CheckpointStore, data: bytes
    ) -> None:
        sha256 = self.with_manifest(store, KEY, data)
        with pytest.raises(CheckpointCorrupt, match="is not one"):
            store.open_checkpoint(KEY, sha256)

    # --- removal ---------------------------------------------------------------------------------

    def test_files_of_a_checkpoint_are_copied_to_the_callers_folder(
        self, store: CheckpointStore, source: Path, tmp_path: Path
    ) -> None:
        committed = put(store, source, state={"iteration": 3})
        target = tmp_path / "mine" / "copy"
        target.parent.mkdir()
        manifest = store.get_checkpoint(KEY, committed.sha256, target)
        assert manifest.state == {"iteration": 3}
        assert contents(target) == contents(source)
        assert [path.name for path in target.parent.iterdir()] == ["copy"]

    def test_existing_folder_is_not_written_to(
        self, store: CheckpointStore, source: Path, tmp_path: Path
    ) -> None:
        committed = put(store, source)
        target = fill(tmp_path / "precious")
        before = contents(target)
        with pytest.raises(StoreError, match="precious"):
            store.get_checkpoint(KEY, committed.sha256, target)
        assert contents(target) == before

    def test_damaged_checkpoint_leaves_no_files(
        self, store: CheckpointStore, source: Path, tmp_path: Path
    ) -> None:
        committed = put(store, source)
        self.damage(store, KEY, "files/deep/er/state", b"stale")
        (tmp_path / "mine").mkdir()
        with pytest.raises(CheckpointCorrupt, match=r"'deep/er/state' is damaged"):
            store.get_checkpoint(KEY, committed.sha256, tmp_path / "mine" / "copy")
        assert list((tmp_path / "mine").iterdir()) == []

    def test_manifest_is_read_without_the_files(self, store: CheckpointStore, source: Path) -> None:
        committed = put(store, source, metrics={"loss": 0.5})
        self.damage(store, KEY, "files/model.bin", None)
        manifest = store.read_manifest(KEY, committed.sha256)
        assert manifest.metrics == {"loss": 0.5}
        assert manifest.size == committed.size
        with pytest.raises(CheckpointCorrupt, match="expected SHA-256 " + "0" * 64):
            store.read_manifest(KEY, "0" * 64)

    def test_missing_checkpoint_is_reported(self, store: CheckpointStore, source: Path) -> None:
        committed = put(store, source)
        store.delete_checkpoint(KEY)
        for read in (store.open_checkpoint, store.read_manifest):
            with pytest.raises(CheckpointCorrupt, match=KEY):
                read(KEY, committed.sha256)

    # --- garbage collection -----------------------------------------------------------------------

    def test_only_unneeded_checkpoints_are_collected(
        self, store: CheckpointStore, source: Path
    ) -> None:
        live, busy, forgotten = (f"a/checkpoint_1-00000{n}" for n in (1, 2, 3))
        committed = {key: put(store, source, key) for key in (live, busy, forgotten)}
        collected = store.collect({live: committed[live].sha256}, lambda key: key == busy)
        assert store.list_checkpoints() == [live, busy]
        assert collected.objects > 0
        assert collected.bytes >= committed[forgotten].size
        for key in (live, busy):
            assert store.open_checkpoint(key, committed[key].sha256)
        again = store.collect({live: committed[live].sha256}, lambda key: key == busy)
        assert again == (0, 0)

    def test_damaged_checkpoint_is_not_collected(
        self, store: CheckpointStore, source: Path
    ) -> None:
        committed = put(store, source)
        self.damage(store, KEY, "manifest.json", b"{}")
        assert store.collect({KEY: committed.sha256}, lambda _key: False) == (0, 0)

    # --- with a trial's session -------------------------------------------------------------------

    @pytest.mark.parity(92, 136)
    def test_session_saves_and_restores_through_its_sink(
        self, store: CheckpointStore, source: Path, tmp_path: Path
    ) -> None:
        sink = StoreSink(store, "train_0")
        info = CheckpointInfo(
            trial="t0", attempt=2, n=3, step=7, state={"iteration": 7}, metrics={"a": 1.0}
        )
        event = sink.save(source, info)
        assert event.key == "train_0/checkpoint_2-000003"
        assert (event.trial, event.attempt, event.n, event.step) == ("t0", 2, 3, 7)
        path = tmp_path / "copy"
        ref = CheckpointRef(key=event.key, sha256=event.sha256, step=7)
        assert sink.get(ref, path) == {"iteration": 7}
        assert contents(path) == contents(source)

    @pytest.mark.parity(38, 44)
    def test_dict_checkpoint_survives_the_store(
        self, store: CheckpointStore, tmp_path: Path
    ) -> None:
        sink = StoreSink(store, "train_0")
        with Checkpoint.from_dict({"weights": (1, 2)}).as_directory() as folder:
            info = CheckpointInfo(trial="t0", attempt=1, n=1, step=1, state={}, metrics={})
            event = sink.save(Path(folder), info)
        path = tmp_path / "copy"
        sink.get(CheckpointRef(key=event.key, sha256=event.sha256, step=1), path)
        assert Checkpoint.from_directory(path).to_dict() == {"weights": (1, 2)}


class TestLocalStore(StoreContract):
    """Checkpoints in a local folder."""

    @pytest.fixture(params=[True, False], ids=["durable", "quick"])
    def store(
        self, tmp_path: Path, request: pytest.FixtureRequest
    ) -> Iterator[LocalCheckpointStore]:
        (tmp_path / "experiment").mkdir()
        store = LocalCheckpointStore(tmp_path / "experiment", durable=request.param)
        yield store
        # No test leaves a half-written file behind.
        staging = tmp_path / "experiment" / ".staging"
        assert not staging.exists() or not list(staging.iterdir())

    def damage(
        self, store: LocalCheckpointStore, key: str, name: str, content: bytes | None
    ) -> None:
        file = store.root / key / name
        file.unlink() if content is None else file.write_bytes(content)

    def with_manifest(self, store: LocalCheckpointStore, key: str, manifest: bytes) -> str:
        (store.root / key / "files").mkdir(parents=True)
        (store.root / key / "manifest.json").write_bytes(manifest)
        return hashlib.sha256(manifest).hexdigest()

    def test_metadata_may_change_after_a_checkpoint_was_saved(
        self, store: LocalCheckpointStore, source: Path
    ) -> None:
        Checkpoint(source).set_metadata({"note": "first"})
        committed = put(store, source)
        opened = store.open_checkpoint(KEY, committed.sha256)
        Checkpoint(opened.path).update_metadata({"note": "second"})
        again = store.open_checkpoint(KEY, committed.sha256)
        assert Checkpoint(again.path).get_metadata() == {"note": "second"}


class RemoteStoreContract(StoreContract):
    """Checkpoints under a prefix on a server that stores other objects, too."""

    def damage(
        self, store: RemoteCheckpointStore, key: str, name: str, content: bytes | None
    ) -> None:
        manifest = json.loads(store.objects.get_bytes(f"{key}/manifest.json", limit=2**20))
        hashes = {f"files/{file['name']}": file["sha256"] for file in manifest["files"]}
        at = manifest["objects"][hashes[name]] if name in hashes else f"{key}/{name}"
        if content is None:
            store.objects.delete([at])
        else:
            store.objects.put_bytes(at, content)

    def with_manifest(self, store: RemoteCheckpointStore, key: str, manifest: bytes) -> str:
        store.objects.put_bytes(f"{key}/manifest.json", manifest)
        return hashlib.sha256(manifest).hexdigest()

    def test_opened_checkpoints_end_with_the_store(
        self, store: RemoteCheckpointStore, source: Path
    ) -> None:
        opened = store.open_checkpoint(KEY, put(store, source).sha256)
        store.close()
        assert not opened.path.exists()

    def test_large_file_of_an_unfinished_upload_is_collected(
        self, store: RemoteCheckpointStore, source: Path
    ) -> None:
        committed = put(store, source)
        client = store.objects._client
        name = store.objects._name("a/checkpoint_1-000001/" + "0" * 64)
        client.create_upload(name, "it cannot be written")
        store.collect({KEY: committed.sha256}, lambda _key: False)
        assert name not in [unfinished.name for unfinished in client.unfinished()]


class TestMinio(RemoteStoreContract):
    """Checkpoints in a real MinIO."""

    @pytest.fixture
    def store(self, shared_minio: ObjectServer) -> Iterator[RemoteCheckpointStore]:
        yield from _remote_store(shared_minio)


class TestServedFolder(RemoteStoreContract):
    """Checkpoints in a folder that `tunemq store serve` serves."""

    @pytest.fixture
    def store(self, shared_served: ObjectServer) -> Iterator[RemoteCheckpointStore]:
        yield from _remote_store(shared_served)


def _remote_store(server: ObjectServer) -> Iterator[RemoteCheckpointStore]:
    store = RemoteCheckpointStore(server.objects(server.create_bucket(), "results/experiment"))
    yield store
    store.close()
