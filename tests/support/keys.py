"""Keys of a farm for tests."""

from __future__ import annotations

import os
from pathlib import Path

from tunemq_scheduler.security.key_folder import SCHEDULER_FILE, WORKER_FILE, KeyFolder
from tunemq_shared.signing.live_keys import KeyRole, LiveKeys
from tunemq_shared.signing.message_signing import KEY_ID_BYTES, SECRET_BYTES, SigningKey


def a_key() -> SigningKey:
    """A new random key, which no process knows."""
    return SigningKey(os.urandom(KEY_ID_BYTES), os.urandom(SECRET_BYTES))


def key_folder(folder: Path, *names: str) -> KeyFolder:
    """The key files of a farm with these submitters."""
    made = KeyFolder(str(folder))
    made.create(names or ("ann",))
    return made


def of_scheduler(folder: KeyFolder) -> LiveKeys:
    """The scheduler's keys."""
    return LiveKeys(str(folder.path / SCHEDULER_FILE), KeyRole.SCHEDULER)


def of_submitter(folder: KeyFolder, name: str) -> str:
    """The path of a submitter's key file."""
    return str(folder.path / f"{name}.toml")


def of_worker(folder: KeyFolder) -> LiveKeys:
    """A worker's keys."""
    return LiveKeys(str(folder.path / WORKER_FILE), KeyRole.WORKER)
