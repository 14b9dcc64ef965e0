"""Blobs are named by their content, and are complete or absent."""

from __future__ import annotations

import hashlib
import os
from collections.abc import Iterator
from pathlib import Path

import pytest

from tunemq_shared.base.errors import BlobCorrupt, StoreError
from tunemq_shared.code import blob_folder
from tunemq_shared.code.blob_folder import BlobFolder, check_blob, read_blob, requested_blob
from tunemq_shared.protocol.messages import BlobRef


@pytest.fixture
def folder(tmp_path: Path) -> BlobFolder:
    return BlobFolder(tmp_path / "blobs")


def spoil(ref: BlobRef, content: bytes) -> None:
    Path(ref.path).chmod(0o600)
    Path(ref.path).write_bytes(content)


def test_blob_is_named_by_its_content(folder: BlobFolder) -> None:
    ref = folder.put(b"code")
    assert ref.sha256 == hashlib.sha256(b"code").hexdigest()
    assert ref.size == 4
    assert read_blob(ref) == b"code"
    assert os.listdir(folder.root) == [ref.sha256]


def test_blob_is_readable_only_by_its_owner_and_read_only(folder: BlobFolder) -> None:
    ref = folder.put(b"code")
    assert folder.root.stat().st_mode & 0o777 == 0o700
    assert Path(ref.path).stat().st_mode & 0o777 == 0o400


def test_buffers_make_one_blob_without_being_joined(folder: BlobFolder) -> None:
    big = bytes(range(256)) * 8192
    ref = folder.put([b"head", memoryview(big), memoryview(b"tail")])
    assert ref == folder.put(b"head" + big + b"tail")
    assert ref.size == len(big) + 8


def test_equal_content_is_kept_once_and_its_file_stays(folder: BlobFolder) -> None:
    first = folder.put(b"code")
    inode = Path(first.path).stat().st_ino
    assert folder.put(b"code") == first
    assert Path(first.path).stat().st_ino == inode


def test_file_of_the_wrong_size_is_replaced(folder: BlobFolder) -> None:
    ref = folder.put(b"code")
    spoil(ref, b"cod")
    assert read_blob(folder.put(b"code")) == b"code"


def test_folder_or_link_in_place_of_a_blob_is_replaced(folder: BlobFolder) -> None:
    ref = folder.put(b"some content")
    path = Path(ref.path)
    for put_there in (path.mkdir, lambda: path.symlink_to("nowhere")):
        path.unlink()
        put_there()
        if path.is_dir():
            (path / "file").touch()
        assert folder.put(b"some content") == ref
        assert path.read_bytes() == b"some content"
        assert not path.is_symlink()


def test_failed_write_leaves_nothing(folder: BlobFolder) -> None:
    def buffers() -> Iterator[bytes]:
        yield b"half"
        raise OSError(28, "No space left on device")

    with pytest.raises(StoreError, match=r"blobs: No space left"):
        folder.put(buffers())
    assert os.listdir(folder.root) == []


def test_folder_that_cannot_be_created_is_an_error_with_its_path(tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    with pytest.raises(StoreError, match=r"file/blobs: Not a directory"):
        BlobFolder(tmp_path / "file" / "blobs").put(b"")


def test_requested_blob_is_a_file_that_is_named_by_its_content(folder: BlobFolder) -> None:
    ref = folder.put(b"code")
    assert requested_blob(ref) == Path(ref.path)
    secret = folder.root.parent / "scheduler.toml"
    secret.write_bytes(b"secret")
    content = hashlib.sha256(b"secret").hexdigest()
    for named in ("0" * 64, content):
        with pytest.raises(BlobCorrupt, match=r"scheduler.toml' is not that of a blob"):
            requested_blob(BlobRef(named, 6, str(secret)))


def test_error_about_a_requested_blob_says_nothing_of_its_content(folder: BlobFolder) -> None:
    ref = folder.put(b"secret")
    path = Path(ref.path).with_name("0" * 64)
    Path(ref.path).rename(path)
    with pytest.raises(BlobCorrupt) as caught:
        requested_blob(BlobRef(path.name, 6, str(path)))
    assert ref.sha256 not in str(caught.value)


def test_damage_is_detected(folder: BlobFolder) -> None:
    ref = folder.put(b"code")
    assert check_blob(ref) == Path(ref.path)
    spoil(ref, b"evil")
    with pytest.raises(StoreError, match="is damaged: its content does not"):
        read_blob(ref)
    spoil(ref, b"shorter"[:3])
    with pytest.raises(StoreError, match="has 3 bytes, not 4"):
        check_blob(ref)
    Path(ref.path).unlink()
    with pytest.raises(StoreError, match="cannot be read: No such file"):
        check_blob(ref)


def test_another_folder_adopts_a_blob_by_a_link(folder: BlobFolder, tmp_path: Path) -> None:
    ref = folder.put(b"code")
    other = BlobFolder(tmp_path / "other")
    adopted = other.adopt(ref)
    assert Path(adopted.path).samefile(ref.path)
    assert other.adopt(ref) == other.adopt(adopted) == adopted
    assert os.listdir(other.root) == [ref.sha256]


def test_another_folder_adopts_a_copy_where_links_do_not_work(
    folder: BlobFolder, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def reject(*_: object) -> None:
        raise OSError(18, "Invalid cross-device link")

    monkeypatch.setattr(blob_folder.os, "link", reject)
    ref = folder.put(b"code")
    adopted = BlobFolder(tmp_path / "other").adopt(ref)
    assert not Path(adopted.path).samefile(ref.path)
    assert read_blob(adopted) == b"code"


def test_missing_blob_cannot_be_adopted(folder: BlobFolder, tmp_path: Path) -> None:
    ref = folder.put(b"code")
    Path(ref.path).unlink()
    with pytest.raises(StoreError, match="No such file"):
        BlobFolder(tmp_path / "other").adopt(ref)


def test_leftovers_of_a_killed_writer_are_removed_and_whole_blobs_stay(folder: BlobFolder) -> None:
    folder.remove_leftovers()  # of a folder that does not exist
    ref = folder.put(b"code")
    (folder.root / ".1234-0123456789ab").write_bytes(b"half a b")
    folder.remove_leftovers()
    assert [path.name for path in folder.root.iterdir()] == [ref.sha256]
