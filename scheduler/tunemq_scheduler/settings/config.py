"""What users set: how to search, to run, to keep checkpoints, to fail; each checks itself."""

from __future__ import annotations

import datetime as dt
import os
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Literal

from tunemq_scheduler.core.runner_settings import ALONE
from tunemq_scheduler.output.syncing.sync_config import SyncConfig
from tunemq_scheduler.settings.log_policy import LogPolicy, check_policies
from tunemq_scheduler.settings.trial_limit_settings import TrialLimits
from tunemq_shared.base.byte_sizes import parse_bytes
from tunemq_shared.base.errors import CheckpointError, ConfigError
from tunemq_shared.checkpoints.checkpoint import Checkpoint
from tunemq_shared.objects.store_address import is_remote

if TYPE_CHECKING:
    from tunemq_scheduler.output.terminal.reporter import ProgressReporter
    from tunemq_scheduler.results.callback import Callback
    from tunemq_scheduler.schedulers import TrialScheduler
    from tunemq_scheduler.search import Searcher
    from tunemq_scheduler.stopping.stopper import Stopper

Mode = Literal["min", "max"]
_OF_REPORTERS = ("setup", "should_report", "report")


@dataclass(frozen=True, kw_only=True)
class TuneConfig:
    """How the search space is searched.

    Attributes:
        metric: the reported key to optimise; needed by most search algorithms and trial schedulers.
        mode: ``"min"`` or ``"max"``; ``"max"`` where only a metric is given.
        search_alg: a search algorithm, or its name; random and grid search by default.
        scheduler: a trial scheduler, or its name; first in, first out by default.
        num_samples: how often the search space is sampled (a grid is walked as often); -1 is
            endless.
        max_concurrent_trials: how many trials may run at once; as many as there are slots by
            default.
        time_budget_s: seconds (or a timedelta) after which the search is stopped, however far it
            is.
        reuse_actors: let a trial's process run the next trial too, where the trainable allows it.
            Its ``cleanup`` runs when no trial is left for it, unless the script ends before.
        seed: of everything random in this search: the configurations, and each trial's generators.
        nonfinite: what a NaN or infinite value of the metric means: ``"error"`` fails the trial at
            its report, ``"worst"`` ranks it last.
    """

    metric: str | None = None
    mode: Mode | None = None
    search_alg: Searcher | str | None = None
    scheduler: TrialScheduler | str | None = None
    num_samples: int = 1
    max_concurrent_trials: int | None = None
    time_budget_s: float | dt.timedelta | None = None
    reuse_actors: bool = False
    seed: int | None = None
    nonfinite: Literal["error", "worst"] = "error"

    def __post_init__(self) -> None:
        """Check every field.

        Raises:
            ConfigError: naming the field, its value and what it may be.
        """
        _take_flag(self, "reuse_actors")
        _check("TuneConfig", "mode", self.mode, (None, "min", "max"))
        _check("TuneConfig", "nonfinite", self.nonfinite, ("error", "worst"))
        if self.metric is not None and not (isinstance(self.metric, str) and self.metric):
            raise _bad("TuneConfig", "metric", self.metric, "give the name of a reported key")
        if self.mode is not None and self.metric is None:
            raise _bad("TuneConfig", "metric", None, f"name what mode={self.mode!r} is to optimise")
        if not _is_int(self.num_samples) or (self.num_samples < 1 and self.num_samples != -1):
            fix = "give a whole number from 1, or -1 for an endless search"
            raise _bad("TuneConfig", "num_samples", self.num_samples, fix)
        limit = self.max_concurrent_trials
        if limit is not None and not (_is_int(limit) and limit >= 0):
            fix = "give a whole number from 1, or 0 for no limit"
            raise _bad("TuneConfig", "max_concurrent_trials", limit, fix)
        budget = self.budget_s
        if budget is not None and not (_is_number(budget) and budget > 0):
            raise _bad("TuneConfig", "time_budget_s", self.time_budget_s, "give seconds above 0")
        if self.seed is not None and not _is_int(self.seed):
            raise _bad("TuneConfig", "seed", self.seed, "give a whole number")

    @property
    def budget_s(self) -> float | None:
        """The time budget in seconds."""
        budget = self.time_budget_s
        return budget.total_seconds() if isinstance(budget, dt.timedelta) else budget

    @property
    def direction(self) -> Mode | None:
        """The mode, ``max`` where only a metric was given."""
        return (self.mode or "max") if self.metric is not None else None


