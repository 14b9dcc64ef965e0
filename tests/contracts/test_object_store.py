"""The contract of `ObjectStore`, checked on MinIO and `tunemq store serve`.

Some tests cover what only a real server shows.
"""

from __future__ import annotations

import gzip
import hashlib
import os
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.support.stores.object_servers import ObjectServer, ServedFolder
from tests.support.waiting import eventually, need
from tunemq_shared.base.errors import CheckpointCorrupt, StoreError
from tunemq_shared.base.retrying import CancelToken, TransferCancelled, in_parallel, retried
from tunemq_shared.objects import remote_object_store
from tunemq_shared.objects.multipart import PART
from tunemq_shared.objects.object_store import (
    InvalidObjectName,
    NoSuchObject,
    ObjectSizeMismatch,
)
from tunemq_shared.objects.remote_object_store import RemoteObjects
from tunemq_shared.objects.store_traffic import TRAFFIC

LARGE = 2 * PART + 12345


@pytest.fixture(params=["minio", "served"])
def server(request: pytest.FixtureRequest) -> ObjectServer:
    return request.getfixturevalue(f"shared_{request.param}")


@pytest.fixture
def objects(server: ObjectServer) -> Iterator[RemoteObjects]:
    with server.objects(server.create_bucket(), "some/where") as objects:
        yield objects


def make_file(path: Path, size: int) -> tuple[int, str]:
    data = os.urandom(size)
    path.write_bytes(data)
    return size, hashlib.sha256(data).hexdigest()


def put(objects: RemoteObjects, key: str, path: Path, cancel: CancelToken | None = None) -> None:
    size, sha256 = path.stat().st_size, hashlib.sha256(path.read_bytes()).hexdigest()
    objects.put_file(key, path, size=size, sha256=sha256, cancel=cancel or CancelToken(200))


