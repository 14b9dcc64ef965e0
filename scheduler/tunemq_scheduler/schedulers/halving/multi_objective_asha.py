"""Asynchronous successive halving for several metrics (MO-ASHA).

R. Schmucker, M. Donini, M. B. Zafar, D. Salinas, C. Archambeau: Multi-objective Asynchronous
Successive Halving, 2021 (arXiv:2106.12639).
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

from tunemq_scheduler.schedulers.decisions import Answer
from tunemq_scheduler.schedulers.halving.asynchronous_halving import AsynchronousHalving
from tunemq_scheduler.schedulers.halving.non_dominated import MOPriority, NonDominatedPriority
from tunemq_scheduler.schedulers.halving.recent_points import RecentPoints
from tunemq_scheduler.schedulers.trial_scheduler import TrialLike
from tunemq_scheduler.search.objective import Metric, Mode
from tunemq_shared.base.errors import ConfigError, SearchFailed
from tunemq_shared.protocol.result_conditions import TRAINING_ITERATION, lookup


class MultiObjectiveASHA(AsynchronousHalving[RecentPoints]):
    """Stop a trial at a rung unless it is among the best ``1 / reduction_factor`` by all metrics.

    The rungs are at ``grace_period``, ``grace_period * reduction_factor``, and so on up to
    ``max_t``. At each, the scheduler sorts the trial and those before it by their priority. By
    default that is the place by non-dominated sorting, in which an epsilon-net orders each Pareto
    front; so trials that continue approach the whole Pareto front. The first trial at a rung
    continues. A result that passes several rungs at once counts at the highest. A trial with a
    value that is not a finite number is worse than any other, and the others are not compared with
    it. The search's results have all metrics; `ResultGrid.get_best_result` takes one of them.

    A trial is compared with the newest 128 at its rung, so that a decision takes no more than a few
    milliseconds in a long search; the paper compares it with all. As in Syne Tune's ``MOASHA``, a
    trial that is not among the best stops there and then, where the paper pauses it.

    The metrics belong to the scheduler. ``TuneConfig`` may name one metric as well, for the search
    algorithm and for `ResultGrid.get_best_result`: one of these with the same mode, or another.

    Args:
        metrics (list[str]): the result keys to compare.
        mode (str | list[str]): ``min`` or ``max`` for all metrics, or a list with one of these for
            each.
        time_attr (str): the result key that measures progress; its values grow.
        multiobjective_priority (MOPriority): the order of trials. Default: `NonDominatedPriority`.
        max_t (float): the progress at which trials stop, in units of ``time_attr``.
        grace_period (float): the progress before which no trial stops, in units of ``time_attr``.
        reduction_factor (float): one trial of this many continues at a rung; above 1.
        brackets (int): the number of brackets; bracket s begins with rung s.

    Raises:
        ConfigError: an argument is invalid; the message names it, its value and valid values.

    Example:
        >>> from tunemq import TuneConfig
        >>> from tunemq.schedulers import MultiObjectiveASHA
        >>> scheduler = MultiObjectiveASHA(
        ...     metrics=["accuracy", "latency_ms"], mode=["max", "min"], max_t=27
        ... )
        >>> tune_config = TuneConfig(num_samples=64, scheduler=scheduler)
        >>> print(scheduler.debug_string())
        Using MO-ASHA: 0 trials stopped.
        Rungs 1: 0 trials | 3: 0 trials | 9: 0 trials | 27: 0 trials
    """

    def __init__(
        self,
        metrics: Sequence[str] = (),
        mode: str | Sequence[str] | None = None,
        time_attr: str = TRAINING_ITERATION,
        multiobjective_priority: MOPriority | None = None,
        max_t: float = 100,
        grace_period: float = 1,
        reduction_factor: float = 3,
        brackets: int = 1,
    ) -> None:
        super().__init__(
            RecentPoints,
            time_attr=time_attr,
            max_t=max_t,
            grace_period=grace_period,
            reduction_factor=reduction_factor,
            brackets=brackets,
            stop_last_trials=True,
        )
        modes = _checked_modes(metrics, mode)
        self._metric = self._names = tuple(metrics)
        self._mode = modes
        self._signs = [1.0 if one == "min" else -1.0 for one in modes]
        self._factor = reduction_factor
        self._priority = _checked_priority(multiobjective_priority, len(modes))

    def set_search_properties(self, metric: Metric, mode: Mode, **spec: Any) -> bool:
        """Set the seed; ``TuneConfig``'s metric is that of the search algorithm and the results.

        Raises:
            ConfigError: ``TuneConfig`` has another mode for one of the metrics.
        """
        own = dict(zip(self._names, self._mode or (), strict=True))
        if isinstance(metric, str) and metric in own and mode not in (None, own[metric]):
            raise ConfigError(
                f"TuneConfig(metric={metric!r}, mode={mode!r}) contradicts "
                f"{type(self).__name__}, whose mode of {metric!r} is {own[metric]!r}; use one mode."
            )
        self._seed = spec.get("seed", 0)
        return True

    def _measured(self, result: dict[str, Any]) -> tuple[float, ...] | None:
        values = tuple(lookup(result, name) for name in self._names)
        return None if any(value is None for value in values) else values

    def _decide(self, trial: TrialLike, time: float, measured: Any) -> Answer:
        reason = self._judge(trial, time, measured)
        return self._stop(trial, reason) if reason else self.CONTINUE

    def _record_last(self, trial: TrialLike, time: float, measured: Any) -> None:
        self._judge(trial, time, measured)

    def _judge(self, trial: TrialLike, time: float, measured: tuple[float, ...]) -> str:
        """Record values at the highest rung newly reached; return why the trial must stop."""
        rung = self._reach(trial.trial_id, time)
        if rung is None:
            return ""
        others = rung.count
        point = tuple(sign * value for sign, value in zip(self._signs, measured, strict=True))
        if all(math.isfinite(value) for value in point):
            rung.record(trial.trial_id, point)
            better = self._better_than_newest(rung.points)
            if better * self._factor < rung.count:
                return ""
            count, why = rung.count, f"{better} are better"
        else:
            count, why = others + 1, "a value is not finite"
        if not others:
            return ""
        shown = ", ".join(
            f"{name} {value:g}" for name, value in zip(self._names, measured, strict=True)
        )
        return (
            f"{shown} is not among the best {self._best_share} of {count} trials at rung "
            f"{rung.milestone:g} ({why})"
        )

    def _better_than_newest(self, points: list[tuple[float, ...]]) -> int:
        """Return how many points have a better priority than the last.

        Raises:
            SearchFailed: a user's priority returned another number of priorities.
        """
        priorities = self._priority(points)
        if len(priorities) != len(points):
            raise SearchFailed(
                f"{type(self._priority).__name__} returned {len(priorities)} priorities for "
                f"{len(points)} points; return one for each."
            )
        newest = priorities[-1]
        return sum(one < newest for one in priorities)

    def debug_string(self) -> str:
        """Return each bracket's rungs with the numbers of trials that are compared."""
        lines = [f"Using MO-ASHA: {self._stopped} trials stopped."]
        for rungs in self._brackets:
            shown = [f"{rung.milestone:g}: {rung.count} trials" for rung in rungs]
            lines.append("Rungs " + " | ".join(shown))
        return "\n".join(lines)


