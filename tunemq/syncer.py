"""Ray Tune's ``tune.syncer``: copies a search's files to a store."""

from __future__ import annotations

from tunemq_scheduler.output.syncing.background_syncer import BackgroundSyncer
from tunemq_scheduler.output.syncing.create_syncer import get_node_to_storage_syncer
from tunemq_scheduler.output.syncing.default_syncer import DefaultSyncer
from tunemq_scheduler.output.syncing.sync_config import SyncConfig
from tunemq_scheduler.output.syncing.syncer import DEFAULT_SYNC_PERIOD, DEFAULT_SYNC_TIMEOUT, Syncer
from tunemq_scheduler.output.syncing.syncer_callback import SyncerCallback

__all__ = [
    "DEFAULT_SYNC_PERIOD",
    "DEFAULT_SYNC_TIMEOUT",
    "BackgroundSyncer",
    "DefaultSyncer",
    "SyncConfig",
    "Syncer",
    "SyncerCallback",
    "get_node_to_storage_syncer",
]
