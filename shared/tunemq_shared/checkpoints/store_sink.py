"""`StoreSink`: saves a trial's checkpoints directly into a store."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from tunemq_shared.checkpoints.checkpoint_sink import checkpoint_key
from tunemq_shared.checkpoints.manifest import CheckpointInfo
from tunemq_shared.checkpoints.store import CheckpointStore
from tunemq_shared.protocol.messages import CheckpointCommitted, CheckpointRef


class StoreSink:
    """The `CheckpointSink` of one trial; ``folder_name`` names its folder in the experiment's."""

    def __init__(self, store: CheckpointStore, folder_name: str) -> None:
        self._store = store
        self._folder_name = folder_name

    def save(self, source: Path, info: CheckpointInfo) -> CheckpointCommitted:
        """Save the files below ``source``; they are committed at once."""
        key = checkpoint_key(self._folder_name, info.attempt, info.n)
        committed = self._store.put_checkpoint(key, source, info)
        return CheckpointCommitted(
            trial=info.trial,
            attempt=info.attempt,
            n=info.n,
            step=info.step,
            key=committed.key,
            sha256=committed.sha256,
            size=committed.size,
        )

    def get(self, ref: CheckpointRef, target: Path) -> dict[str, Any]:
        """Copy the verified files of ``ref`` into ``target``; see `CheckpointSink.get`."""
        return self._store.get_checkpoint(ref.key, ref.sha256, target).state
