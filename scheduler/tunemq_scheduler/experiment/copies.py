"""Who copies what a search writes into its folder to where it should also be, if anybody."""

from __future__ import annotations

from typing import TYPE_CHECKING

from tunemq_scheduler.output.syncing.sync_config import SyncConfig
from tunemq_scheduler.settings.storage_settings import StorageLocation

if TYPE_CHECKING:
    from tunemq_scheduler.output.syncing.syncer_callback import SyncerCallback


def copier_of(sync: SyncConfig, experiment: str, storage: StorageLocation) -> SyncerCallback | None:
    """The callback that copies a search's files to its store, or to ``upload_dir``.

    Args:
        experiment: the search's name.
        storage: its own.

    Raises:
        ConfigError: they cannot be copied there, or not by that syncer; or a variable in the
            environment that concerns syncing is not usable.
    """
    if sync.syncer is None or not (storage.store or sync.upload_dir):
        return None
    # A search whose files stay where they are need not wait until this is imported.
    from tunemq_scheduler.output.syncing.create_syncer import make_syncing

    return make_syncing(sync, storage.store, experiment, storage.folder)
