"""Checks a search's input completely before anything starts."""

from __future__ import annotations

import random
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import msgspec

from tunemq_scheduler.core.runner_settings import LogRule, RunnerSettings
from tunemq_scheduler.core.trials.kept_checkpoints import RetentionPolicy
from tunemq_scheduler.experiment.algorithm_driver import AlgorithmDriver
from tunemq_scheduler.results.callback import Callback
from tunemq_scheduler.schedulers import TrialScheduler, make_scheduler
from tunemq_scheduler.search import SearchGenerator, make_searcher
from tunemq_scheduler.search.objective import metric_names
from tunemq_scheduler.search.space import check_depth, parameter_names, read_space
from tunemq_scheduler.settings.config import RunConfig, TuneConfig
from tunemq_scheduler.stopping.stopper import Stopper, make_stopping
from tunemq_scheduler.storage.folders import safe_name
from tunemq_shared.base.errors import ConfigError
from tunemq_shared.base.safe_text import repr_of
from tunemq_shared.code.code_by_value import trainable_name
from tunemq_shared.code.config_packing import check_keys
from tunemq_shared.executables.executable import Executable
from tunemq_shared.protocol.result_conditions import Condition
from tunemq_shared.trainable.attached import attached_to
from tunemq_shared.trainable.resources import resources_of
from tunemq_shared.trainable.trainable import Trainable, validate_trainable
from tunemq_shared.trainable.trainable_blobs import PickledTrainable, pickle_parts


class PreparedSearch(msgspec.Struct, frozen=True, kw_only=True):
    """A search whose input was checked.

    Attributes:
        trainable_name: safe for folder names.
        pickled: the trainable's code, and the objects bound to it.
        resources_for: returns the resource request for a configuration.
        seed: the seed of all randomness; drawn here if none was given.
        trials: the number of trials; None if it is open.
    """

    trainable: Any
    trainable_name: str
    pickled: PickledTrainable
    tune: TuneConfig
    run: RunConfig
    search: SearchGenerator
    scheduler: TrialScheduler
    stopper: Stopper | None
    stop: tuple[Condition, ...]
    settings: RunnerSettings
    resources_for: Callable[[dict[str, Any]], dict[str, float]]
    required_metrics: tuple[str, ...]
    finite_metrics: tuple[str, ...]
    seed: int
    trials: int | None

    def algorithms(self) -> AlgorithmDriver:
        """Return the algorithms for the loop."""
        return AlgorithmDriver(
            search=self.search,
            scheduler=self.scheduler,
            stopper=self.stopper,
            metric=self.tune.metric,
            mode=self.tune.direction,
            worst_for_nonfinite=self.tune.nonfinite == "worst",
        )


def prepare(
    trainable: Any, param_space: dict[str, Any] | None, tune: TuneConfig, run: RunConfig
) -> PreparedSearch:
    """Check a search's input.

    Raises:
        UserError: an argument is invalid; says which field, which value, and what to do.
        SearchFailed: an algorithm raised when asked for its state.
    """
    trainable = _named(trainable)
    validate_trainable(trainable)
    _check_checkpoints(trainable, run)
    _check_arguments(trainable, param_space, tune)
    _check_callbacks(run.callbacks)
    run.sync_config.validate_upload_dir()
    seed = tune.seed if tune.seed is not None else random.SystemRandom().getrandbits(32)
    metric, mode = tune.metric, tune.direction
    searcher, max_concurrent = make_searcher(tune.search_alg, tune.max_concurrent_trials)
    space = checked_space(param_space)
    search = SearchGenerator(searcher, space, tune.num_samples, metric, mode, seed)
    scheduler = make_scheduler(tune.scheduler, metric, mode, seed)
    run = _saving_for(scheduler, trainable, run)
    stop, stopper = make_stopping(run.stop)
    needed = (*metric_names(metric), *metric_names(scheduler.metric), *search.required_metrics)
    required = tuple(dict.fromkeys(needed))
    prepared = PreparedSearch(
        trainable=trainable,
        trainable_name=safe_name(trainable_name(trainable), "trial"),
        pickled=pickle_parts(trainable),
        tune=tune,
        run=run,
        search=search,
        scheduler=scheduler,
        stopper=stopper,
        stop=stop,
        settings=RunnerSettings(
            max_concurrent=max_concurrent,
            max_failures=run.failure_config.max_failures,
            fail_fast=bool(run.failure_config.fail_fast),
            max_storage_failures=run.failure_config.max_storage_failures,
            max_node_losses=run.failure_config.max_node_losses,
            retry_cuda_memory=run.failure_config.retry_cuda_memory,
            log_rules=tuple(
                LogRule(one.pattern, one.action) for one in run.failure_config.log_policies
            ),
            max_excluded_nodes=run.failure_config.max_excluded_nodes,
            nodes_may_come=False,
            keep=RetentionPolicy(
                num_to_keep=run.checkpoint_config.num_to_keep,
                score_attribute=run.checkpoint_config.checkpoint_score_attribute,
                higher_is_better=run.checkpoint_config.checkpoint_score_order == "max",
                in_experiment=run.checkpoint_config.num_to_keep_in_experiment,
                max_bytes=run.checkpoint_config.byte_limit,
            ),
            request=_same_for_all(trainable),
            stop=stop,
        ),
        resources_for=lambda config: resources_of(trainable, config),
        required_metrics=required,
        finite_metrics=required if tune.nonfinite == "error" else (),
        seed=seed,
        trials=search.total,
    )
    # Otherwise a state that cannot be serialized would only fail hours later, at a snapshot.
    prepared.algorithms().get_state()
    return prepared


