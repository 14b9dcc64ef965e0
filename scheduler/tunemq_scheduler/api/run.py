"""`run`: a whole search in one call, with the arguments of `Tuner` and its configs side by side."""

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

#: Prefix of ``checkpoint_score_attr``: lower scores are better.
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
    """Search for the best configuration of a trainable; return when the search has ended.

    The arguments are those of `Tuner`, `TuneConfig` and `RunConfig`, under Ray Tune's names.

    Args:
        run_or_experiment (function, class or executable): the trainable: a function that takes a
            configuration, a `Trainable` class, or an `executable`.
        name, metric, mode, stop, time_budget_s, num_samples, storage_path, search_alg, scheduler,
            checkpoint_config, sync_config, trial_limits, verbose, progress_reporter, max_failures,
            fail_fast, callbacks, reuse_actors, max_concurrent_trials, seed: see `TuneConfig`,
            `RunConfig` and `FailureConfig`.
        config (dict): the search space; ``param_space`` of `Tuner`.
        resources_per_trial (dict or PlacementGroupFactory): the resources of each trial, as in
            `with_resources`.
        local_dir (str or path): older name of ``storage_path``.
        keep_checkpoints_num, checkpoint_score_attr, checkpoint_freq, checkpoint_at_end: older names
            of ``num_to_keep``, ``checkpoint_score_attribute``, ``checkpoint_frequency`` and
            ``checkpoint_at_end`` of `CheckpointConfig`. An attribute with the prefix ``min-`` means
            that lower scores are better.
        restore (Checkpoint, str or path): older name of ``RunConfig(resume_from_checkpoint=...)``.
        failure_config (FailureConfig): replaces ``max_failures`` and ``fail_fast``.
        raise_on_failed_trial (bool): raise an error after the search if a trial is in ERROR.
        debug (bool): run only the first trial, in this process; see `Tuner.fit`.

    Returns:
        The results of all trials.

    Raises:
        UserError: an argument is invalid; nothing was started.
        TrialError: a trial is in ERROR; the message contains the first errors.
        KeyboardInterrupt: the user pressed Ctrl-C; the search was saved before.
        TuneError: the search cannot continue.

    Example:
        >>> from tunemq import grid_search, report, run
        >>> def train(config):
        ...     report({"loss": (config["x"] - 3) ** 2})
        >>> space = {"x": grid_search([1, 2, 3])}
        >>> run(train, config=space, metric="loss", mode="min", verbose=0).best_config
        {'x': 3}
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
            f"remove {older}."
        )
    return older_value if value is None else value


def _failure_config(given: FailureConfig | None, **fields: Any) -> FailureConfig:
    """Return ``failure_config``, or one made of its older separate arguments."""
    if given is None:
        return FailureConfig(**fields)
    named = [f"{name}={value!r}" for name, value in fields.items() if value]
    if named:
        raise ConfigError(
            f"tune.run has failure_config and {', '.join(named)}; move those into failure_config."
        )
    return given


def _checkpoint_config(given: CheckpointConfig | None, **older: Any) -> CheckpointConfig:
    """Return ``checkpoint_config``, or one made of the older arguments."""
    named = [f"{name}={value!r}" for name, value in older.items() if value]
    if given is not None:
        if named:
            raise ConfigError(
                f"tune.run has checkpoint_config and {', '.join(named)}; move those into "
                "checkpoint_config."
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
