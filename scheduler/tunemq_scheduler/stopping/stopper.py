"""Stoppers, and what ``RunConfig(stop=...)`` may hold.

A dict of criteria becomes conditions that the host itself watches, so that a trial stops at the
exact step without asking anybody. Everything else is a `Stopper`, which the experiment's loop asks.
"""

from __future__ import annotations

import datetime as dt
import inspect
import math
import numbers
import time
from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping
from typing import Any

from tunemq_scheduler.search.algorithm_states import Stateful, Stateless, state_of
from tunemq_scheduler.search.objective import check_count, is_real
from tunemq_shared.base.errors import ConfigError
from tunemq_shared.protocol.conditions import (
    TO_THE_END,
    TRAINING_ITERATION,
    Condition,
    Horizon,
    first_that_holds,
    lookup,
)


class Stopper(Stateful, ABC):
    """Decides whether a trial, or the whole experiment, has run long enough.

    **Threads.** One thread at a time calls it.

    **Order.** It is asked about a trial's results in the order in which the journal holds them, and
    `stop_all` in each turn of the loop, behind the results of that turn: at least each second while
    there are trials.

    **Horizon.** As with trial schedulers: a stopper that declares a horizon need only be asked
    about results that reach it. It may be asked about others, too.

    **Answers are facts.** They are journalled. After a restart a stopper is told the results again,
    in the journal's order; its answers are then ignored.
    """

    @abstractmethod
    def __call__(self, trial_id: str, result: dict[str, Any]) -> bool:
        """Whether the trial is to stop after this result."""

    @abstractmethod
    def stop_all(self) -> bool:
        """Whether the whole experiment is to stop; once true it stays true."""

    def horizon(self, trial_id: str) -> Horizon | None:  # noqa: ARG002
        """When it must be asked about the trial again: None, the default, about the next result."""
        return None


class NoopStopper(Stateless, Stopper):
    """Stops nothing."""

    def __call__(self, trial_id: str, result: dict[str, Any]) -> bool:  # noqa: ARG002
        """No."""
        return False

    def stop_all(self) -> bool:
        """No."""
        return False

    def horizon(self, trial_id: str) -> Horizon | None:  # noqa: ARG002
        """Never to be asked."""
        return TO_THE_END if type(self).__call__ is NoopStopper.__call__ else None


class ConditionStopper(Stateless, Stopper):
    """Stops a trial when one of some conditions holds of its result.

    Args:
        conditions: as the host watches them.
    """

    def __init__(self, *conditions: Condition) -> None:
        self.conditions = conditions

    def __call__(self, trial_id: str, result: dict[str, Any]) -> bool:  # noqa: ARG002
        """Whether one of the conditions holds."""
        return first_that_holds(self.conditions, result) is not None

    def stop_all(self) -> bool:
        """No."""
        return False

    def horizon(self, trial_id: str) -> Horizon | None:  # noqa: ARG002
        """The conditions."""
        return self.conditions if type(self).__call__ is ConditionStopper.__call__ else None


class MaximumIterationStopper(ConditionStopper):
    """Stops a trial at its ``max_iter``-th result.

    Args:
        max_iter: a positive whole number.
    """

    def __init__(self, max_iter: int) -> None:
        check_count("MaximumIterationStopper", "max_iter", max_iter, least=1)
        super().__init__(Condition(TRAINING_ITERATION, max_iter))


class FunctionStopper(Stopper):
    """Stops a trial when a function says so.

    Args:
        function: called as ``function(trial_id, result)``; a true value stops the trial.
    """

    def __init__(self, function: Callable[[str, dict[str, Any]], bool]) -> None:
        _check_function(function)
        self._function = function

    def __call__(self, trial_id: str, result: dict[str, Any]) -> bool:
        """What the function says."""
        return bool(self._function(trial_id, result))

    def stop_all(self) -> bool:
        """No."""
        return False


class TimeoutStopper(Stateless, Stopper):
    """Stops the experiment after some time, counted from the first question to this stopper.

    It counts the time of this process; ``TuneConfig(time_budget_s=...)`` counts over restarts.

    Args:
        timeout: seconds, or a `datetime.timedelta`.
    """

    def __init__(self, timeout: float | dt.timedelta) -> None:
        seconds = timeout.total_seconds() if isinstance(timeout, dt.timedelta) else timeout
        check_positive("TimeoutStopper(timeout)", seconds)
        self._seconds = seconds
        self._since: float | None = None

    def __call__(self, trial_id: str, result: dict[str, Any]) -> bool:  # noqa: ARG002
        """No; it stops all trials or none."""
        return False

    def stop_all(self) -> bool:
        """Whether the time is over."""
        now = time.monotonic()
        if self._since is None:
            self._since = now
        return now - self._since >= self._seconds

    def horizon(self, trial_id: str) -> Horizon | None:  # noqa: ARG002
        """Never to be asked about a result."""
        return TO_THE_END


