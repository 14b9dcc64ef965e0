"""Settings of a search: `TuneConfig`, `RunConfig`, `CheckpointConfig` and `FailureConfig`.

Each class checks its fields when it is made.
"""

from __future__ import annotations

import datetime as dt
import os
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Literal, TypeGuard

from tunemq_scheduler.core.runner_settings import ALONE
from tunemq_scheduler.output.syncing.sync_config import SyncConfig
from tunemq_scheduler.settings.printed_line_policy import LogPolicy, check_policies
from tunemq_scheduler.settings.trial_limit_settings import TrialLimits, is_int
from tunemq_shared.base.byte_sizes import parse_bytes
from tunemq_shared.base.depth_and_integer_limits import MOST_IN_MESSAGES
from tunemq_shared.base.errors import CheckpointError, ConfigError
from tunemq_shared.base.safe_text import repr_of
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
    """Settings of the search itself: what to optimise, with which algorithms, and how long.

    Attributes:
        metric (str): the reported key to optimise. Most search algorithms and trial schedulers
            need it.
        mode (str): ``"min"`` or ``"max"``. Default with a metric: ``"max"``.
        search_alg (Searcher or str): a search algorithm or its name. Default: random and grid
            search.
        scheduler (TrialScheduler or str): a trial scheduler or its name. Default: ``"fifo"``.
        num_samples (int): how many times to sample the search space; each sample covers every
            grid. -1 samples without end.
        max_concurrent_trials (int): the most trials that run at once. None or 0: as many as there
            are slots.
        time_budget_s (float or timedelta): seconds after which the search stops, finished or not.
        reuse_actors (bool): let a trial process run one trial after another, where the trainable
            allows it. Its ``cleanup`` runs when no trial is left for it, unless the script ends
            first.
        seed (int): seeds everything random in this search: the configurations, and the random
            generators of each trial.
        nonfinite (str): how to treat a metric that is NaN or infinite: ``"error"`` fails the trial
            at that report, ``"worst"`` ranks it last.

    Raises:
        ConfigError: a field is invalid; the message names the field, its value and valid values.

    Example:
        >>> from tunemq import TuneConfig
        >>> TuneConfig(metric="loss", mode="min", num_samples=20, time_budget_s=3600).budget_s
        3600
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
            raise _bad(
                "TuneConfig", "metric", None, f"name the metric to optimise by mode={self.mode!r}"
            )
        if not _is_count(self.num_samples) or (self.num_samples < 1 and self.num_samples != -1):
            fix = "give a whole number from 1, or -1 for an endless search"
            raise _bad("TuneConfig", "num_samples", self.num_samples, fix)
        limit = self.max_concurrent_trials
        if limit is not None and not (_is_count(limit) and limit >= 0):
            fix = "give a whole number from 1, or 0 for no limit"
            raise _bad("TuneConfig", "max_concurrent_trials", limit, fix)
        budget = self.budget_s
        if budget is not None and not (_is_number(budget) and budget > 0):
            raise _bad("TuneConfig", "time_budget_s", self.time_budget_s, "give seconds above 0")
        if self.seed is not None and not is_int(self.seed):
            raise _bad("TuneConfig", "seed", self.seed, "give a whole number")

    @property
    def budget_s(self) -> float | None:
        """The time budget in seconds; None for no budget."""
        budget = self.time_budget_s
        return budget.total_seconds() if isinstance(budget, dt.timedelta) else budget

    @property
    def direction(self) -> Mode | None:
        """The mode; ``"max"`` where only a metric is set, None without a metric."""
        return (self.mode or "max") if self.metric is not None else None


@dataclass(frozen=True, kw_only=True)
class CheckpointConfig:
    """Settings that say when trials save checkpoints and which checkpoints the search keeps.

    Attributes:
        num_to_keep (int): the most checkpoints to keep for each trial; None keeps all. The newest
            is kept in addition.
        checkpoint_score_attribute (str): the result key that ranks checkpoints; None ranks newer
            ones higher.
        checkpoint_score_order (str): ``"max"`` or ``"min"``: which scores are best.
        checkpoint_frequency (int): steps between two checkpoints of a class trainable; 0 saves
            none.
        checkpoint_at_end (bool): whether a class trainable saves a checkpoint when it ends.
        num_to_keep_in_experiment (int): the most checkpoints to keep for all trials together; None
            sets no such limit. The newest of each unfinished trial is kept in addition.
        max_bytes (int or str): the most bytes that all kept checkpoints use together: a number, or
            a text such as ``"10GiB"``. Above it, the worst are deleted first. The best one and the
            newest of each unfinished trial are never deleted.

    Raises:
        ConfigError: a field is invalid; the message names the field, its value and valid values.

    Example:
        >>> from tunemq import CheckpointConfig
        >>> CheckpointConfig(num_to_keep=2, max_bytes="10GiB").byte_limit
        10737418240
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
            if limit is not None and (not _is_count(limit) or limit < 1):
                fix = "give a whole number from 1, or None to keep all"
                raise _bad("CheckpointConfig", name, limit, fix)
        if self.max_bytes is not None and not 1 <= (self.byte_limit or 0) <= MOST_IN_MESSAGES:
            fix = 'give bytes above 0 or a text such as "10GiB", or None for no limit'
            raise _bad("CheckpointConfig", "max_bytes", self.max_bytes, fix)
        score = self.checkpoint_score_attribute
        if score is not None and not (isinstance(score, str) and score):
            fix = "give the name of a reported key, or None for the newest"
            raise _bad("CheckpointConfig", "checkpoint_score_attribute", score, fix)
        order = self.checkpoint_score_order
        _check("CheckpointConfig", "checkpoint_score_order", order, ("min", "max"))
        if not _is_count(self.checkpoint_frequency) or self.checkpoint_frequency < 0:
            fix = "give a whole number of steps, 0 for none"
            raise _bad("CheckpointConfig", "checkpoint_frequency", self.checkpoint_frequency, fix)

    @property
    def byte_limit(self) -> int | None:
        """`max_bytes` as a number of bytes; None where it is unset or unreadable."""
        limit = self.max_bytes
        if isinstance(limit, str):
            return parse_bytes(limit)
        return limit if _is_count(limit) else None


