"""How a node treats a cache folder into which trials could write."""

from __future__ import annotations

import os
from pathlib import Path

from tests.support.leases import leased
from tunemq_shared.checkpoints.manifest import COMMITTED
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


def test_take_over_of_a_cache_with_a_leased_manifest_removes_that_checkpoint(
    tmp_path: Path,
) -> None:
    folder = tmp_path / "t" / "checkpoint_1-000001"
    folder.mkdir(parents=True)
    with leased(folder / COMMITTED):
        assert cache_disk.take_over(str(tmp_path)).checkpoints == []
    assert not folder.exists()
