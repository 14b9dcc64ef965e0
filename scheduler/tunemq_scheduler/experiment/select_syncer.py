"""Selects the callback that copies a search's folder to a second place, if configured."""

from __future__ import annotations

from typing import TYPE_CHECKING

from tunemq_scheduler.output.syncing.sync_config import SyncConfig
from tunemq_scheduler.settings.storage_settings import StorageLocation

if TYPE_CHECKING:
    from tunemq_scheduler.output.syncing.syncer_callback import SyncerCallback


def copier_of(sync: SyncConfig, experiment: str, storage: StorageLocation) -> SyncerCallback | None:
    """Return the callback that copies a search's files to its store or to ``upload_dir``, or None.

    Args:
        sync: the user's configuration.
        experiment: the search's name.
        storage: the search's folder and store.

    Raises:
        ConfigError: that target or that syncer cannot be used, or an environment variable for
            syncing is invalid.
    """
    if sync.syncer is None or not (storage.store or sync.upload_dir):
        return None
    # imported late: most searches copy nothing and need not pay for it
    from tunemq_scheduler.output.syncing.create_syncer import make_syncing

    return make_syncing(sync, storage.store, experiment, storage.folder)
