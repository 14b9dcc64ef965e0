"""Uploads checkpoints that were written on this machine and never reached the store.

When a run's nodes are gone, its unfinished uploads are not lost yet: they are in the folder with
this machine's copies. The next run uploads them first, so that trials resume from them, and ended
trials keep their last one.
"""

from __future__ import annotations

import hashlib
import os
from collections.abc import Callable, Iterator
from pathlib import Path

from tunemq_scheduler.base.experiment_plan import ExperimentPlan
from tunemq_scheduler.core.trial_runner import TrialRunner
from tunemq_scheduler.core.trials.kept_checkpoints import TrialCheckpoint
from tunemq_shared.base.errors import StoreError
from tunemq_shared.base.retrying import CancelToken
from tunemq_shared.checkpoints import object_checkpoints
from tunemq_shared.checkpoints.manifest import MANIFEST
from tunemq_shared.checkpoints.open_store import open_objects
from tunemq_shared.protocol.messages import CheckpointCommitted
from tunemq_shared.system.plain_files import read_plain


def recover_local_checkpoints(
    runner: TrialRunner, plan: ExperimentPlan, tell: Callable[[str], None]
) -> list[CheckpointCommitted]:
    """Upload what only this machine has; return the commits for the journal.

    No failure here is an error: a trial whose copy is missing or damaged uses its previous
    checkpoint, and a notice says so.

    Args:
        runner: the experiment's state.
        plan: the experiment's plan.
        tell: shows a line to the user.
    """
    if not (plan.store and plan.cache):
        return []
    recovered_events = []
    objects = None
    try:
        for trial, kept in _only_written(runner):
            then = "keeps" if runner.live[trial].is_finished else "continues from"
            folder = Path(plan.cache, kept.key)
            try:
                _check(folder, kept)
                objects = objects or open_objects(plan.store)
                cancel = CancelToken(plan.sync_timeout_s)
                done = object_checkpoints.upload(objects, kept.key, folder, None, cancel)
            except (OSError, StoreError) as error:
                tell(
                    f"Checkpoint {kept.key} had not reached the store when the run before ended, "
                    f"and is lost: {error}. Its trial {then} the one before."
                )
                continue
            recovered_events.append(
                CheckpointCommitted(
                    trial=trial,
                    attempt=kept.attempt,
                    n=int(kept.key.rpartition("-")[2]),
                    step=kept.step,
                    key=kept.key,
                    sha256=done.sha256,
                    size=done.size,
                    shared=done.shared,
                )
            )
    finally:
        if objects is not None:
            objects.close()
    return recovered_events


def _only_written(runner: TrialRunner) -> Iterator[tuple[str, TrialCheckpoint]]:
    """Yield the checkpoints that are only on some node, oldest first for each trial."""
    for trial in runner.live.values():
        for kept in trial.checkpoints:
            if kept.is_wanted and kept.committed is None:
                yield trial.trial_id, kept


def _check(folder: Path, kept: TrialCheckpoint) -> None:
    """Check that a folder's manifest is the one that was written; hashes of files come later.

    Raises:
        StoreError: it is another one.
    """
    manifest = read_plain(os.path.join(folder, MANIFEST))
    if hashlib.sha256(manifest).hexdigest() != kept.written:
        raise StoreError(f"what lies in {folder} is not what was written there")