@dataclass(frozen=True, kw_only=True)
class CheckpointConfig:
    """Which checkpoints are made and kept.

    Attributes:
        num_to_keep: per trial; None keeps all. The newest is always there besides.
        checkpoint_score_attribute: a key of the result that ranks them; None keeps the newest.
        checkpoint_score_order: ``"max"`` or ``"min"``: which scores are best.
        checkpoint_frequency: class trainables save after every so many steps; 0 never.
        checkpoint_at_end: class trainables save when they end.
        num_to_keep_in_experiment: of all trials together; None keeps what each trial keeps. The
            newest of a trial that is not over is always there besides.
        max_bytes: of all kept checkpoints together, a number or a text such as ``"10GiB"``; the
            worst go first. The best of all stays, and so does the newest of a trial that is not
            over.
    """

    num_to_keep: int | None = None
    checkpoint_score_attribute: str | None = None
    checkpoint_score_order: Mode = "max"
    checkpoint_frequency: int = 0
    checkpoint_at_end: bool = False
    num_to_keep_in_experiment: int | None = None
    max_bytes: int | str | None = None

    def __post_init__(self) -> None:
        """Check every field.

        Raises:
            ConfigError: naming the field, its value and what it may be.
        """
        _take_flag(self, "checkpoint_at_end")
        for name in ("num_to_keep", "num_to_keep_in_experiment"):
            limit = getattr(self, name)
            if limit is not None and (not _is_int(limit) or limit < 1):
                fix = "give a whole number from 1, or None to keep all"
                raise _bad("CheckpointConfig", name, limit, fix)
        if self.max_bytes is not None and (self.byte_limit or 0) < 1:
            fix = 'give bytes above 0 or a text such as "10GiB", or None for no limit'
            raise _bad("CheckpointConfig", "max_bytes", self.max_bytes, fix)
        score = self.checkpoint_score_attribute
        if score is not None and not (isinstance(score, str) and score):
            fix = "give the name of a reported key, or None for the newest"
            raise _bad("CheckpointConfig", "checkpoint_score_attribute", score, fix)
        order = self.checkpoint_score_order
        _check("CheckpointConfig", "checkpoint_score_order", order, ("min", "max"))
        if not _is_int(self.checkpoint_frequency) or self.checkpoint_frequency < 0:
            fix = "give a whole number of steps, 0 for none"
            raise _bad("CheckpointConfig", "checkpoint_frequency", self.checkpoint_frequency, fix)

    @property
    def byte_limit(self) -> int | None:
        """`max_bytes` as a number; None where there is none, or it cannot be read."""
        limit = self.max_bytes
        if isinstance(limit, str):
            return parse_bytes(limit)
        return limit if _is_int(limit) else None