class CombinedStopper(Stopper):
    """Stops what any of several stoppers stops.

    Args:
        *stoppers: the stoppers; all are asked about every result, so that each sees all of them.
    """

    def __init__(self, *stoppers: Stopper) -> None:
        for stopper in stoppers:
            if not isinstance(stopper, Stopper):
                raise ConfigError(f"CombinedStopper({stopper!r}): a Stopper is needed.")
        self._stoppers = stoppers

    def __call__(self, trial_id: str, result: dict[str, Any]) -> bool:
        """Whether one of them says so."""
        answers = [stopper(trial_id, result) for stopper in self._stoppers]
        return any(answers)

    def stop_all(self) -> bool:
        """Whether one of them says so."""
        answers = [stopper.stop_all() for stopper in self._stoppers]
        return any(answers)

    def horizon(self, trial_id: str) -> Horizon | None:
        """The nearest of theirs."""
        conditions: list[Condition] = []
        for stopper in self._stoppers:
            horizon = stopper.horizon(trial_id)
            if horizon is None:
                return None
            conditions.extend(horizon)
        return tuple(conditions)

    def get_state(self) -> dict[str, Any] | None:
        """Theirs; None if one of them offers none."""
        states = [state_of(stopper) for stopper in self._stoppers]
        return None if None in states else {"stoppers": states}

    def set_state(self, state: dict[str, Any]) -> None:
        """Take what `get_state` gave.

        Raises:
            ConfigError: there were other stoppers.
        """
        if len(state["stoppers"]) != len(self._stoppers):
            raise ConfigError(
                f"there are {len(self._stoppers)} stoppers now and there were "
                f"{len(state['stoppers'])}; resume with the same."
            )
        for stopper, its_state in zip(self._stoppers, state["stoppers"], strict=True):
            stopper.set_state(its_state)


# --- what users write ------------------------------------------------------------


def make_stopping(stop: Any) -> tuple[tuple[Condition, ...], Stopper | None]:
    """What the host watches by itself, and what the loop asks.

    Args:
        stop: None; a dict of criteria, ``{"training_iteration": 10, "info/loss": 3}``, of which the
            first to be reached (``>=``) stops the trial; a `Stopper`; a function of ``(trial_id,
            result)``; or a list of any of these.

    Raises:
        ConfigError: it is none of these, or a criterion is no number.
    """
    conditions: list[Condition] = []
    stoppers: list[Stopper] = []
    _collect(stop, conditions, stoppers)
    if not stoppers:
        return tuple(conditions), None
    return tuple(conditions), stoppers[0] if len(stoppers) == 1 else CombinedStopper(*stoppers)


def _collect(stop: Any, conditions: list[Condition], stoppers: list[Stopper]) -> None:
    if stop is None:
        return
    if isinstance(stop, list | tuple):
        for one in stop:
            _collect(one, conditions, stoppers)
    elif isinstance(stop, Mapping):
        conditions.extend(_criterion(key, bound) for key, bound in stop.items())
    elif isinstance(stop, ConditionStopper) and stop.horizon("") is not None:
        conditions.extend(stop.conditions)  # the host can watch these
    elif isinstance(stop, Stopper):
        stoppers.append(stop)
    elif isinstance(stop, type) and issubclass(stop, Stopper):
        raise ConfigError(f"stop is the class {stop.__name__}; make one: {stop.__name__}(...).")
    elif callable(stop):
        stoppers.append(FunctionStopper(stop))
    else:
        raise ConfigError(
            f"stop is {stop!r}; it must be a dict such as {{'training_iteration': 10}}, a Stopper, "
            "a function of (trial_id, result), or a list of these."
        )


def _criterion(key: Any, bound: Any) -> Condition:
    if not isinstance(key, str) or not key:
        raise ConfigError(f"stop has the key {key!r}; a criterion's key is the name of a metric.")
    if isinstance(bound, Mapping):
        inner = next(iter(bound), "b")
        raise ConfigError(
            f"stop[{key!r}] is {dict(bound)!r}; write nested keys with a slash: "
            f"{{'{key}/{inner}': ...}}."
        )
    if bound is False or not isinstance(bound, numbers.Real) or math.isnan(bound):
        raise ConfigError(
            f"stop[{key!r}] is {bound!r}; it must be a number, which the metric reaches or exceeds."
        )
    return Condition(key, float(bound))


def _check_function(function: Any) -> None:
    try:
        signature = inspect.signature(function)
    except TypeError:
        raise ConfigError(
            f"stop is {function!r}; a function of (trial_id, result) is needed."
        ) from None
    except ValueError:
        return  # some builtins have no signature
    try:
        signature.bind("trial", {})
    except TypeError:
        raise ConfigError(
            f"stop is {function!r}, which takes {signature}; it is called with (trial_id, result)."
        ) from None


def check_positive(what: str, value: Any) -> None:
    """Refuse what is no number above 0.

    Raises:
        ConfigError: naming ``what``.
    """
    if not is_real(value) or not value > 0:
        raise ConfigError(f"{what} is {value!r}; it must be a number above 0.")


def read_metric(result: Mapping[str, Any], metric: str) -> float:
    """A metric as a number; NaN if it is missing or none."""
    try:
        return float(lookup(result, metric))
    except (TypeError, ValueError):
        return math.nan
