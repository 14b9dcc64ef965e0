"""`CacheSink`: writes a trial's checkpoints to the node's cache, and the node uploads them."""

from __future__ import annotations

import logging
from collections.abc import Callable
from pathlib import Path
from typing import Any

from tunemq_shared.base.errors import StoreError
from tunemq_shared.checkpoints.checkpoint_sink import checkpoint_key
from tunemq_shared.checkpoints.local_store import LocalCheckpointStore
from tunemq_shared.checkpoints.manifest import CheckpointInfo, Manifest
from tunemq_shared.protocol.messages import CheckpointRef, CheckpointWritten
from tunemq_shared.system import plain_files
from tunemq_workers.trial_process.node_channel import NodeChannel

logger = logging.getLogger(__name__)


class CacheSink:
    """The `CheckpointSink` of a trial whose store is not a folder on this machine.

    The node says when and where a checkpoint may be written, and fetches checkpoints that the trial
    reads. Files that did not change since the trial's previous checkpoint become hard links to it.

    Args:
        channel: The connection to the node.
        folder_name: The name of the trial's folder, in the cache and in the store.
    """

    def __init__(self, channel: NodeChannel, folder_name: str) -> None:
        self._channel = channel
        self._folder_name = folder_name
        #: The key of the previous checkpoint, to which unchanged files are linked.
        self._previous: str | None = None

    def make_folder(self, folder: str) -> None:
        """Make the trial's folder, which is the node's own; it may be removing empty ones above."""
        plain_files.make_folder(folder)

    def when_available(self, call: Callable[[], None]) -> None:
        """Call a function that writes into the trial's folder, which is on this machine."""
        call()

    def save(self, source: Path, info: CheckpointInfo) -> CheckpointWritten:
        """Write the files below ``source`` once there is room; see `CheckpointSink.save`."""
        key = checkpoint_key(self._folder_name, info.attempt, info.n)
        root = self._channel.ask_to_save()
        root.mkdir(parents=True, exist_ok=True)
        cache = _store(root)
        written = cache.put_checkpoint(key, source, info, base=self._previous)
        self._previous = key
        return CheckpointWritten(
            info.trial, info.attempt, info.n, info.step, key, written.sha256, written.size
        )

    def get(self, ref: CheckpointRef, target: Path) -> dict[str, Any]:
        """Copy the verified files of ``ref`` into ``target``; see `CheckpointSink.get`.

        If the cache's files are damaged, they are fetched once more.
        """
        cache, known = self._channel.fetch(ref)
        try:
            manifest = _copied(cache, known, target)
        except StoreError as error:
            logger.warning("%s It is fetched once more.", error)
            manifest = _copied(*self._channel.fetch(ref, again=True), target)
        self._previous = ref.key
        return manifest.state


def _store(cache: Path) -> LocalCheckpointStore:
    """Open the node's cache as a store.

    It is not durable: after a power failure a checkpoint is in the real store, or is made again.
    """
    return LocalCheckpointStore(cache, durable=False, linking=True)


def _copied(cache: Path, ref: CheckpointRef, target: Path) -> Manifest:
    """Copy the verified files of ``ref`` from the cache, whether written here or fetched."""
    known = tuple(filter(None, (ref.written, ref.sha256)))
    return _store(cache).get_checkpoint(ref.key, known, target)
