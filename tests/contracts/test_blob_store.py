"""The contract of `BlobStore`, checked on a folder that both sides read and on MinIO."""

from __future__ import annotations

import hashlib
import os
from collections.abc import Iterator
from pathlib import Path

import msgspec
import pytest

from tests.support.stores.object_servers import ObjectServer
from tunemq_shared.base.errors import BlobCorrupt, StoreError
from tunemq_shared.base.retrying import CancelToken, TransferTimedOut
from tunemq_shared.code.blob_folder import BlobFolder, place_of, read_blob
from tunemq_shared.code.blob_store import BlobStore, open_blobs, ref_of
from tunemq_shared.objects.multipart import PART
from tunemq_shared.protocol.messages import BlobRef

LARGE = PART + 12345


class Place:
    """The address and data folder of a store, for tests that inspect its files."""

    def __init__(self, address: str, data: Path) -> None:
        self.address, self.data = address, data

    def writes(self) -> dict[str, float]:
        """Return the modification time of each blob's file, in nanoseconds."""
        paths = (path for path in self.data.rglob("*") if len(path.name) == 64)
        return {path.name: path.stat().st_mtime_ns for path in paths}


@pytest.fixture(params=["folder", "minio"])
def place(request: pytest.FixtureRequest, tmp_path: Path) -> Place:
    if request.param == "folder":
        return Place(str(tmp_path / "store"), tmp_path / "store")
    server: ObjectServer = request.getfixturevalue("minio")
    bucket = server.create_bucket()
    return Place(server.address(bucket, "some/where"), server.data / bucket)


@pytest.fixture
def store(place: Place) -> Iterator[BlobStore]:
    with open_blobs(place.address) as store:
        yield store


@pytest.fixture
def folder(tmp_path: Path) -> BlobFolder:
    return BlobFolder(tmp_path / "node" / "blobs")


class TestBlobStore:
    """The test suite of the contract."""

    @pytest.mark.parametrize("size", [0, 1, 1000, LARGE])
    def test_stored_blob_is_fetched_whole_and_read_only(self, store, folder, size):
        data = os.urandom(size)
        ref = store.put(data)
        assert (ref.sha256, ref.size) == (hashlib.sha256(data).hexdigest(), size)
        here = folder.root / ref.sha256
        fetched = store.fetch(ref, folder)
        assert fetched == msgspec.structs.replace(ref, path=str(here), store="")
        assert read_blob(fetched) == data
        assert os.listdir(folder.root) == [ref.sha256]
        assert here.stat().st_mode & 0o777 == 0o400

    def test_buffers_files_and_blobs_with_the_same_content_are_one_blob(self, store, tmp_path):
        (tmp_path / "file").write_bytes(b"headtail")
        refs = [
            store.put([b"head", memoryview(b"tail")]),
            store.put_file(tmp_path / "file"),
            store.put_blob(ref_of(tmp_path / "file")),
        ]
        assert len(set(refs)) == 1

    def test_blob_in_the_store_is_not_sent_again(self, store, place):
        ref = store.put(b"code")
        before = place.writes()
        assert list(before) == [ref.sha256]
        assert store.put(b"code") == ref
        assert place.writes() == before

    def test_blob_on_this_machine_is_not_read_again(self, store, folder):
        ref = store.put(b"code")
        inode = Path(store.fetch(ref, folder).path).stat().st_ino
        nowhere = msgspec.structs.replace(ref, store="", path="/nowhere")
        assert Path(store.fetch(nowhere, folder).path).stat().st_ino == inode

    def test_another_process_needs_only_the_reference(self, store, folder):
        ref = msgspec.msgpack.decode(msgspec.msgpack.encode(store.put(b"code")), type=BlobRef)
        if ref.store:
            assert place_of(ref).endswith(f"/some/where/blobs/{ref.sha256}")
            with open_blobs(ref.store) as other:
                assert read_blob(other.fetch(ref, folder)) == b"code"
        else:
            assert read_blob(ref) == b"code"

    def test_missing_blob_is_reported_and_leaves_nothing(self, store, folder):
        ref = msgspec.structs.replace(store.put(b"code"), sha256="0" * 64)
        with pytest.raises(BlobCorrupt, match=f"no blob .*blobs/{'0' * 64}"):
            store.fetch(ref, folder)
        assert os.listdir(folder.root) == []

    def test_blob_with_wrong_content_is_rejected_and_leaves_nothing(self, store, place, folder):
        ref = store.put(b"code")
        self.damage(place, ref.sha256, b"c0de")
        with pytest.raises(BlobCorrupt, match=f"{ref.sha256} is damaged: its content does not"):
            store.fetch(ref, folder)
        self.damage(place, ref.sha256, b"longer")
        with pytest.raises(BlobCorrupt, match=r"damaged: (it has more than|expected) 4 bytes"):
            store.fetch(ref, folder)
        assert os.listdir(folder.root) == []

    def test_blob_with_another_size_in_the_store_is_sent_again(self, store, place, folder):
        ref = store.put(b"code")
        self.damage(place, ref.sha256, b"cut")
        store.put(b"code")
        assert read_blob(store.fetch(ref, folder)) == b"code"

    @pytest.mark.parametrize("name", ["", "../../passwd", "0" * 63, "0" * 63 + "G"])
    def test_name_that_is_no_hash_is_rejected(self, store, folder, name):
        ref = msgspec.structs.replace(store.put(b"code"), sha256=name)
        with pytest.raises(BlobCorrupt, match="not the name of a blob"):
            store.fetch(ref, folder)

    def test_unreadable_file_is_named(self, store, tmp_path):
        with pytest.raises(StoreError, match=r"none cannot be read: No such file"):
            store.put_file(tmp_path / "none")

    @staticmethod
    def damage(place, sha256, content):
        """Replace the bytes of a blob, behind the store's back."""
        if "://" not in place.address:
            path = place.data / "blobs" / sha256
            path.chmod(0o600)
            path.write_bytes(content)
            return
        from tunemq_shared.checkpoints.open_store import open_objects

        with open_objects(place.address) as objects:
            objects.put_bytes(f"blobs/{sha256}", content)


def test_server_that_does_not_answer_is_retried_until_the_timeout(minio, folder):
    address = minio.address(minio.create_bucket())
    with open_blobs(address) as store:
        ref = store.put(b"code")
    away = address.replace(f":{minio.port}", ":1")
    troubles: list[str] = []
    with open_blobs(away) as store, pytest.raises(TransferTimedOut, match="Gave up after 3 s"):
        store.fetch(ref, folder, CancelToken(3), troubles.append)
    assert troubles
    assert os.listdir(folder.root) == []
