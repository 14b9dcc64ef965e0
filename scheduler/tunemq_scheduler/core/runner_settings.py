"""What the runner has to know of an experiment; plain values only."""

from __future__ import annotations

from typing import Final

import msgspec

from tunemq_scheduler.core.trials.kept_checkpoints import RetentionPolicy
from tunemq_shared.protocol.messages import CheckpointRef

#: What may follow from a line that a trial printed, when it fails.
DO_NOT_RETRY: Final = "do_not_retry"
EXCLUDE_NODE: Final = "exclude_node"
#: A `RunnerSettings.retry_cuda_memory`: once, with whole GPUs for itself.
ALONE: Final = "alone"


class LogRule(msgspec.Struct, frozen=True, array_like=True):
    """What a line of a trial's output means: ``action`` follows when that attempt fails."""

    pattern: str
    action: str


class RunnerSettings(msgspec.Struct, frozen=True, kw_only=True):
    """The rules by which trials are run.

    Attributes:
        max_concurrent: how many trials may be unfinished at once; 0 is no limit.
        max_failures: how often a trial is tried again after a failure; -1 is for ever.
        max_storage_failures: how often in a row when its checkpoint could not be kept, and how
            often when it, or its code, could not be read, with no new result in between.
        max_node_losses: how often in a row after its node, or that node's forkserver, was lost
            while it ran there alone.
        retry_cuda_memory: whether a trial that a GPU had too little memory for is tried again;
            ``ALONE``: where it had a part of one, once, with all of it.
        fail_fast: the first trial in ERROR ends the experiment.
        keep: which checkpoints of a trial are kept.
        request: what every trial asks for, where that does not depend on its configuration.
        restore: what every new trial begins from, the first usable one; it lies in the experiment's
            store, all of its objects in its own folder, and is never deleted.
        log_rules: what lines of trials' output mean; no two have the same pattern.
        max_excluded_nodes: so many times a failure after which a trial shuns the node is not
            counted as its own; -1 is any number.
        nodes_may_come: whether a trial that shuns every node that there is waits for another one.
    """

    max_concurrent: int = 0
    max_failures: int = 0
    max_storage_failures: int = 0
    max_node_losses: int = 2
    retry_cuda_memory: bool | str = False
    fail_fast: bool = False
    keep: RetentionPolicy = RetentionPolicy()
    request: dict[str, float] | None = None
    restore: tuple[CheckpointRef, ...] = ()
    log_rules: tuple[LogRule, ...] = ()
    max_excluded_nodes: int = 2
    nodes_may_come: bool = True

    def action_of(self, pattern: str) -> str:
        """What follows from a match; empty for a pattern of rules that hold no longer."""
        return next((rule.action for rule in self.log_rules if rule.pattern == pattern), "")