@dataclass(frozen=True, kw_only=True)
class FailureConfig:
    """What happens when a trial fails.

    A trial is tried again from its last checkpoint: at once, and while no new result comes after
    growing pauses of up to a minute. A trial that used up its own time (`TrialLimits`) is not.

    Attributes:
        max_failures: how often it is tried again after an error in its code, the death of its
            process, too much memory or a step that took too long; -1 is for ever.
        max_storage_failures: how often in a row, with no new result in between, when its checkpoint
            could not be kept; likewise when it could not be restored, and when its node could not
            read its code in the store; -1 is for ever.
        max_node_losses: how often in a row, with no new result in between, after its node, or that
            node's forkserver (the process that trials are forked from), was lost while nothing else
            ran there; a trial that takes one more with it is *poison* and in ERROR. Losses that
            other trials shared do not count; after so many (at least one) the trial runs alone on
            its node until it reports something new. -1 is for ever.
        retry_cuda_memory: whether one that ran out of a GPU's memory is tried again. True: as a
            failure of ``max_failures``; it would need as much again. ``"alone"``: one that asked
            for a part of a GPU once more, with a whole one to itself from then on, which does not
            count as a failure; any other not.
        fail_fast: True ends the search with the first trial in ERROR; ``"raise"`` also raises its
            error from ``fit``.
        log_policies: what a line that a trial prints means, should the trial fail (`LogPolicy`);
            where several match, the first of those that say ``"do_not_retry"`` counts.
        max_excluded_nodes: how often a failure after which a trial is kept away from its node, by a
            log policy, does not count as its own; -1 is always.
    """

    max_failures: int = 0
    fail_fast: bool | Literal["raise"] = False
    max_storage_failures: int = 3
    max_node_losses: int = 2
    retry_cuda_memory: bool | Literal["alone"] = False
    log_policies: Sequence[LogPolicy] = ()
    max_excluded_nodes: int = 2

    def __post_init__(self) -> None:
        """Check every field.

        Raises:
            ConfigError: naming the field, its value and what it may be.
        """
        limits = ("max_failures", "max_storage_failures", "max_node_losses", "max_excluded_nodes")
        for name in limits:
            limit = getattr(self, name)
            if not _is_int(limit) or limit < -1:
                fix = "give a whole number from 0, or -1 to try for ever"
                raise _bad("FailureConfig", name, limit, fix)
        if self.retry_cuda_memory not in (True, False, ALONE) or _is_int(self.retry_cuda_memory):
            fix = f"give True, False or {ALONE!r}"
            raise _bad("FailureConfig", "retry_cuda_memory", self.retry_cuda_memory, fix)
        check_policies(self.log_policies)
        if self.fail_fast not in (True, False, "raise"):
            raise _bad("FailureConfig", "fail_fast", self.fail_fast, "give True, False or 'raise'")
        if self.fail_fast and self.max_failures != 0:
            fix = "leave it at 0: with fail_fast the first failure ends the search"
            raise _bad("FailureConfig", "max_failures", self.max_failures, fix)


StopCriteria = dict[str, Any] | Callable[[str, dict[str, Any]], bool]


@dataclass(frozen=True, kw_only=True)
class RunConfig:
    """How the experiment is run, and where its files go.

    Attributes:
        name: of the experiment and its folder; made of the trainable's name and the time by
            default.
        storage_path: the folder above it; ``$TUNEMQ_RESULTS`` or ``~/tunemq_results`` by default.
            With ``s3://bucket/prefix`` that default folder holds what the search writes, and
            checkpoints, with a copy of all else, go to that store.
        stop: when a trial ends: ``{"key": bound}`` (reached when at least the bound, nested keys as
            ``outer/inner``), a function of (trial id, result), a `Stopper`, or a list of those.
        failure_config, checkpoint_config: see there.
        callbacks: of yours, told beside the loggers of JSON and CSV files.
        progress_reporter: what shows progress; a live table, or lines where there is no terminal.
        verbose: 0 silent, 1 progress, 2 every result too.
        preload: modules imported before trials are forked, so that each starts warm; by default the
            installed packages that the trainable refers to, ``()`` for none.
        sync_config: how long a transfer to the store may take, how many may wait, and what is
            copied there besides checkpoints.
        trial_limits: how long a step or a trial may take, and how much memory, before it is killed.
        resume_from_checkpoint: every trial begins from this checkpoint (a `Checkpoint`, or the path
            of its folder), which is copied into the search's store and stays there.
        python: the interpreter that trials run in, as their nodes find it, such as
            ``/envs/mine/bin/python``; it has the same version as the script's, and TuneMQ.
        env_vars: variables for trials, beside or instead of those that they would have.
    """

    name: str | None = None
    storage_path: str | os.PathLike[str] | None = None
    stop: StopCriteria | Stopper | Sequence[StopCriteria | Stopper] | None = None
    failure_config: FailureConfig = field(default_factory=FailureConfig)
    checkpoint_config: CheckpointConfig = field(default_factory=CheckpointConfig)
    callbacks: Sequence[Callback] | None = None
    progress_reporter: ProgressReporter | None = None
    verbose: int = 1
    preload: Sequence[str] | None = None
    sync_config: SyncConfig = field(default_factory=SyncConfig)
    trial_limits: TrialLimits = field(default_factory=TrialLimits)
    resume_from_checkpoint: Checkpoint | str | os.PathLike[str] | None = None
    python: str | None = None
    env_vars: Mapping[str, str] | None = None

    def __post_init__(self) -> None:
        """Check every field.

        Raises:
            ConfigError: naming the field, its value and what it may be.
        """
        for name, kind in (
            ("failure_config", FailureConfig),
            ("checkpoint_config", CheckpointConfig),
            ("sync_config", SyncConfig),
            ("trial_limits", TrialLimits),
        ):
            if getattr(self, name) is None:  # what Ray Tune takes for the default
                object.__setattr__(self, name, kind())
            if not isinstance(getattr(self, name), kind):
                raise _bad("RunConfig", name, getattr(self, name), f"give a {kind.__name__}")
        _check("RunConfig", "verbose", self.verbose, (0, 1, 2, 3))
        given_name: object = self.name
        if not isinstance(given_name, str | None):
            raise _bad(
                "RunConfig", "name", given_name, "give a text, or None for a name that is made"
            )
        if given_name and {"/", "\\"} & set(given_name):
            fix = "it names one folder, so leave out '/' and '\\'; storage_path says where that is"
            raise _bad("RunConfig", "name", given_name, fix)
        preload: object = self.preload
        if preload is not None and (
            isinstance(preload, str)
            or not isinstance(preload, Sequence)
            or not all(isinstance(one, str) for one in preload)
        ):
            raise _bad("RunConfig", "preload", preload, "give a list of module names")
        reporter: object = self.progress_reporter
        # Ray Tune's own reporters are no ProgressReporter of ours, and work.
        if reporter is not None and (
            isinstance(reporter, type)
            or not all(callable(getattr(reporter, one, None)) for one in _OF_REPORTERS)
        ):
            fix = f"give an object with the methods {', '.join(_OF_REPORTERS)}"
            raise _bad("RunConfig", "progress_reporter", reporter, fix)
        _check_environment(self.python, self.env_vars)
        path: object = self.storage_path
        if not isinstance(path, str | os.PathLike | None):
            fix = "give a folder or an address such as s3://bucket/prefix"
            raise _bad("RunConfig", "storage_path", path, fix)
        _check_checkpoint(self.resume_from_checkpoint)