def _named(trainable: Any) -> Any:
    if isinstance(trainable, str):
        raise ConfigError(
            f"the trainable {trainable!r} is a name; give the function or the Trainable class "
            "itself."
        )
    return trainable


def checked_space(param_space: Any) -> dict[str, Any]:
    """Return a search space after a check of its type, keys and depth; empty for None.

    Raises:
        ConfigError: it is no dict, or a key or its depth is invalid.
    """
    if param_space is None:
        return {}
    if not isinstance(param_space, dict):
        raise ConfigError(
            f"param_space={repr_of(param_space)} is invalid: give a dict of names to values and "
            "domains."
        )
    check_keys(param_space)
    check_depth(param_space, "param_space")
    return param_space


def _check_checkpoints(trainable: Any, run: RunConfig) -> None:
    """Reject checkpoint settings of class trainables for functions, which save by themselves."""
    original = attached_to(trainable).original
    if isinstance(original, type) and issubclass(original, Trainable):
        return
    for field in ("checkpoint_at_end", "checkpoint_frequency"):
        if value := getattr(run.checkpoint_config, field):
            raise ConfigError(
                f"CheckpointConfig({field}={value!r}) is for class trainables; in a function call "
                f"report(metrics, checkpoint=...) when one is due."
            )


def _saving_for(scheduler: TrialScheduler, trainable: Any, run: RunConfig) -> RunConfig:
    """Let a class trainable save as often as a scheduler needs that exploits its checkpoints.

    Raises:
        ConfigError: it would save none, and the scheduler does not know when it should.
    """
    original, needed = attached_to(trainable).original, scheduler.checkpoint_interval
    is_class = isinstance(original, type) and issubclass(original, Trainable)
    if needed == 0 or not is_class or run.checkpoint_config.checkpoint_frequency:
        return run
    if needed is None:
        raise ConfigError(
            f"{type(scheduler).__name__} lets trials continue from each other's checkpoints, and "
            f"{original.__name__} saves none: set time_attr='training_iteration', so that it saves "
            "at each perturbation, or CheckpointConfig(checkpoint_frequency=...)."
        )
    saving = replace(run.checkpoint_config, checkpoint_frequency=needed)
    return replace(run, checkpoint_config=saving)


def _check_arguments(trainable: Any, param_space: Any, tune: TuneConfig) -> None:
    """Check that the search space contains the parameters that a command names."""
    original = attached_to(trainable).original
    if not isinstance(original, Executable) or (not param_space and tune.search_alg is not None):
        return  # the search algorithm has its own space and names
    original.check_names(dict(parameter_names(read_space(checked_space(param_space)))))


def _check_callbacks(callbacks: Any) -> None:
    if callbacks is not None and not isinstance(callbacks, list | tuple):
        raise ConfigError(f"RunConfig(callbacks={callbacks!r}) is invalid: give a list of them.")
    for callback in callbacks or ():
        if isinstance(callback, type):
            raise ConfigError(
                f"RunConfig(callbacks=...) has the class {callback.__name__}; make one: "
                f"{callback.__name__}()."
            )
        if not isinstance(callback, Callback):
            raise ConfigError(
                f"RunConfig(callbacks=...) has {callback!r}, which is not a tune.Callback: "
                "derive its class from that."
            )


def _same_for_all(trainable: Any) -> dict[str, float] | None:
    """Return the request of all trials; None if it depends on the configuration."""
    attached = attached_to(trainable)
    varies = callable(attached.resources) or (
        isinstance(attached.original, type) and attached.resources is None
    )
    return None if varies else resources_of(trainable, {})
