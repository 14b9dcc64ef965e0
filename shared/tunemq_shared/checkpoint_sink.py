"""Where a running trial puts its checkpoints and gets them back from."""

from __future__ import annotations

from pathlib import Path
from typing import Any, Protocol

from tunemq_shared.messages import CheckpointCommitted, CheckpointRef


class CheckpointSink(Protocol):
    """Keeps checkpoints; the session calls it between two steps and waits for it."""

    def save(
        self,
        source: Path,
        *,
        epoch: int,
        n: int,
        step: int,
        state: dict[str, Any],
        metrics: dict[str, Any],
    ) -> CheckpointCommitted:
        """Keep the files below ``source`` as the ``n``-th checkpoint of this epoch (from 1).

        When it returns, ``source`` may be changed or removed. ``state`` (plain values) is what
        `open` gives back; ``metrics`` is the result that the checkpoint contains.

        Raises:
            StoreError: they could not be kept.
        """
        ...

    def open(self, ref: CheckpointRef) -> tuple[Path, dict[str, Any]]:
        """A folder with the verified files of ``ref``, to be read only, and its ``state``.

        Raises:
            StoreError: it cannot be read, or does not match its manifest.
        """
        ...
