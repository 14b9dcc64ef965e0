"""Ray Tune's ``tune.syncer``: who copies a search's files to where they are kept."""

from __future__ import annotations

from tunemq_scheduler.syncing.background_syncer import BackgroundSyncer
from tunemq_scheduler.syncing.callback import SyncerCallback
from tunemq_scheduler.syncing.config import SyncConfig
from tunemq_scheduler.syncing.default_syncer import DefaultSyncer
from tunemq_scheduler.syncing.factory import get_node_to_storage_syncer
from tunemq_scheduler.syncing.syncer import DEFAULT_SYNC_PERIOD, DEFAULT_SYNC_TIMEOUT, Syncer

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
