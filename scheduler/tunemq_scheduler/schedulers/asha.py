"""Asynchronous successive halving (ASHA).

L. Li, K. Jamieson, A. Rostamizadeh, E. Gonina, J. Ben-tzur, M. Hardt, B. Recht, A. Talwalkar: A
System for Massively Parallel Hyperparameter Tuning, MLSys 2020 (arXiv:1810.05934), section 3.2. As
in Ray, a trial that is not promoted when it reaches a rung is stopped there and then, not paused.
Brackets are those of Hyperband: L. Li, K. Jamieson, G. DeSalvo, A. Rostamizadeh, A. Talwalkar:
Hyperband, JMLR 18 (2018), section 3.
"""

from __future__ import annotations

import math
import random
from typing import Any

from tunemq_scheduler.schedulers.rung import Rung
from tunemq_scheduler.schedulers.trial_scheduler import (
    RunnerLike,
    TrialLike,
    TrialScheduler,
    decides_as,
)
from tunemq_scheduler.search.objective import (
    Metric,
    Mode,
    check_count,
    check_objective,
    is_real,
    need_objective,
)
from tunemq_shared.base.errors import ConfigError
from tunemq_shared.protocol.result_conditions import (
    TO_THE_END,
    TRAINING_ITERATION,
    Condition,
    Horizon,
    lookup,
)