def _check_environment(python: object, variables: object) -> None:
    if python is not None and not (isinstance(python, str) and os.path.isabs(python)):
        fix = "give the absolute path of an interpreter, such as /envs/mine/bin/python"
        raise _bad("RunConfig", "python", python, fix)
    if variables is None:
        return
    if not isinstance(variables, Mapping) or not all(
        isinstance(one, str) and one and "\0" not in one and "=" not in one for one in variables
    ):
        raise _bad("RunConfig", "env_vars", variables, "give a dict of names and values")
    for name, value in variables.items():
        if not isinstance(value, str) or "\0" in value:
            raise _bad("RunConfig", f"env_vars[{name!r}]", value, "give a text")


def _check_checkpoint(given: object) -> None:
    if given is None or isinstance(given, Checkpoint):
        return
    if not isinstance(given, str | os.PathLike) or not os.fspath(given):
        fix = "give a Checkpoint or the path of its folder"
        raise _bad("RunConfig", "resume_from_checkpoint", given, fix)
    if is_remote(os.fspath(given)):
        fix = (
            "give the Checkpoint itself, such as result.checkpoint, or the folder into which "
            "`tunemq checkpoints get` copied it"
        )
        raise _bad("RunConfig", "resume_from_checkpoint", given, fix)
    try:
        Checkpoint(os.path.expanduser(os.fspath(given)))
    except CheckpointError as error:
        raise ConfigError(f"RunConfig(resume_from_checkpoint={given!r}): {error}") from error


def _check(where: str, name: str, value: object, allowed: tuple[object, ...]) -> None:
    if value not in allowed:
        choices = ", ".join(repr(one) for one in allowed)
        raise _bad(where, name, value, f"choose one of {choices}")


def _take_flag(config: TuneConfig | CheckpointConfig, name: str) -> None:
    """Make a field a bool: None is the default, as Ray Tune takes it, and NumPy's bools count."""
    value = getattr(config, name)
    plain = value.item() if type(value).__module__ == "numpy" and hasattr(value, "item") else value
    if not isinstance(plain, bool | None):
        raise _bad(type(config).__name__, name, value, "give True or False")
    object.__setattr__(config, name, bool(plain))


def _bad(where: str, name: str, value: object, fix: str) -> ConfigError:
    return ConfigError(f"{where}({name}={value!r}) is not usable: {fix}.")


def _is_int(value: object) -> bool:
    return isinstance(value, int) and not isinstance(value, bool)


def _is_number(value: object) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool)
