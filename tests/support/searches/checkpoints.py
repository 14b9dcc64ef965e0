"""Checkpoints for the tests of stores."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

from tunemq_shared.checkpoints.manifest import CheckpointInfo
from tunemq_shared.checkpoints.store import CheckpointStore, CommittedCheckpoint

KEY = "train_0/checkpoint_1-000001"


def info(**changes: Any) -> CheckpointInfo:
    given: dict[str, Any] = {
        "trial": "t0",
        "attempt": 1,
        "n": 1,
        "step": 5,
        "metrics": {},
        "state": {},
    }
    return CheckpointInfo(**{**given, **changes})


def put(
    store: CheckpointStore, source: Path, key: str = KEY, **changes: Any
) -> CommittedCheckpoint:
    attempt, _, number = key.rpartition("/checkpoint_")[2].partition("-")
    if attempt.isdigit() and number.isdigit():
        changes = {"attempt": int(attempt), "n": int(number), **changes}
    return store.put_checkpoint(key, source, info(**changes))


def contents(folder: Path) -> dict[str, bytes]:
    """Every file and empty folder below a folder."""
    return {
        str(path.relative_to(folder)): path.read_bytes() if path.is_file() else b"<empty>"
        for path in sorted(folder.rglob("*"))
        if path.is_file() or not any(path.iterdir())
    }


def fill(folder: Path) -> Path:
    """Make the folder, with files of all sorts in it."""
    (folder / "deep" / "er").mkdir(parents=True)
    (folder / "hollow").mkdir()
    (folder / "model.bin").write_bytes(os.urandom(3 * 2**20 + 17))
    (folder / "deep" / "er" / "state").write_bytes(b"state")
    (folder / "nothing").touch()
    (folder / "odd name\n\udcff").write_bytes(b"odd")
    return folder