class AsyncHyperBandScheduler(TrialScheduler):
    """Stop a trial at a rung unless it is among the best ``1 / reduction_factor`` of those before.

    The rungs are at ``grace_period``, ``grace_period * reduction_factor``, and so on up to
    ``max_t``. At each, the scheduler compares a trial's value with the quantile of the values
    recorded there before, as Ray does, and then records it; the first trial at a rung continues. A
    result that passes several rungs at once counts at the highest. A value that is not a finite
    number is worse than any other.

    Args:
        time_attr: the result key that measures progress; its values grow.
        metric: the result key to compare. Default: ``TuneConfig``'s metric.
        mode: ``min`` or ``max``.
        max_t: the progress at which trials stop, in units of ``time_attr``.
        grace_period: the progress before which no trial stops, in units of ``time_attr``.
        reduction_factor: one trial of this many continues at a rung; above 1.
        brackets: the number of brackets; bracket s begins with rung s. The scheduler draws a
            trial's bracket from the trial's number and the seed; brackets with more rungs are more
            likely.
        stop_last_trials: whether trials stop at ``max_t``.
    """

    def __init__(
        self,
        time_attr: str = TRAINING_ITERATION,
        metric: str | None = None,
        mode: str | None = None,
        max_t: float = 100,
        grace_period: float = 1,
        reduction_factor: float = 4,
        brackets: int = 1,
        stop_last_trials: bool = True,
    ) -> None:
        _check(max_t, grace_period, reduction_factor, brackets)
        check_objective(type(self).__name__, metric, mode)
        self._metric: Metric = metric
        self._mode: Mode = mode
        self._time_attr = time_attr
        self._max_t = max_t
        self._stop_last_trials = stop_last_trials
        self._brackets = [
            _rungs(grace_period, max_t, reduction_factor, skipped) for skipped in range(brackets)
        ]
        self._best_share = f"1/{reduction_factor:g}"
        self._seed: object = 0
        self._sign = 1.0
        self._name = ""
        self._stopped = 0
        self._places: dict[str, _RungPosition] = {}

    def set_search_properties(self, metric: Metric, mode: Mode, **spec: Any) -> bool:
        """Set the experiment's metric, mode and seed.

        Raises:
            ConfigError: metric or mode is missing, or differs from the scheduler's own, or there
                are several metrics.
        """
        super().set_search_properties(metric, mode, **spec)
        who = type(self).__name__
        need_objective(who, self._metric, self._mode)
        if not isinstance(self._metric, str):
            raise ConfigError(f"{who} compares trials by one metric, not by {self._metric!r}.")
        self._name = self._metric
        self._sign = 1.0 if self._mode == "max" else -1.0
        self._seed = spec.get("seed", 0)
        return True

    def on_trial_add(self, runner: RunnerLike, trial: TrialLike) -> None:  # noqa: ARG002
        """Draw the trial's bracket; a trial that had ended and continues skips the rungs it passed.

        Raises:
            ConfigError: neither the scheduler nor ``TuneConfig`` names a metric.
        """
        need_objective(type(self).__name__, self._metric if self._name else None, self._mode)
        place = self._places[trial.trial_id] = _RungPosition(self._draw_bracket(trial.number))
        time = lookup(trial.last_result, self._time_attr)
        if time is not None:
            self._reach(place, time)

    def _draw_bracket(self, number: int) -> int:
        if len(self._brackets) == 1:
            return 0
        weights = [math.exp(len(rungs)) for rungs in self._brackets]
        rng = random.Random(f"{self._seed}/bracket/{number}")
        return rng.choices(range(len(weights)), weights)[0]

    def on_trial_result(
        self,
        runner: RunnerLike,  # noqa: ARG002
        trial: TrialLike,
        result: dict[str, Any],
    ) -> str:
        """Return STOP at ``max_t``, and at a rung where the trial is not among the best."""
        place = self._places.get(trial.trial_id)
        time, measured = lookup(result, self._time_attr), lookup(result, self._name)
        if place is None or time is None:
            return self.CONTINUE
        place.overdue = measured is None
        if measured is None:
            return self.CONTINUE  # Ray waits for the next result that has the metric, too
        if self._stop_last_trials and time >= self._max_t:
            return self._stop(
                trial, f"{self._time_attr} {time:g} has reached max_t {self._max_t:g}"
            )
        reason = self._judge(trial, place, time, measured)
        return self._stop(trial, reason) if reason else self.CONTINUE

    def _judge(self, trial: TrialLike, place: _RungPosition, time: float, measured: Any) -> str:
        """Record a value at the highest rung newly reached; return why the trial must stop."""
        rung = self._reach(place, time)
        if rung is None:
            return ""
        cutoff, others = rung.cutoff(), rung.count
        value = _finite(measured, self._sign)
        rung.record(trial.trial_id, value)
        if cutoff is None or (value is not None and value >= cutoff):
            return ""
        return (
            f"rung {rung.milestone:g}: {self._name} {measured:g} is not among the best "
            f"{self._best_share} of {others} trials, cutoff {self._sign * cutoff:g}"
        )

    def _reach(self, place: _RungPosition, time: float) -> Rung | None:
        rungs = self._brackets[place.bracket]
        reached = None
        while place.next_rung < len(rungs) and time >= rungs[place.next_rung].milestone:
            reached = rungs[place.next_rung]
            place.next_rung += 1
        return reached

    def _stop(self, trial: TrialLike, reason: str) -> str:
        self._stopped += 1
        del self._places[trial.trial_id]
        return self.STOP.because(reason)

    def on_trial_complete(
        self,
        runner: RunnerLike,  # noqa: ARG002
        trial: TrialLike,
        result: dict[str, Any],
    ) -> None:
        """Record the last value if it reached a rung: later trials are compared with it."""
        place = self._places.pop(trial.trial_id, None)
        time, measured = lookup(result, self._time_attr), lookup(result, self._name)
        if place is not None and time is not None and measured is not None:
            self._judge(trial, place, time, measured)

    def on_trial_error(self, runner: RunnerLike, trial: TrialLike) -> None:  # noqa: ARG002
        """Forget the trial; its recorded values stay."""
        self._places.pop(trial.trial_id, None)

    def on_trial_remove(self, runner: RunnerLike, trial: TrialLike) -> None:  # noqa: ARG002
        """Forget the trial; its recorded values stay."""
        self._places.pop(trial.trial_id, None)

    def on_trial_restart(self, runner: RunnerLike, trial: TrialLike) -> None:  # noqa: ARG002
        """Forget the trial's recorded values."""
        for rungs in self._brackets:
            for rung in rungs:
                rung.forget(trial.trial_id)

    def horizon(self, trial: TrialLike) -> Horizon | None:
        """Return the trial's next rung, else ``max_t``."""
        if not decides_as(self, AsyncHyperBandScheduler):
            return None
        place = self._places.get(trial.trial_id)
        if place is None:
            return TO_THE_END
        if place.overdue:
            return None
        rungs = self._brackets[place.bracket]
        if place.next_rung < len(rungs):
            return (Condition(self._time_attr, rungs[place.next_rung].milestone),)
        if self._stop_last_trials:
            return (Condition(self._time_attr, self._max_t),)
        return TO_THE_END

    def debug_string(self) -> str:
        """Return each bracket's rungs with their trial counts and cutoffs."""
        lines = [f"Using ASHA: {self._stopped} trials stopped."]
        for rungs in self._brackets:
            shown = [
                f"{rung.milestone:g}: {rung.count} trials" + self._cutoff(rung) for rung in rungs
            ]
            lines.append("Rungs " + " | ".join(shown))
        return "\n".join(lines)

    def _cutoff(self, rung: Rung) -> str:
        cutoff = rung.cutoff()
        return "" if cutoff is None else f", cutoff {self._sign * cutoff:g}"

    def get_state(self) -> dict[str, Any]:
        """Return all rungs, and each live trial's position."""
        return {
            "stopped": self._stopped,
            "brackets": [[rung.get_state() for rung in rungs] for rungs in self._brackets],
            "places": {
                trial: [place.bracket, place.next_rung, place.overdue]
                for trial, place in self._places.items()
            },
        }

    def set_state(self, state: dict[str, Any]) -> None:
        """Restore the state that `get_state` returned.

        Raises:
            ConfigError: the rungs differ.
        """
        mine = [[rung.milestone for rung in rungs] for rungs in self._brackets]
        theirs = [[rung[0] for rung in rungs] for rungs in state["brackets"]]
        if mine != theirs:
            raise ConfigError(
                f"the scheduler's rungs are {mine} now and were {theirs}; resume with the same "
                "max_t, grace_period, reduction_factor and brackets."
            )
        self._stopped = state["stopped"]
        for rungs, saved in zip(self._brackets, state["brackets"], strict=True):
            for rung, values in zip(rungs, saved, strict=True):
                rung.set_state(values)
        self._places = {trial: _RungPosition(*place) for trial, place in state["places"].items()}


