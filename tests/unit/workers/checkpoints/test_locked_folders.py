"""Folders that a trial locked, where its node deletes and reads with the trial's rights."""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.support.files_of_a_user import files_of_a_user
from tests.support.other_users import open_folder
from tunemq_shared.code.blob_folder import BlobFolder, read_blob
from tunemq_shared.system.folder_trees import remove_tree
from tunemq_workers.checkpoints.cache_disk import take_over

__all__ = ["open_folder"]


@pytest.fixture
def folder(open_folder: Path) -> Iterator[Path]:
    """A folder of the trials' user, whose rights this test has."""
    with files_of_a_user(open_folder):
        yield open_folder


def lock(path: Path) -> None:
    """Make a folder with a file and a folder, and let no one enter it."""
    (path / "inner").mkdir(parents=True)
    (path / "file").touch()
    (path / "inner").chmod(0)
    path.chmod(0)


def test_locked_folders_are_removed(folder: Path) -> None:
    lock(folder / "top" / "locked")
    (folder / "top").chmod(0)
    remove_tree(folder / "top")
    assert os.listdir(folder) == []


def test_link_in_place_of_a_locked_folder_is_not_followed(folder: Path) -> None:
    lock(folder / "other")
    (folder / "link").symlink_to("other")
    remove_tree(folder / "link")
    assert os.lstat(folder / "other").st_mode & 0o777 == 0


def test_locked_folder_in_a_cache_is_removed_and_the_others_are_taken_over(folder: Path) -> None:
    kept = folder / "cache" / "trial" / "checkpoint_1-000001"
    (kept / "files").mkdir(parents=True)
    (kept / "committed.json").write_bytes(b"{}")
    lock(folder / "cache" / "zz")
    found = take_over(str(folder / "cache"))
    assert [one.key for one in found.checkpoints] == ["trial/checkpoint_1-000001"]
    assert os.listdir(folder / "cache") == ["trial"]


@pytest.mark.parametrize("kind", ["file", "link"])
def test_file_or_link_in_place_of_a_cache_is_replaced(folder: Path, kind: str) -> None:
    if kind == "file":
        (folder / "cache").touch()
    else:
        (folder / "elsewhere").mkdir()
        (folder / "cache").symlink_to("elsewhere")
    assert take_over(str(folder / "cache")).checkpoints == []
    assert not (folder / "cache").is_symlink()
    assert (folder / "cache").is_dir()


def test_locked_folder_in_place_of_a_blob_is_replaced(folder: Path) -> None:
    blobs = BlobFolder(folder / "blobs")
    ref = blobs.put(b"code")
    Path(ref.path).unlink()
    lock(Path(ref.path))
    assert read_blob(blobs.put(b"code")) == b"code"