@dataclass(frozen=True, kw_only=True)
class FailureConfig:
    """Settings that say how often a failed trial is retried, and when a failure ends the search.

    A failed trial is retried from its last checkpoint: immediately the first time, then, as long as
    it reports no new result, after growing pauses of up to one minute. A trial that exceeded
    ``TrialLimits(trial_s=...)`` is not retried.

    Attributes:
        max_failures (int): retries after an error in the trial's code, the death of its process,
            too much memory, or a step that took too long; -1: no limit.
        fail_fast (bool or str): True ends the search at the first trial in ERROR; ``"raise"`` also
            raises that trial's error from ``fit``.
        max_storage_failures (int): retries in a row, without a new result, after the trial's
            checkpoint could not be stored. Counted separately: failures to restore a checkpoint,
            and failures of the node to read the trial's code from the store. -1: no limit.
        max_node_losses (int): retries in a row, without a new result, after the trial's node, or
            the forkserver of that node, was lost while no other trial ran there. One more loss ends
            the trial in ERROR as *poison*. Losses that other trials shared do not count, but after
            this many of them (at least one) the trial runs alone on its node until it reports a new
            result. -1: no limit.
        retry_cuda_memory (bool or str): whether to retry a trial that ran out of GPU memory. True
            counts it against ``max_failures``; the retry needs as much memory again. ``"alone"``
            retries a trial that requested a part of a GPU once, on a whole GPU from then on, and
            does not count that as a failure; other trials are not retried.
        log_policies (sequence of LogPolicy): what to do about a trial that fails after it printed a
            certain line. If several match, the first ``"do_not_retry"`` counts.
        max_excluded_nodes (int): how many failures that exclude a node by a log policy do not count
            against ``max_failures``; -1: all.

    Raises:
        ConfigError: a field is invalid; the message names the field, its value and valid values.

    Example:
        >>> from tunemq import FailureConfig
        >>> FailureConfig(max_failures=3).fail_fast
        False
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
            if not _is_count(limit) or limit < -1:
                fix = "give a whole number from 0, or -1 to retry without a limit"
                raise _bad("FailureConfig", name, limit, fix)
        if self.retry_cuda_memory not in (True, False, ALONE) or is_int(self.retry_cuda_memory):
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
    """Settings of the run: names, files, stop criteria, failures, output, trial environment.

    Attributes:
        name (str): the name of the experiment and of its folder. Default: made of the trainable's
            name and the time.
        storage_path (str or path): the folder that holds the experiment's folder. Default:
            ``$TUNEMQ_RESULTS``, else ``~/tunemq_results``. With ``s3://bucket/prefix``, checkpoints
            and a copy of all other files go to that store, and the default folder holds what the
            search writes.
        stop (dict, function, Stopper, or a list of these): when a trial ends. A dict
            ``{"key": bound}`` ends a trial whose value is at least the bound (nested keys:
            ``outer/inner``; a warning names keys that the first result lacks); a function takes
            (trial ID, result) and returns a bool.
        failure_config (FailureConfig): retries and failures.
        checkpoint_config (CheckpointConfig): which checkpoints are made and kept.
        callbacks (sequence of Callback): user callbacks, called after the built-in JSON and CSV
            loggers.
        progress_reporter (ProgressReporter): shows progress. Default: a live table on a terminal,
            lines elsewhere.
        verbose (int): 0 shows nothing, 1 progress, 2 also every result.
        preload (sequence of str): modules to import before trial processes are forked, so that each
            starts warm. Default: the installed packages that the trainable refers to; ``()`` for
            none.
        sync_config (SyncConfig): how long a transfer to the store may take, how many checkpoints
            may wait for it, and which other files are copied.
        trial_limits (TrialLimits): time and memory limits; a trial that exceeds one is killed.
        resume_from_checkpoint (Checkpoint, str or path): the checkpoint, or the path of its folder,
            from which every trial starts. It is copied to the store and kept there.
        python (str): the interpreter of the trials, as their nodes find it, such as
            ``/envs/mine/bin/python``. It needs TuneMQ and the Python version of the script.
        env_vars (mapping of str to str): environment variables of the trials, in addition to the
            default ones or instead of them.

    Raises:
        ConfigError: a field is invalid; the message names the field, its value and valid values.

    Example:
        >>> from tunemq import RunConfig
        >>> RunConfig(name="mnist", stop={"training_iteration": 10}, verbose=0).name
        'mnist'
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
            if getattr(self, name) is None:  # Ray Tune treats None as the default
                object.__setattr__(self, name, kind())
            if not isinstance(getattr(self, name), kind):
                raise _bad("RunConfig", name, getattr(self, name), f"give a {kind.__name__}")
        _check("RunConfig", "verbose", self.verbose, (0, 1, 2, 3))
        given_name: object = self.name
        if not isinstance(given_name, str | None):
            raise _bad("RunConfig", "name", given_name, "give a text, or None for a generated name")
        if given_name and {"/", "\\"} & set(given_name):
            fix = (
                "it names one folder, so remove '/' and '\\'; storage_path is for the parent folder"
            )
            raise _bad("RunConfig", "name", given_name, fix)
        preload: object = self.preload
        if preload is not None and (
            isinstance(preload, str)
            or not isinstance(preload, Sequence)
            or not all(isinstance(one, str) for one in preload)
        ):
            raise _bad("RunConfig", "preload", preload, "give a list of module names")
        reporter: object = self.progress_reporter
        # Ray Tune's own reporters work without deriving from our ProgressReporter.
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
    """Convert a field to bool. None is False, as in Ray Tune; NumPy's bools are accepted."""
    value = getattr(config, name)
    plain = value.item() if type(value).__module__ == "numpy" and hasattr(value, "item") else value
    if not isinstance(plain, bool | None):
        raise _bad(type(config).__name__, name, value, "give True or False")
    object.__setattr__(config, name, bool(plain))


def _bad(where: str, name: str, value: object, fix: str) -> ConfigError:
    if is_int(value) and abs(value) > MOST_IN_MESSAGES:
        fix = f"the greatest number is {MOST_IN_MESSAGES}"
    return ConfigError(f"{where}({name}={repr_of(value)}) is invalid: {fix}.")


def _is_count(value: object) -> TypeGuard[int]:
    return is_int(value) and value <= MOST_IN_MESSAGES


def _is_number(value: object) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool)
