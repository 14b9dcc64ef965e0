"""Checkpoints on a real disk of 8 MiB that is full or read-only."""

from __future__ import annotations

import json
import os
import sys
from pathlib import Path
from typing import Any

import pytest

from tests.support.small_disk import with_small_disk

PUT = """
import json, os, sys
from pathlib import Path
from tunemq_shared.base.errors import StoreError
from tunemq_shared.checkpoints.local_store import LocalCheckpointStore
from tunemq_shared.checkpoints.manifest import CheckpointInfo

def put(n):
    info = CheckpointInfo(trial="t0", attempt=1, n=n, step=n, metrics={}, state={})
    try:
        return store.put_checkpoint(f"train_0/checkpoint_1-{n:06d}", source, info).sha256
    except StoreError as error:
        return str(error)

disk, source = Path(sys.argv[1]), Path(sys.argv[2])
(disk / "experiment").mkdir(exist_ok=True)
store = LocalCheckpointStore(disk / "experiment", durable=sys.argv[3] == "durable")
"""

FULL = """
first = put(1)
said = put(2)
left = sorted(str(path.relative_to(disk)) for path in disk.rglob("*") if path.is_file())
found = store.open_checkpoint("train_0/checkpoint_1-000001", first).path.is_dir()
free = os.statvfs(disk).f_bavail * os.statvfs(disk).f_frsize
(disk / "filler").write_bytes(b"x" * free)
store.delete_checkpoint("train_0/checkpoint_1-000001")
print(json.dumps([said, left, found, len(put(2)), free]))
"""

READ_ONLY = """
first = put(1)
os.system(f"mount -o remount,ro {disk}")
found = store.open_checkpoint("train_0/checkpoint_1-000001", first).path.is_dir()
said = [put(2)]
try:
    store.delete_checkpoint("train_0/checkpoint_1-000001")
except StoreError as error:
    said.append(str(error))
print(json.dumps([said, found]))
"""

WAITS = """
from tunemq_shared.checkpoints.store_sink import StoreSink

def say(reason):
    said.append(reason)
    if len(said) == 1:
        os.system(f"mount -o remount,rw {disk}")

said = []
os.system(f"mount -o remount,ro {disk}")
info = CheckpointInfo(trial="t0", attempt=1, n=1, step=1, metrics={}, state={})
committed = StoreSink(store, "train_0", timeout_s=60, say=say).save(source, info)
print(json.dumps([said, store.open_checkpoint(committed.key, committed.sha256).path.is_dir()]))
"""


@pytest.fixture
def source(tmp_path: Path) -> Path:
    source = tmp_path / "source"
    source.mkdir()
    for name in ("a.bin", "b.bin"):
        (source / name).write_bytes(os.urandom(5 * 2**19))
    return source


def on_a_small_disk(tmp_path: Path, source: Path, script: str, durable: str) -> Any:
    """Run the script on a small disk; return the JSON that it prints."""
    disk = tmp_path / "disk"
    python = [sys.executable, "-c", PUT + script, str(disk), str(source), durable]
    shown = with_small_disk(disk, python)
    assert shown.returncode == 0, shown.stderr
    return json.loads(shown.stdout)


@pytest.mark.parametrize("durable", ["durable", "quick"])
def test_f16_full_disk_is_named_with_its_free_bytes_and_keeps_no_partial_file(
    tmp_path: Path, source: Path, durable: str
) -> None:
    said, left, found, length, free = on_a_small_disk(tmp_path, source, FULL, durable)
    key = "train_0/checkpoint_1-000001"
    assert "checkpoint_1-000002 cannot be written: " in said
    assert "disk/experiment: No space left on device (" in said
    assert "bytes are free)" in said
    assert left == [
        f"experiment/{key}/{name}" for name in ("files/a.bin", "files/b.bin", "manifest.json")
    ]
    assert found
    # The failed write took no space; deleting works on a full disk, and frees space.
    assert free > 2 * 2**20
    assert length == 64


@pytest.mark.parametrize("durable", ["durable", "quick"])
def test_a_read_only_folder_is_named_and_can_be_read(
    tmp_path: Path, source: Path, durable: str
) -> None:
    (put, deleted), found = on_a_small_disk(tmp_path, source, READ_ONLY, durable)
    assert "checkpoint_1-000002 cannot be written: " in put
    assert "Read-only file system" in put
    assert "checkpoint_1-000001 cannot be removed: " in deleted
    assert "Read-only file system" in deleted
    assert "/disk/experiment/" in put
    assert "/disk/experiment/" in deleted
    assert found


def test_f16_trial_waits_while_its_store_is_read_only(tmp_path: Path, source: Path) -> None:
    said, found = on_a_small_disk(tmp_path, source, WAITS, "durable")
    assert "Read-only file system" in said[0]
    assert said[1:] == [""]
    assert found
