"""Imports the user's checkpoint from which all trials of a search start."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any, Final

from tunemq_scheduler.storage.stored_checkpoint import StoredCheckpoint
from tunemq_shared.checkpoints.checkpoint import Checkpoint
from tunemq_shared.checkpoints.checkpoint_markers import CheckpointForm, read_notes
from tunemq_shared.checkpoints.manifest import FILES, MANIFEST, CheckpointInfo, parse_manifest
from tunemq_shared.checkpoints.store import CheckpointStore
from tunemq_shared.protocol.messages import CheckpointRef
from tunemq_shared.trial.results import TRAINING_ITERATION

#: The checkpoint's key in the store; no trial has that name.
KEY: Final = "restored/checkpoint_0-000001"


def import_checkpoint(
    given: Checkpoint | str | os.PathLike[str], store: CheckpointStore
) -> CheckpointRef:
    """Copy a checkpoint into the store; trials continue its iteration and time counts.

    Raises:
        CheckpointError: it is not a usable checkpoint.
        StoreError: the store did not accept it.
    """
    if isinstance(given, Checkpoint):
        checkpoint = given
    else:
        checkpoint = Checkpoint(os.path.expanduser(os.fspath(given)))
    with checkpoint.as_directory() as folder:
        saved = (
            checkpoint.state() if isinstance(checkpoint, StoredCheckpoint) else _state_in(folder)
        )
        state = saved or CheckpointForm(as_dict=checkpoint.is_dict).state()
        step = int(state.get(TRAINING_ITERATION, 0))
        info = CheckpointInfo(trial="restored", attempt=0, n=1, step=step, metrics={}, state=state)
        committed = store.put_checkpoint(KEY, Path(folder), info)
    return CheckpointRef(key=KEY, sha256=committed.sha256, step=step)


def _state_in(folder: str) -> dict[str, Any]:
    """Return the state that a trial or a `Trainable` saved beside its files; else empty."""
    beside = os.path.join(os.path.dirname(folder), MANIFEST)
    if os.path.basename(folder) == FILES and os.path.isfile(beside):
        with open(beside, "rb") as file:
            return parse_manifest(folder, file.read()).state
    return read_notes(folder)