class TestObjectStore:
    """The test suite of the contract."""

    def test_probe_of_a_usable_place_leaves_it_unchanged(self, objects, monkeypatch):
        monkeypatch.setattr(remote_object_store, "PROBE_S", 60.0)  # on a busy machine
        objects.probe()
        assert list(objects.list()) == []

    def test_bytes_round_trip(self, objects):
        for data in (b"", b"x", os.urandom(2**20)):
            objects.put_bytes("a/b", data)
            assert objects.get_bytes("a/b", limit=2**20) == data

    def test_object_may_be_overwritten(self, objects):
        objects.put_bytes("a", b"old")
        objects.put_bytes("a", b"new")
        assert objects.get_bytes("a", limit=3) == b"new"

    @pytest.mark.parametrize("size", [0, 1, PART + 1])
    def test_store_has_an_object_only_of_its_size(self, objects, tmp_path, size):
        assert not objects.has("t/file", size)
        make_file(tmp_path / "file", size)
        put(objects, "t/file", tmp_path / "file")
        assert [objects.has("t/file", each) for each in (size, size + 1, max(size - 1, 1))] == [
            True,
            False,
            size == 1,
        ]

    def test_read_returns_no_more_bytes_than_wanted(self, objects):
        objects.put_bytes("a", bytes(100))
        with pytest.raises(ObjectSizeMismatch, match="at most 99 bytes, got 100"):
            objects.get_bytes("a", limit=99)

    @pytest.mark.parametrize("size", [0, 1, PART - 1, PART, PART + 1, LARGE])
    def test_files_of_all_sizes_round_trip(self, objects, tmp_path, size):
        make_file(tmp_path / "file", size)
        put(objects, "t/c/file", tmp_path / "file")
        assert [found[:2] for found in objects.list("t/")] == [("t/c/file", size)]
        objects.get_file("t/c/file", tmp_path / "copy", size=size, cancel=CancelToken(200))
        assert (tmp_path / "copy").read_bytes() == (tmp_path / "file").read_bytes()

    @pytest.mark.parametrize("size", [1000, LARGE])
    def test_file_that_changes_during_its_upload_makes_no_object(self, objects, tmp_path, size):
        path = tmp_path / "file"
        size, sha256 = make_file(path, size)
        wrong = [
            ({"size": size, "sha256": "0" * 64}, "expected SHA-256 0000"),
            ({"size": size + 1, "sha256": sha256}, "cut short"),
            ({"size": size - 1, "sha256": sha256}, "has grown"),
        ]
        for changes, message in wrong:
            with pytest.raises(CheckpointCorrupt, match=message):
                objects.put_file("a", path, cancel=CancelToken(200), **changes)
        assert list(objects.list()) == []
        assert objects.abort_uploads(lambda _key: True) == 0

    @pytest.mark.parametrize("size", [0, 10, LARGE])
    def test_object_of_another_size_is_detected(self, objects, tmp_path, size):
        make_file(tmp_path / "file", size)
        put(objects, "a", tmp_path / "file")
        for expected in {size + 1, max(size - 1, 0), size + 2 * PART} - {size}:
            with pytest.raises(CheckpointCorrupt, match=r"expected \d+ bytes|cut short"):
                objects.get_file("a", tmp_path / "copy", size=expected, cancel=CancelToken(200))
            (tmp_path / "copy").unlink()

    def test_missing_object_is_reported(self, objects, tmp_path):
        with pytest.raises(NoSuchObject, match="nowhere"):
            objects.get_bytes("nowhere", limit=1)
        for size in (1, LARGE):
            with pytest.raises(NoSuchObject, match="nowhere"):
                objects.get_file("nowhere", tmp_path / "copy", size=size, cancel=CancelToken(200))
            (tmp_path / "copy").unlink()

    def test_removing_twice_is_no_error(self, objects):
        keys = [f"a/{n}" for n in range(20)]
        for key in keys:
            objects.put_bytes(key, b"x")
        objects.delete([*keys, "a/none"])
        objects.delete(keys)
        assert list(objects.list()) == []

    def test_keys_with_a_prefix_are_listed_in_order(self, objects, server):
        for key in ("b/1", "a/2", "a/1", "a-1", "ä/ü ?#%+&"):
            objects.put_bytes(key, b"12345")
        assert [found.key for found in objects.list("a/")] == ["a/1", "a/2"]
        assert [found.key for found in objects.list("a")] == ["a-1", "a/1", "a/2"]
        assert {found.key for found in objects.list()} == {
            *("b/1", "a/2", "a/1", "a-1", "ä/ü ?#%+&")
        }
        assert all(found.size == 5 and found.modified > 1e9 for found in objects.list())
        assert list(objects.list("c")) == []

    def test_more_objects_than_one_reply_holds_are_listed(self, objects):
        keys = [f"{n:04d}" for n in range(1100)]

        def put_one(key: str, cancel: CancelToken) -> None:
            retried(lambda: objects.put_bytes(key, b""), cancel)

        in_parallel(put_one, keys, CancelToken(250), at_once=4)
        assert [found.key for found in objects.list()] == keys

    @pytest.mark.parametrize("key", ["", "/a", "../a", "a/../../b", "a//b", "a/", ".", "a\0b"])
    def test_key_never_leaves_the_prefix(self, objects, key, tmp_path):
        (tmp_path / "file").touch()
        for use in (
            lambda: objects.put_bytes(key, b""),
            lambda: objects.get_bytes(key, limit=1),
            lambda: objects.delete([key]),
            lambda: put(objects, key, tmp_path / "file"),
            lambda: objects.get_file(key, tmp_path / "copy", size=0, cancel=CancelToken(5)),
        ):
            with pytest.raises(StoreError, match="is not the key of an object"):
                use()

    def test_put_file_key_that_is_too_long_fails_at_once(self, objects, tmp_path, monkeypatch):
        (tmp_path / "file").touch()
        # With the prefix the keys have 1024 and 1025 bytes; "ä" has two.
        longest = ("ä" * 100 + "/") * 5
        longest += "k" * (1024 - len(f"some/where/{longest}".encode()))
        put(objects, longest, tmp_path / "file")
        assert [found.key for found in objects.list()] == [longest]
        with pytest.raises(InvalidObjectName, match="longer than 1024 bytes"):
            put(objects, f"{longest}k", tmp_path / "file")
        # A server with a lower limit reports it itself.
        monkeypatch.setattr(remote_object_store, "MOST_KEY_BYTES", 10_000)
        before = TRAFFIC.so_far().failures
        with pytest.raises(InvalidObjectName, match="KeyTooLong"):
            put(objects, f"{longest}k", tmp_path / "file")
        assert TRAFFIC.so_far().failures == before

    def test_objects_beside_the_prefix_are_not_listed(self, server):
        bucket = server.create_bucket()
        with server.objects(bucket, "exp") as ours, server.objects(bucket, "exp2") as theirs:
            theirs.put_bytes("a", b"")
            assert list(ours.list()) == []
            assert ours.abort_uploads(lambda _key: True) == 0

    @pytest.mark.parity(151)
    def test_cancelled_transfer_ends_and_leaves_nothing(self, objects, tmp_path):
        make_file(tmp_path / "file", LARGE)
        cancel = CancelToken()
        cancel.cancel()
        with pytest.raises(TransferCancelled):
            put(objects, "a", tmp_path / "file", cancel)
        with pytest.raises(TransferCancelled):
            objects.get_file("a", tmp_path / "copy", size=LARGE, cancel=cancel)
        assert list(objects.list()) == []
        assert objects.abort_uploads(lambda _key: True) == 0


