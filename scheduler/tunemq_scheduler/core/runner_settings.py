"""The runner's settings of an experiment, as plain values."""

from __future__ import annotations

from typing import Final

import msgspec

from tunemq_scheduler.core.trials.kept_checkpoints import RetentionPolicy
from tunemq_shared.protocol.messages import CheckpointRef
from tunemq_shared.protocol.result_conditions import Horizon

#: The actions for a trial that fails after it printed a matching line.
DO_NOT_RETRY: Final = "do_not_retry"
EXCLUDE_NODE: Final = "exclude_node"
#: A `RunnerSettings.retry_cuda_memory`: retry once, with whole GPUs.
ALONE: Final = "alone"


class LogRule(msgspec.Struct, frozen=True, array_like=True):
    """A log policy's rule: ``action`` follows when an attempt fails after a matching line."""

    pattern: str
    action: str


class RunnerSettings(msgspec.Struct, frozen=True, kw_only=True):
    """The rules by which the runner runs trials.

    Attributes:
        max_concurrent: the most unfinished trials at once; 0 means no limit.
        max_failures: the most retries of a trial after failures; -1 means no limit.
        max_storage_failures: the most retries in a row, with no new result in between, after a
            trial could not save or load a checkpoint, or could not load its code.
        max_node_losses: the most retries in a row after a trial's node, or that node's forkserver,
            was lost while the trial ran there alone.
        retry_cuda_memory: whether to retry a trial that ran out of GPU memory; ``ALONE``: if it had
            a part of a GPU, once, with the whole GPU.
        fail_fast: the first trial in ERROR ends the experiment.
        keep: which checkpoints of a trial are retained.
        request: the resources of every trial, if they do not depend on its configuration.
        restore: the checkpoints that a new trial begins from; it takes the first usable one. They
            are in the experiment's store, with all of their objects in their own folders, and are
            never deleted.
        log_rules: the rules for trials' output; no two have the same pattern.
        max_excluded_nodes: how many failures that exclude a node do not count as the trial's own;
            -1 means any number.
        nodes_may_come: whether a trial that excludes all present nodes waits for another one.
        stop: the stop criteria, which trial processes check; here they only explain ends.
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
    stop: Horizon = ()

    def action_of(self, pattern: str) -> str:
        """Return the action for a match; empty if the current rules lack the pattern."""
        return next((rule.action for rule in self.log_rules if rule.pattern == pattern), "")
