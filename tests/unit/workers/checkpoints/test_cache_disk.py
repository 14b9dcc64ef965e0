"""How a node treats a cache folder into which trials could write."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from tests.support.leases import leased
from tunemq_shared.checkpoints.manifest import COMMITTED, FILES
from tunemq_workers.checkpoints import cache_disk


def test_take_over_of_a_cache_skips_an_entry_that_is_not_utf8_and_cannot_be_removed(
    tmp_path: Path, monkeypatch
) -> None:
    planted = os.path.join(os.fsencode(tmp_path), b"x", b"\xff\xfe")
    os.makedirs(planted)
    plain = tmp_path / "t" / "checkpoint_1-000001"
    plain.mkdir(parents=True)
    rename = Path.rename

    def denied(path: Path, target: Path) -> Path:
        if path.parent.name == "x":
            raise PermissionError(13, "Permission denied", str(path))
        return rename(path, target)

    monkeypatch.setattr(Path, "rename", denied)
    assert cache_disk.take_over(str(tmp_path)).checkpoints == []
    assert os.path.isdir(planted)
    assert not plain.exists()


def test_take_over_removes_what_it_cannot_read_in_time(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A trial can put any number of large manifests into its search's cache."""
    for number in range(3):
        files = tmp_path / "t" / f"checkpoint_1-{number:06d}" / "files"
        files.mkdir(parents=True)
        (files.parent / "committed.json").write_text("{}")
    assert len(cache_disk.take_over(str(tmp_path)).checkpoints) == 3
    monkeypatch.setattr(cache_disk, "_TAKE_OVER_S", -1.0)
    assert cache_disk.take_over(str(tmp_path)).checkpoints == []
    assert not list(tmp_path.glob("t/*"))


def test_take_over_of_a_cache_with_a_leased_manifest_removes_that_checkpoint(
    tmp_path: Path,
) -> None:
    folder = tmp_path / "t" / "checkpoint_1-000001"
    folder.mkdir(parents=True)
    with leased(folder / COMMITTED):
        assert cache_disk.take_over(str(tmp_path)).checkpoints == []
    assert not folder.exists()


@pytest.mark.parametrize(("limit", "most"), [("_COUNT_S", 0.0), ("_MAX_NAMES", 2)])
def test_checkpoint_with_too_many_files_is_counted_in_part(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, limit: str, most: float
) -> None:
    files = tmp_path / "t" / "checkpoint_1-000001" / FILES
    files.mkdir(parents=True)
    for name in "abc":
        (files / name).write_bytes(b"12345")
    key = "t/checkpoint_1-000001"
    assert cache_disk.count_bytes(str(tmp_path), key) == (15, True)
    whole = cache_disk.measure(str(tmp_path), key)
    assert len(whole) == 5  # with two folders
    monkeypatch.setattr(cache_disk, limit, most)
    size, is_complete = cache_disk.count_bytes(str(tmp_path), key)
    assert size < 15
    assert not is_complete
    assert cache_disk.measure(str(tmp_path), key).items() < whole.items()


def test_files_behind_a_link_are_not_counted(tmp_path: Path) -> None:
    (tmp_path / "huge").mkdir()
    (tmp_path / "huge" / "file").write_bytes(b"x" * 10_000)
    folder = tmp_path / "t" / "checkpoint_1-000001"
    folder.mkdir(parents=True)
    (folder / FILES).symlink_to(tmp_path / "huge")
    assert cache_disk.count_bytes(str(tmp_path), "t/checkpoint_1-000001").size < 10_000
