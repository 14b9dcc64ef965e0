"""Creates the syncer and the syncing callback of a search from its settings."""

from __future__ import annotations

import copy
import os
import tempfile

from tunemq_scheduler.output.syncing.default_syncer import DefaultSyncer
from tunemq_scheduler.output.syncing.destinations import FolderDestination, join, open_destination
from tunemq_scheduler.output.syncing.mirroring import overlap
from tunemq_scheduler.output.syncing.sync_config import SyncConfig
from tunemq_scheduler.output.syncing.syncer import Syncer
from tunemq_scheduler.output.syncing.syncer_callback import SyncerCallback
from tunemq_shared.base.errors import ConfigError
from tunemq_shared.objects.store_address import is_remote


def get_node_to_storage_syncer(sync_config: SyncConfig) -> Syncer | None:
    """Return the syncer that copies to ``upload_dir``; None without ``upload_dir`` or syncer."""
    if sync_config.syncer is None or not sync_config.upload_dir:
        return None
    return _syncer_of(sync_config)


def make_syncing(
    sync_config: SyncConfig, store: str, experiment: str, local_folder: str
) -> SyncerCallback:
    """Return the callback that copies an experiment's files.

    See `tunemq_scheduler.experiment.select_syncer`. It must come after all loggers: it copies the
    files that they write.

    Args:
        store: the address of the experiment's object store, to which nodes upload checkpoints
            themselves; empty if checkpoints are in the local folder, from which they are then
            copied to ``upload_dir``.
        experiment: the experiment's name, also below ``upload_dir``.
        local_folder: the experiment's local folder.

    Raises:
        ConfigError: the destination cannot be used, or the syncer cannot be copied.
    """
    syncer = _syncer_of(sync_config)
    remote = store or join(sync_config.upload_dir or "", experiment)
    _check_copies(syncer)
    if isinstance(syncer, DefaultSyncer) and not is_remote(remote):
        _check_folder(remote, local_folder)
    return SyncerCallback(
        syncer,
        local_folder,
        remote,
        sync_period=sync_config.sync_period,
        sync_timeout=sync_config.sync_timeout,
        sync_artifacts=sync_config.sync_artifacts,
        sync_on_checkpoint=sync_config.sync_on_checkpoint,
        carries_checkpoints=not store,
    )


def _syncer_of(sync_config: SyncConfig) -> Syncer:
    if isinstance(sync_config.syncer, Syncer):
        return sync_config.syncer
    return DefaultSyncer(sync_config.sync_period, sync_config.sync_timeout)


def _check_copies(syncer: Syncer) -> None:
    try:
        copy.deepcopy(syncer)
    except Exception as error:  # the user's code may raise anything; nothing has begun
        raise ConfigError(
            f"SyncConfig(syncer={syncer!r}) cannot be copied, and each folder needs its own "
            f"copy: {error}. Leave out in its __getstate__ what cannot be copied."
        ) from error


def _check_folder(remote: str, local_folder: str) -> None:
    """Check that the folder at the address is writable and separate from the local one."""
    place = open_destination(remote)
    folder = place.root if isinstance(place, FolderDestination) else remote
    if overlap(folder, local_folder):
        raise ConfigError(
            f"SyncConfig(upload_dir=...) leads to {folder}, and the experiment's own folder is "
            f"{local_folder}: one is inside the other; choose another upload_dir."
        )
    try:
        os.makedirs(folder, exist_ok=True)
        with tempfile.TemporaryFile(dir=folder):
            pass
    except OSError as error:
        raise ConfigError(
            f"SyncConfig(upload_dir=...): {folder} cannot be used: {error.strerror}. Pass a "
            "folder that you may write."
        ) from error
