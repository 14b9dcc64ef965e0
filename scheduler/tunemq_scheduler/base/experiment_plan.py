"""`ExperimentPlan`: the common part of all trials' specifications."""

from __future__ import annotations

import os

import msgspec

from tunemq_scheduler.core.commands import StartTrial
from tunemq_shared.code.config_packing import repack_config
from tunemq_shared.protocol.messages import BlobRef, Environment, TrialSpec
from tunemq_shared.protocol.result_conditions import TRAINING_ITERATION, Condition
from tunemq_shared.protocol.trial_limits import TrialLimitSpec


class ExperimentPlan(msgspec.Struct, frozen=True, kw_only=True):
    """The part of a `TrialSpec` that is equal for all trials.

    Attributes:
        experiment: its name, for users.
        experiment_id: random; part of the name of its event stream.
        events_key: the key of its event stream in Redis.
        folder: its results folder.
        store: the address of the store of its checkpoints; empty if that is its folder.
        cache: where this machine keeps copies of checkpoints; empty lets each node decide.
        sync_timeout_s, uploads_waiting, limits, bundle, blobs, log_patterns: see `TrialSpec`.
        is_apart: whether nodes do not access its folder, and run trials in folders of the node.
        is_shared: whether several machines run trials in its folder.
        is_resumed: whether an earlier run may have packed configurations.
        is_foreign: whether values of configurations are not loaded if that could run code.
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
    is_shared: bool = False
    log_patterns: tuple[str, ...] = ()
    is_resumed: bool = False
    is_foreign: bool = False

    @property
    def store_address(self) -> str:
        """The address of its checkpoints, for `open_store`."""
        return self.store or self.folder

    def trial_name(self, trial: str) -> str:
        """Return the name of a trial, which is also its folder's name."""
        return f"{self.trainable_name}_{trial}"

    def trial_folder(self, trial: str) -> str:
        """Return the path of a trial's folder."""
        return os.path.join(self.folder, self.trial_name(trial))

    def _folder_on_node(self, order: StartTrial) -> str:
        if self.is_apart:
            # The next attempt may start there while the files of the last one are uploaded.
            return f"{self.experiment_id}/{order.attempt}/{self.trial_name(order.trial)}"
        return self.trial_folder(order.trial)

    def trial_spec(self, order: StartTrial) -> TrialSpec:
        """Make the specification by which a node starts one trial."""
        # A complete trial ends at its last step, whatever it reports there this time: the process
        # checks that at a step that counts as new.
        its_end = (Condition(TRAINING_ITERATION, order.last_step),)
        return TrialSpec(
            experiment=self.experiment,
            events_key=self.events_key,
            trial_name=self.trial_name(order.trial),
            trial_number=order.number,
            folder=self._folder_on_node(order),
            code=self.code,
            config=repack_config(order.config) if self.is_resumed else order.config,
            resources=order.resources,
            environment=self.environment,
            store=self.store_address,
            stop=its_end if order.is_complete else self.stop,
            required_metrics=self.required_metrics,
            finite_metrics=self.finite_metrics,
            restore=order.restore,
            last_step=order.last_step - order.is_complete,
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
            is_shared=self.is_shared,
        )
