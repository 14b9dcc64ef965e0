"""`run`: a search in one call, with the arguments of `Tuner`'s configs side by side."""

from __future__ import annotations

import datetime as dt
import os
from collections.abc import Sequence
from typing import Any, Final, Literal

from tunemq_scheduler.api.tuner import Tuner
from tunemq_scheduler.output.syncing.sync_config import SyncConfig
from tunemq_scheduler.output.terminal.reporter import ProgressReporter
from tunemq_scheduler.results.callback import Callback
from tunemq_scheduler.results.experiment_analysis import ExperimentAnalysis
from tunemq_scheduler.schedulers import TrialScheduler
from tunemq_scheduler.search import Searcher
from tunemq_scheduler.settings.config import (
    CheckpointConfig,
    FailureConfig,
    Mode,
    RunConfig,
    StopCriteria,
    TuneConfig,
)
from tunemq_scheduler.settings.trial_limit_settings import TrialLimits
from tunemq_scheduler.stopping.stopper import Stopper
from tunemq_shared.base.errors import ConfigError, TrialError
from tunemq_shared.checkpoints.checkpoint import Checkpoint
from tunemq_shared.trainable.resources import ResourceInput, with_resources

#: Before the name of a score in ``checkpoint_score_attr``.
_LOWER_IS_BETTER: Final = "min-"


def run(
    run_or_experiment: Any,
    *,
    name: str | None = None,
    metric: str | None = None,
    mode: Mode | None = None,
    stop: StopCriteria | Stopper | Sequence[StopCriteria | Stopper] | None = None,
    time_budget_s: float | dt.timedelta | None = None,
    config: dict[str, Any] | None = None,
    resources_per_trial: ResourceInput | None = None,
    num_samples: int = 1,
    storage_path: str | os.PathLike[str] | None = None,
    local_dir: str | os.PathLike[str] | None = None,
    search_alg: Searcher | str | None = None,
    scheduler: TrialScheduler | str | None = None,
    checkpoint_config: CheckpointConfig | None = None,
    keep_checkpoints_num: int | None = None,
    checkpoint_score_attr: str | None = None,
    checkpoint_freq: int = 0,
    checkpoint_at_end: bool = False,
    sync_config: SyncConfig | None = None,
    trial_limits: TrialLimits | None = None,
    restore: Checkpoint | str | os.PathLike[str] | None = None,
    verbose: int = 1,
    progress_reporter: ProgressReporter | None = None,
    max_failures: int = 0,
    fail_fast: bool | Literal["raise"] = False,
    failure_config: FailureConfig | None = None,
    callbacks: Sequence[Callback] | None = None,
    reuse_actors: bool = False,
    max_concurrent_trials: int | None = None,
    raise_on_failed_trial: bool = True,
    seed: int | None = None,
    debug: bool = False,
) -> ExperimentAnalysis:
    """Search for the best configuration of a trainable, and return when the search is over.

    Args:
        run_or_experiment: the trainable: a function of a configuration, or a `Trainable` class.
        config: the search space.
        resources_per_trial: what each trial gets; instead of `with_resources`.
        raise_on_failed_trial: raise when the search is over and a trial is in ERROR.
        name, metric, mode, stop, time_budget_s, num_samples, storage_path, search_alg, scheduler,
            checkpoint_config, sync_config, trial_limits, verbose, progress_reporter, max_failures,
            fail_fast, callbacks, reuse_actors, max_concurrent_trials, seed: see `TuneConfig` and
            `RunConfig`.
        failure_config: instead of ``max_failures`` and ``fail_fast``, which are fields of it.
        local_dir: an older name of a local ``storage_path``.
        keep_checkpoints_num, checkpoint_score_attr, checkpoint_freq, checkpoint_at_end: older names
            of what `CheckpointConfig` has; before the attribute, ``min-`` says that lower scores
            are better.
        restore: what every trial begins from; an older name of
            ``RunConfig(resume_from_checkpoint=...)``.
        debug: see `Tuner.fit`.

    Raises:
        UserError: something in the search is not usable; nothing was started.
        TrialError: a trial is in ERROR; its first failures are in the message.
        KeyboardInterrupt: Ctrl-C; everything was saved before.
    """
    trainable = run_or_experiment
    if resources_per_trial is not None:
        trainable = with_resources(trainable, resources_per_trial)
    tuner = Tuner(
        trainable,
        param_space=config,
        tune_config=TuneConfig(
            metric=metric,
            mode=mode,
            search_alg=search_alg,
            scheduler=scheduler,
            num_samples=num_samples,
            max_concurrent_trials=max_concurrent_trials,
            time_budget_s=time_budget_s,
            reuse_actors=reuse_actors,
            seed=seed,
        ),
        run_config=RunConfig(
            name=name,
            storage_path=_one_of("storage_path", storage_path, "local_dir", local_dir),
            stop=stop,
            failure_config=_failure_config(
                failure_config, max_failures=max_failures, fail_fast=fail_fast
            ),
            checkpoint_config=_checkpoint_config(
                checkpoint_config,
                keep_checkpoints_num=keep_checkpoints_num,
                checkpoint_score_attr=checkpoint_score_attr,
                checkpoint_freq=checkpoint_freq,
                checkpoint_at_end=checkpoint_at_end,
            ),
            sync_config=sync_config or SyncConfig(),
            trial_limits=trial_limits or TrialLimits(),
            resume_from_checkpoint=restore,
            callbacks=callbacks,
            progress_reporter=progress_reporter,
            verbose=verbose,
        ),
    )
    grid = tuner.fit(debug=debug)
    if raise_on_failed_trial and grid.num_errors:
        first = "\n".join(str(error) for error in grid.errors[:3])
        raise TrialError(f"{grid.num_errors} of {len(grid)} trials are in ERROR.\n{first}")
    return ExperimentAnalysis(grid)


def _one_of(name: str, value: Any, older: str, older_value: Any) -> Any:
    if value is not None and older_value is not None:
        raise ConfigError(
            f"tune.run has {name}={value!r} and {older}={older_value!r}, which mean the same; "
            f"leave {older} out."
        )
    return older_value if value is None else value


def _failure_config(given: FailureConfig | None, **fields: Any) -> FailureConfig:
    """The settings for failures, from ``failure_config`` or from its fields beside it."""
    if given is None:
        return FailureConfig(**fields)
    named = [f"{name}={value!r}" for name, value in fields.items() if value]
    if named:
        raise ConfigError(
            f"tune.run has failure_config and {', '.join(named)}; put that into failure_config "
            "instead."
        )
    return given


def _checkpoint_config(given: CheckpointConfig | None, **older: Any) -> CheckpointConfig:
    """The settings for checkpoints, from ``checkpoint_config`` or from the older arguments."""
    named = [f"{name}={value!r}" for name, value in older.items() if value]
    if given is not None:
        if named:
            raise ConfigError(
                f"tune.run has checkpoint_config and {', '.join(named)}; put that into "
                "checkpoint_config, too."
            )
        return given
    attribute = older["checkpoint_score_attr"]
    is_min = isinstance(attribute, str) and attribute.startswith(_LOWER_IS_BETTER)
    return CheckpointConfig(
        num_to_keep=older["keep_checkpoints_num"],
        checkpoint_score_attribute=attribute[len(_LOWER_IS_BETTER) :] if is_min else attribute,
        checkpoint_score_order="min" if is_min else "max",
        checkpoint_frequency=older["checkpoint_freq"],
        checkpoint_at_end=older["checkpoint_at_end"],
    )
