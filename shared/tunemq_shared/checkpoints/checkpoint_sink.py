"""`CheckpointSink`: how a running trial saves and restores its checkpoints."""

from __future__ import annotations

import re
from collections.abc import Callable
from pathlib import Path
from typing import Any, Final, Protocol

from tunemq_shared.checkpoints.manifest import CheckpointInfo
from tunemq_shared.protocol.messages import CheckpointCommitted, CheckpointRef, CheckpointWritten

#: The end of each key that `checkpoint_key` makes.
_KEY: Final = re.compile(r"/checkpoint_(\d{1,15})-\d{6,15}\Z", re.ASCII)


class CheckpointSink(Protocol):
    """Saves checkpoints; the session calls it between two steps and waits for it."""

    def make_folder(self, folder: str) -> None:
        """Make the trial's folder if it is missing.

        Raises:
            StoreError: The store of which it is a part is not there.
        """
        ...

    def when_available(self, call: Callable[[], None]) -> None:
        """Call a function that writes into the trial's folder; again while its disk is away.

        Raises:
            StoreError: The store of which it is a part is not there.
            OSError: The function's own.
        """
        ...

    def save(self, source: Path, info: CheckpointInfo) -> CheckpointWritten | CheckpointCommitted:
        """Save the files below ``source`` as the checkpoint that ``info`` describes.

        Afterwards the caller may change or remove ``source``. The session sends the returned event.
        `get` returns the ``state`` of ``info``.

        Raises:
            StoreError: The files could not be saved.
        """
        ...

    def get(self, ref: CheckpointRef, target: Path) -> dict[str, Any]:
        """Copy the verified files of ``ref`` into the new folder ``target``; returns its ``state``.

        The caller may change the copy: no other trial and no later attempt reads it.

        Raises:
            CheckpointCorrupt: Every copy is damaged or lacks a file.
            StoreError: The checkpoint cannot be read now.
        """
        ...


def checkpoint_key(folder_name: str, attempt: int, n: int) -> str:
    """The key of the ``n``-th checkpoint of an attempt of the trial with that folder's name."""
    return f"{folder_name}/checkpoint_{attempt}-{n:06d}"


def is_checkpoint_of(key: str, trial: str, attempt: int) -> bool:
    """Whether this is the key of a checkpoint that an attempt of a trial may write.

    The name of the trial's folder ends with its ID.
    """
    found = _KEY.search(key)
    if found is None or found[1] != str(attempt):
        return False
    folder = key[: found.start()]
    is_one = "/" not in folder and not folder.startswith(".")
    return is_one and (folder == trial or folder.endswith(f"_{trial}"))
