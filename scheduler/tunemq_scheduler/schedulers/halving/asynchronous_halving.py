"""`AsynchronousHalving`: the base class of schedulers that compare each trial as it reaches a rung.

L. Li, K. Jamieson, A. Rostamizadeh, E. Gonina, J. Ben-tzur, M. Hardt, B. Recht, A. Talwalkar: A
System for Massively Parallel Hyperparameter Tuning, MLSys 2020 (arXiv:1810.05934). Brackets are
those of Hyperband: L. Li, K. Jamieson, G. DeSalvo, A. Rostamizadeh, A. Talwalkar: Hyperband, JMLR
18 (2018), section 3.
"""

from __future__ import annotations

import math
import random
from abc import abstractmethod
from collections.abc import Callable, Iterator
from typing import Any, Generic, Protocol, TypeVar

from tunemq_scheduler.schedulers.decisions import Action, Answer, SchedulerDecision
from tunemq_scheduler.schedulers.trial_scheduler import (
    RunnerLike,
    TrialLike,
    TrialScheduler,
    decides_as,
)
from tunemq_scheduler.search.objective import Metric, Mode, check_count, is_real
from tunemq_shared.base.errors import ConfigError
from tunemq_shared.protocol.result_conditions import TO_THE_END, Condition, Horizon, lookup


class HalvingRung(Protocol):
    """The values of the trials that reached one milestone."""

    milestone: float

    @property
    def count(self) -> int:
        """The number of recorded trials."""
        ...

    def forget(self, trial: str) -> None:
        """Remove the trial's value, if it has one."""
        ...

    def get_state(self) -> list[Any]:
        """Return the state as JSON values; the first is the milestone."""
        ...

    def set_state(self, state: list[Any]) -> None:
        """Restore the state that `get_state` returned."""
        ...


R = TypeVar("R", bound=HalvingRung)