def unfinished(objects: RemoteObjects) -> set[str]:
    """Return the keys of objects with unfinished multipart uploads."""
    names = (one.name for one in objects._client.unfinished())
    prefix = objects._prefix
    return {name.removeprefix(prefix) for name in names if name.startswith(prefix)}


def test_parts_of_a_dead_writer_are_removed(shared_minio):
    with shared_minio.objects(shared_minio.create_bucket(), "exp") as objects:
        for key in ("ours/a", "theirs/b"):
            objects._client.create_upload(objects._name(key), "it cannot be written")
        assert objects.abort_uploads(lambda key: key.startswith("ours/")) == 1
        assert unfinished(objects) == {"theirs/b"}
        assert objects.abort_uploads(lambda _key: True) == 1


@pytest.mark.parametrize("stored", [gzip.compress(bytes(10_000), mtime=0), b"not compressed"])
def test_object_is_read_as_it_is_stored_whatever_compression_it_claims(shared_minio, stored):
    """A worker could make the head unpack any amount, or call damage an unreachable server."""
    bucket = shared_minio.create_bucket()
    headers = {"Content-Encoding": "gzip"}
    shared_minio.client()._put_object(bucket, "exp/a", stored, headers)
    with shared_minio.objects(bucket, "exp") as objects:
        assert objects.get_bytes("a", limit=100) == stored


def test_file_whose_first_parts_the_server_forgot_is_sent_again(
    shared_minio, tmp_path, monkeypatch
):
    need("MinIO, which lists unfinished uploads", not isinstance(shared_minio, ServedFolder))
    make_file(tmp_path / "file", LARGE)
    forgotten = []

    def forget(name: str) -> None:
        assert name == "upload.within_object"
        if not forgotten:
            forgotten.append(objects.abort_uploads(lambda _key: True))

    with shared_minio.objects(shared_minio.create_bucket()) as objects:
        monkeypatch.setattr(remote_object_store, "failpoint", forget)
        put(objects, "a", tmp_path / "file")
        assert forgotten == [1]
        objects.get_file("a", tmp_path / "copy", size=LARGE, cancel=CancelToken(200))
    assert (tmp_path / "copy").read_bytes() == (tmp_path / "file").read_bytes()


def test_running_transfer_can_be_cancelled(shared_minio, tmp_path, monkeypatch):
    make_file(tmp_path / "file", 4 * PART)
    cancel = CancelToken()
    monkeypatch.setattr(remote_object_store, "failpoint", lambda _name: cancel.cancel())
    with shared_minio.objects(shared_minio.create_bucket()) as objects:
        with pytest.raises(TransferCancelled):
            put(objects, "a", tmp_path / "file", cancel)
        assert list(objects.list()) == []
        eventually(lambda: not unfinished(objects))
