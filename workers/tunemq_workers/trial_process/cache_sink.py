"""Keeps a trial's checkpoints in its node's cache, from where the node uploads them."""

from __future__ import annotations

import logging
from pathlib import Path
from typing import Any

from tunemq_shared.base.errors import StoreError
from tunemq_shared.checkpoints.checkpoint_sink import checkpoint_key
from tunemq_shared.checkpoints.local_store import LocalCheckpointStore
from tunemq_shared.checkpoints.manifest import CheckpointInfo
from tunemq_shared.checkpoints.store import OpenedCheckpoint
from tunemq_shared.protocol.messages import CheckpointRef, CheckpointWritten
from tunemq_workers.trial_process.node_channel import NodeChannel

logger = logging.getLogger(__name__)


class CacheSink:
    """The `CheckpointSink` of one trial whose store is not a folder of this machine.

    The node says when and where a checkpoint may be written, and has one fetched that is to be
    read. Files that did not change since the trial's previous checkpoint are linked to it.

    Args:
        channel: The line to the node.
        folder_name: Names the trial's folder, in the cache as in the store.
    """

    def __init__(self, channel: NodeChannel, folder_name: str) -> None:
        self._channel = channel
        self._folder_name = folder_name
        #: The key of the checkpoint that the next one continues.
        self._previous: str | None = None

    def save(self, source: Path, info: CheckpointInfo) -> CheckpointWritten:
        """Write the files below ``source`` once there is room; see `CheckpointSink.save`."""
        key = checkpoint_key(self._folder_name, info.attempt, info.n)
        cache = _store(self._channel.ask_to_save())
        written = cache.put_checkpoint(key, source, info, base=self._previous)
        self._previous = key
        return CheckpointWritten(
            info.trial, info.attempt, info.n, info.step, key, written.sha256, written.size
        )

    def open(self, ref: CheckpointRef) -> tuple[Path, dict[str, Any]]:
        """A folder with the verified files of ``ref``, and its state; see `CheckpointSink.open`.

        A damaged copy is fetched once more.
        """
        cache, known = self._channel.fetch(ref)
        try:
            opened = _opened(cache, known)
        except StoreError as error:
            logger.warning("%s It is fetched once more.", error)
            opened = _opened(*self._channel.fetch(ref, again=True))
        self._previous = ref.key
        return opened.path, opened.manifest.state


def _store(cache: Path) -> LocalCheckpointStore:
    """The node's cache as a store; what a power failure takes is in the real store, or redone."""
    return LocalCheckpointStore(cache, durable=False, linking=True)


def _opened(cache: Path, ref: CheckpointRef) -> OpenedCheckpoint:
    """The copy of ``ref`` in the cache, verified: that of its host, or one from the store."""
    return _store(cache).open_checkpoint(ref.key, tuple(filter(None, (ref.written, ref.sha256))))