class AsynchronousHalving(TrialScheduler, Generic[R]):
    """Asks about a trial at its next rung; subclasses compare it with the trials before it.

    Args:
        new_rung: creates the rung of a milestone.
        time_attr: the result key that measures progress; its values grow.
        max_t: the progress at which trials stop, in units of ``time_attr``.
        grace_period: the first milestone, in units of ``time_attr``.
        reduction_factor: each milestone is this many times the one before; above 1.
        brackets: the number of brackets; bracket s begins with rung s.
        stop_last_trials: whether trials stop at ``max_t``.

    Raises:
        ConfigError: an argument is invalid.
    """

    def __init__(
        self,
        new_rung: Callable[[float], R],
        *,
        time_attr: str,
        max_t: float,
        grace_period: float,
        reduction_factor: float,
        brackets: int,
        stop_last_trials: bool,
    ) -> None:
        _check(type(self).__name__, max_t, grace_period, reduction_factor, brackets)
        self._time_attr = time_attr
        self._max_t = max_t
        self._stop_last_trials = stop_last_trials
        self._brackets = [
            [new_rung(one) for one in _milestones(grace_period, max_t, reduction_factor, skipped)]
            for skipped in range(brackets)
        ]
        self._best_share = f"1/{reduction_factor:g}"
        self._seed: object = 0
        self._stopped = 0
        self._places: dict[str, _RungPosition] = {}

    # --- for subclasses ---------------------------------------------------------------------------

    @abstractmethod
    def _measured(self, result: dict[str, Any]) -> Any:
        """Return what trials are compared by; None if the result lacks it."""

    @abstractmethod
    def _decide(self, trial: TrialLike, time: float, measured: Any) -> Answer:
        """Return how a trial proceeds that has not reached ``max_t``."""

    @abstractmethod
    def _record_last(self, trial: TrialLike, time: float, measured: Any) -> None:
        """Record the last result of a trial that ended."""

    def _freed(self) -> list[Action]:
        """Return which paused trials continue now that a slot may be free."""
        return []

    def _reach(self, trial: str, time: float) -> R | None:
        """Return the highest rung that a trial newly reached, and count it as reached."""
        place = self._places[trial]
        rungs = self._brackets[place.bracket]
        reached = None
        while place.next_rung < len(rungs) and time >= rungs[place.next_rung].milestone:
            reached = rungs[place.next_rung]
            place.next_rung += 1
        return reached

    def _stop(self, trial: TrialLike, reason: str) -> SchedulerDecision:
        self._stopped += 1
        self._leave(trial.trial_id)
        return self.STOP.because(reason)

    def _leave(self, trial: str) -> None:
        """Forget a trial that has ended; its recorded values stay."""
        self._places.pop(trial, None)

    def _rungs(self) -> Iterator[R]:
        for rungs in self._brackets:
            yield from rungs

    # --- as in the base class ---------------------------------------------------------------------

    def set_search_properties(self, metric: Metric, mode: Mode, **spec: Any) -> bool:
        """Set the experiment's metric, mode and seed; as in the base class."""
        super().set_search_properties(metric, mode, **spec)
        self._seed = spec.get("seed", 0)
        return True

    def on_trial_add(self, runner: RunnerLike, trial: TrialLike) -> None:  # noqa: ARG002
        """Draw the trial's bracket; a trial that had ended and continues skips the rungs it passed.

        Raises:
            ConfigError: neither the scheduler nor ``TuneConfig`` names a metric.
        """
        self._places[trial.trial_id] = _RungPosition(self._draw_bracket(trial.number))
        time = lookup(trial.last_result, self._time_attr)
        if time is not None:
            self._reach(trial.trial_id, time)

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
    ) -> Answer:
        """Return STOP at ``max_t``, and at a rung what follows from the comparison."""
        place = self._places.get(trial.trial_id)
        time, measured = lookup(result, self._time_attr), self._measured(result)
        if place is None or time is None:
            return self.CONTINUE
        place.overdue = measured is None
        if measured is None:
            return self.CONTINUE  # Ray waits for the next result that has the metric, too
        if self._stop_last_trials and time >= self._max_t:
            verdict = self._stop(
                trial, f"{self._time_attr} {time:g} has reached max_t {self._max_t:g}"
            )
            actions = self._freed()
            return [verdict, *actions] if actions else verdict
        return self._decide(trial, time, measured)

    def on_trial_complete(
        self,
        runner: RunnerLike,  # noqa: ARG002
        trial: TrialLike,
        result: dict[str, Any],
    ) -> Answer:
        """Record the last value if it reached a rung: later trials are compared with it."""
        time, measured = lookup(result, self._time_attr), self._measured(result)
        if trial.trial_id in self._places and time is not None and measured is not None:
            self._record_last(trial, time, measured)
        self._leave(trial.trial_id)
        return self._freed()

    def on_trial_error(self, runner: RunnerLike, trial: TrialLike) -> Answer:
        """Forget the trial; its recorded values stay."""
        return self.on_trial_remove(runner, trial)

    def on_trial_remove(self, runner: RunnerLike, trial: TrialLike) -> Answer:  # noqa: ARG002
        """Forget the trial; its recorded values stay."""
        self._leave(trial.trial_id)
        return self._freed()

    def on_trial_restart(self, runner: RunnerLike, trial: TrialLike) -> None:  # noqa: ARG002
        """Forget the trial's recorded values."""
        for rung in self._rungs():
            rung.forget(trial.trial_id)

    def horizon(self, trial: TrialLike) -> Horizon | None:
        """Return the trial's next rung, else ``max_t``."""
        if not decides_as(self, AsynchronousHalving):
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

    # --- state ------------------------------------------------------------------------------------

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
            ConfigError: the rungs differ from these.
        """
        mine = [[rung.milestone for rung in rungs] for rungs in self._brackets]
        theirs = [[values[0] for values in rungs] for rungs in state["brackets"]]
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


class _RungPosition:
    """The position of a live trial: its bracket, and the first rung that it has not reached.

    ``overdue``: it reached a rung with a result that lacked the metric.
    """

    __slots__ = ("bracket", "next_rung", "overdue")

    def __init__(self, bracket: int, next_rung: int = 0, overdue: bool = False) -> None:
        self.bracket, self.next_rung, self.overdue = bracket, next_rung, overdue


def _milestones(first: float, last: float, factor: float, skipped: int) -> list[float]:
    milestones: list[float] = []
    milestone = first * factor**skipped
    while milestone <= last:
        milestones.append(milestone)
        milestone = first * factor ** (skipped + len(milestones))
    return milestones


def _check(
    who: str, max_t: float, grace_period: float, reduction_factor: float, brackets: int
) -> None:
    positive = {"max_t": max_t, "grace_period": grace_period, "reduction_factor": reduction_factor}
    for name, value in positive.items():
        if not is_real(value) or not 0 < value < math.inf:
            raise ConfigError(f"{who}({name}={value!r}): a number above 0 is needed.")
    if reduction_factor <= 1:
        raise ConfigError(
            f"{who}(reduction_factor={reduction_factor!r}): it must be above 1; "
            "4 lets the best quarter continue."
        )
    if grace_period > max_t:
        raise ConfigError(
            f"{who}(grace_period={grace_period!r}, max_t={max_t!r}): "
            "grace_period must not be above max_t."
        )
    check_count(who, "brackets", brackets, least=1)