ASHAScheduler = AsyncHyperBandScheduler


class _RungPosition:
    """The position of a live trial: its bracket, and the first rung that it has not reached.

    ``overdue``: it reached a rung with a result that lacked the metric.
    """

    __slots__ = ("bracket", "next_rung", "overdue")

    def __init__(self, bracket: int, next_rung: int = 0, overdue: bool = False) -> None:
        self.bracket, self.next_rung, self.overdue = bracket, next_rung, overdue


def _rungs(first: float, last: float, factor: float, skipped: int) -> list[Rung]:
    rungs = []
    milestone = first * factor**skipped
    while milestone <= last:
        rungs.append(Rung(milestone, 1 / factor))
        milestone = first * factor ** (skipped + len(rungs))
    return rungs


def _finite(measured: Any, sign: float) -> float | None:
    value = sign * measured
    return float(value) if math.isfinite(value) else None


def _check(max_t: float, grace_period: float, reduction_factor: float, brackets: int) -> None:
    positive = {"max_t": max_t, "grace_period": grace_period, "reduction_factor": reduction_factor}
    for name, value in positive.items():
        if not is_real(value) or not 0 < value < math.inf:
            raise ConfigError(f"ASHAScheduler({name}={value!r}): a number above 0 is needed.")
    if reduction_factor <= 1:
        raise ConfigError(
            f"ASHAScheduler(reduction_factor={reduction_factor!r}): it must be above 1; "
            "4 lets the best quarter continue."
        )
    if grace_period > max_t:
        raise ConfigError(
            f"ASHAScheduler(grace_period={grace_period!r}, max_t={max_t!r}): "
            "grace_period must not be above max_t."
        )
    check_count("ASHAScheduler", "brackets", brackets, least=1)
