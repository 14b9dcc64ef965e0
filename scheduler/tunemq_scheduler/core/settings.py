"""What the runner has to know of an experiment; plain values only."""

from __future__ import annotations

import msgspec

from tunemq_scheduler.core.kept_checkpoints import KeepRule
from tunemq_shared.messages import CheckpointRef


class RunnerSettings(msgspec.Struct, frozen=True, kw_only=True):
    """The rules by which trials are run.

    Attributes:
        max_concurrent: how many trials may be unfinished at once; 0 is no limit.
        max_failures: how often a trial is tried again after a failure; -1 is for ever.
        max_storage_failures: how often in a row when its checkpoint could not be kept, and how
            often when it could not be restored, with no new result in between.
        max_node_losses: how often in a row after its node was lost.
        retry_cuda_memory: whether a trial that a GPU had too little memory for is tried again.
        fail_fast: the first trial in ERROR ends the experiment.
        keep: which checkpoints of a trial are kept.
        request: what every trial asks for, where that does not depend on its configuration.
        restore: what every new trial begins from, the first usable one; it lies in the experiment's
            store, all of its objects in its own folder, and is never deleted.
        checks_epochs: whether what older incarnations of a trial say counts for nothing; off only
            in tests of that defence.
    """

    max_concurrent: int = 0
    max_failures: int = 0
    max_storage_failures: int = 0
    max_node_losses: int = 2
    retry_cuda_memory: bool = False
    fail_fast: bool = False
    keep: KeepRule = KeepRule()
    request: dict[str, float] | None = None
    restore: tuple[CheckpointRef, ...] = ()
    checks_epochs: bool = True
