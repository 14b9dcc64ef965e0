"""Who copies what a search writes into its folder to where it should also be, if anybody."""

from __future__ import annotations

from typing import TYPE_CHECKING

from tunemq_scheduler.plan import ExperimentPlan
from tunemq_scheduler.syncing.config import SyncConfig
from tunemq_scheduler.syncing.syncer import Syncer

if TYPE_CHECKING:
    from tunemq_scheduler.syncing.callback import SyncerCallback


def copier_of(sync: SyncConfig, plan: ExperimentPlan) -> SyncerCallback | None:
    """The callback that copies a search's files to its store, or to ``upload_dir``.

    Checkpoints go with them where no store but the folder has them.

    Raises:
        ConfigError: a variable in the environment that concerns syncing is not usable.
    """
    if sync.syncer is None or not (plan.store or sync.upload_dir):
        return None
    # A search whose files stay where they are need not wait until this is imported.
    from tunemq_scheduler.syncing.callback import SyncerCallback
    from tunemq_scheduler.syncing.default_syncer import DefaultSyncer
    from tunemq_scheduler.syncing.places import join

    if isinstance(sync.syncer, Syncer):
        syncer: Syncer = sync.syncer
    else:
        syncer = DefaultSyncer(sync.sync_period, sync.sync_timeout)
    return SyncerCallback(
        syncer,
        plan.folder,
        plan.store or join(sync.upload_dir or "", plan.experiment),
        sync_period=sync.sync_period,
        sync_timeout=sync.sync_timeout,
        sync_artifacts=sync.sync_artifacts,
        sync_on_checkpoint=sync.sync_on_checkpoint,
        carries_checkpoints=not plan.store,
    )
