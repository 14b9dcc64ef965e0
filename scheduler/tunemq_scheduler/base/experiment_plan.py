"""What is the same for all trials of an experiment when a node hosts them."""

from __future__ import annotations

import os

import msgspec

from tunemq_scheduler.core.commands import StartTrial
from tunemq_shared.protocol.conditions import Condition
from tunemq_shared.protocol.messages import BlobRef, Environment, TrialSpec
from tunemq_shared.protocol.trial_limits import TrialLimitSpec


class ExperimentPlan(msgspec.Struct, frozen=True, kw_only=True):
    """The part of a `TrialSpec` that does not differ between trials.

    Attributes:
        experiment: its name, as users see it.
        experiment_id: random; names its event stream.
        events_key: the key of its event stream in Redis.
        folder: its results folder.
        store: the address of the store of its checkpoints; empty where that is its folder.
        cache: where this machine keeps copies of checkpoints; empty leaves it to each node.
        sync_timeout_s, uploads_waiting, limits, bundle, blobs, log_patterns: see
            `TrialSpec`.
        is_apart: whether nodes read and write nothing in its folder, but have trials in their own.
        trainable_name: the first part of every trial's name.
    """

    experiment: str
    experiment_id: str
    events_key: str
    folder: str
    trainable_name: str
    code: BlobRef
    environment: Environment
    stop: tuple[Condition, ...] = ()
    required_metrics: tuple[str, ...] = ()
    finite_metrics: tuple[str, ...] = ()
    checkpoint_frequency: int = 0
    checkpoint_at_end: bool = False
    seed: int = 0
    reuse: bool = False
    stop_grace_s: float = 5.0
    store: str = ""
    cache: str = ""
    sync_timeout_s: float = 1800.0
    uploads_waiting: int = 1
    limits: TrialLimitSpec = TrialLimitSpec()
    bundle: BlobRef | None = None
    blobs: tuple[BlobRef, ...] = ()
    is_apart: bool = False
    log_patterns: tuple[str, ...] = ()

    @property
    def store_address(self) -> str:
        """Where its checkpoints are, as `open_store` takes it."""
        return self.store or self.folder

    def trial_name(self, trial: str) -> str:
        """The name, and the folder's name, of a trial."""
        return f"{self.trainable_name}_{trial}"

    def trial_folder(self, trial: str) -> str:
        """Where a trial's files are."""
        return os.path.join(self.folder, self.trial_name(trial))

    def _hosts_folder(self, trial: str) -> str:
        if self.is_apart:
            return f"{self.experiment_id}/{self.trial_name(trial)}"
        return self.trial_folder(trial)

    def trial_spec(self, order: StartTrial) -> TrialSpec:
        """What a node is told to start one trial."""
        return TrialSpec(
            experiment=self.experiment,
            events_key=self.events_key,
            trial_name=self.trial_name(order.trial),
            trial_number=order.number,
            folder=self._hosts_folder(order.trial),
            code=self.code,
            config=order.config,
            resources=order.resources,
            environment=self.environment,
            store=self.store_address,
            stop=self.stop,
            required_metrics=self.required_metrics,
            finite_metrics=self.finite_metrics,
            restore=order.restore,
            last_step=order.last_step,
            checkpoint_frequency=self.checkpoint_frequency,
            checkpoint_at_end=self.checkpoint_at_end,
            seed=self.seed,
            reuse=self.reuse,
            stop_grace_s=self.stop_grace_s,
            cache=self.cache,
            sync_timeout_s=self.sync_timeout_s,
            uploads_waiting=self.uploads_waiting,
            limits=self.limits,
            time_spent_s=order.time_spent_s,
            devices=order.devices,
            bundle=self.bundle,
            blobs=self.blobs,
            log_patterns=self.log_patterns,
        )
