"""Where a running trial puts its checkpoints and gets them back from."""

from __future__ import annotations

from pathlib import Path
from typing import Any, Protocol

from tunemq_shared.checkpoints.manifest import CheckpointInfo
from tunemq_shared.protocol.messages import CheckpointCommitted, CheckpointRef, CheckpointWritten


class CheckpointSink(Protocol):
    """Keeps checkpoints; the session calls it between two steps and waits for it."""

    def save(self, source: Path, info: CheckpointInfo) -> CheckpointWritten | CheckpointCommitted:
        """Keep the files below ``source`` as the checkpoint that ``info`` describes.

        When it returns, ``source`` may be changed or removed; the session sends what it returns.
        `open` gives back the ``state`` of ``info``.

        Raises:
            StoreError: they could not be kept.
        """
        ...

    def open(self, ref: CheckpointRef) -> tuple[Path, dict[str, Any]]:
        """A folder with the verified files of ``ref``, to be read only, and its ``state``.

        Raises:
            CheckpointCorrupt: it is damaged or lacks a file, wherever there is a copy of it.
            StoreError: it cannot be read now.
        """
        ...


def checkpoint_key(folder_name: str, attempt: int, n: int) -> str:
    """The key of the ``n``-th checkpoint of an epoch of the trial with that folder's name."""
    return f"{folder_name}/checkpoint_{attempt}-{n:06d}"