def _checked_modes(metrics: Any, mode: Any) -> tuple[str, ...]:
    """Return the mode of each metric.

    Raises:
        ConfigError: metrics or modes are invalid.
    """
    who = "MultiObjectiveASHA"
    if not isinstance(metrics, list | tuple) or not metrics:
        raise ConfigError(
            f"{who}(metrics={metrics!r}): pass a list of result keys, such as ['loss', 'time']."
        )
    if not all(isinstance(one, str) and one for one in metrics):
        raise ConfigError(f"{who}(metrics={metrics!r}): a metric is the name of a reported value.")
    if len(set(metrics)) < len(metrics):
        raise ConfigError(f"{who}(metrics={metrics!r}): name each metric once.")
    modes = mode if isinstance(mode, list | tuple) else [mode] * len(metrics)
    if len(modes) != len(metrics):
        raise ConfigError(
            f"{who}(mode={mode!r}) has {len(modes)} modes for {len(metrics)} metrics; pass 'min' "
            "or 'max' for each, or one for all."
        )
    if not all(one in ("min", "max") for one in modes):
        raise ConfigError(
            f"{who}(mode={mode!r}): pass 'min' or 'max', or a list with one of these for each "
            "metric."
        )
    return tuple(modes)


def _checked_priority(priority: Any, metrics: int) -> MOPriority:
    """Return the priority; the default for None.

    Raises:
        ConfigError: it is none.
    """
    if priority is None:
        return NonDominatedPriority()
    if not isinstance(priority, MOPriority):
        raise ConfigError(
            f"MultiObjectiveASHA(multiobjective_priority={priority!r}): pass a MOPriority, such as "
            "NonDominatedPriority()."
        )
    if isinstance(priority, NonDominatedPriority) and priority.dim >= metrics:
        raise ConfigError(
            f"NonDominatedPriority(dim={priority.dim!r}): there are {metrics} metrics; pass an "
            f"index from 0 to {metrics - 1}."
        )
    return priority
