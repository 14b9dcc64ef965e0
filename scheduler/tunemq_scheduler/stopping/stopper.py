"""`Stopper` and its subclasses, and the values of ``RunConfig(stop=...)``.

A dict of criteria becomes conditions that the trial process checks itself, so that a trial stops
at the exact step without a round trip. The experiment's loop asks every other `Stopper`.
"""

from __future__ import annotations

import datetime as dt
import inspect
import math
import numbers
import time
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Mapping
from typing import Any

from tunemq_scheduler.search.algorithm_states import Stateful, Stateless, state_of
from tunemq_scheduler.search.objective import check_count, is_real
from tunemq_shared.base.errors import ConfigError
from tunemq_shared.protocol.result_conditions import (
    TO_THE_END,
    TRAINING_ITERATION,
    Condition,
    Horizon,
    first_that_holds,
    lookup,
)


class Stopper(Stateful, ABC):
    """Base class of stoppers: decide when a trial, or the whole experiment, has run long enough.

    **Threads.** One thread at a time calls it.

    **Order.** The loop asks a stopper about a trial's results in the journal's order. It calls
    `stop_all` in each turn, after the results of that turn: at least once a second while there are
    trials. A failed trial that `Tuner.restore` starts from scratch has new results under its old
    ID; `on_trial_restart` comes before them. `on_trial_complete` shows each trial's last result;
    one that a trial calls its last is shown only there.

    **Horizon.** As for trial schedulers: a stopper that declares a horizon must be asked only about
    results that reach it. It may be asked about others, too.

    **Answers are journalled.** After a restart a stopper receives the results again, in the order
    of the journal; its answers are then ignored.

    **Reasons.** A stopper may set `reason` before it answers True: what it compared, with the
    numbers. It is journalled and shown.

    Attributes:
        reason (str): why it answered True last; empty if it does not say.

    Example:
        >>> from tunemq import RunConfig, Stopper
        >>> class StopOnNan(Stopper):
        ...     reason = "the loss is not a number"
        ...     def __call__(self, trial_id, result):
        ...         return result["loss"] != result["loss"]
        ...     def stop_all(self):
        ...         return False
        >>> StopOnNan()("trial_1", {"loss": float("nan")})
        True
        >>> run_config = RunConfig(stop=StopOnNan())
    """

    # A class attribute, so that a subclass that forgets super().__init__() works, too.
    reason: str = ""

    @abstractmethod
    def __call__(self, trial_id: str, result: dict[str, Any]) -> bool:
        """Return whether the trial should stop after this result.

        Args:
            trial_id (str): the trial's ID.
            result (dict): the reported metrics and the automatic keys; do not change it.
        """

    @abstractmethod
    def stop_all(self) -> bool:
        """Return whether the whole experiment should stop; once True, always True.

        It may become False again in `on_trial_restart`.
        """

    def on_trial_complete(self, trial_id: str, result: dict[str, Any]) -> None:
        """Called when a trial ended, also in ERROR or by a decision.

        Args:
            trial_id (str): the trial's ID.
            result (dict): its last result; empty if it reported none. Do not change it.
        """

    def on_trial_restart(self, trial_id: str) -> None:
        """Called when a failed trial starts from scratch: forget all results that it reported."""

    def horizon(self, trial_id: str) -> Horizon | None:  # noqa: ARG002
        """Return the results of the trial about which the stopper must be asked.

        Returns:
            None, the default: the next result. ``()``: none. Conditions: the first result for which
                one
            of them holds.
        """
        return None


class NoopStopper(Stateless, Stopper):
    """Stopper that stops nothing."""

    def __call__(self, trial_id: str, result: dict[str, Any]) -> bool:  # noqa: ARG002
        """Return False."""
        return False

    def stop_all(self) -> bool:
        """Return False."""
        return False

    def horizon(self, trial_id: str) -> Horizon | None:  # noqa: ARG002
        """Return ``()``: never ask. A subclass with its own ``__call__`` is always asked."""
        return TO_THE_END if type(self).__call__ is NoopStopper.__call__ else None


class ConditionStopper(Stateless, Stopper):
    """Stop a trial when its result fulfils one of some conditions.

    Args:
        *conditions: the conditions, in the form that trial processes check.
    """

    def __init__(self, *conditions: Condition) -> None:
        self.conditions = conditions

    def __call__(self, trial_id: str, result: dict[str, Any]) -> bool:  # noqa: ARG002
        """Return whether one of the conditions holds."""
        held = first_that_holds(self.conditions, result)
        if held is not None:
            self.reason = f"{held.key} {lookup(result, held.key):g} has reached {held.bound:g}"
        return held is not None

    def stop_all(self) -> bool:
        """Return False."""
        return False

    def horizon(self, trial_id: str) -> Horizon | None:  # noqa: ARG002
        """Return the conditions."""
        return self.conditions if type(self).__call__ is ConditionStopper.__call__ else None


class MaximumIterationStopper(ConditionStopper):
    """Stop a trial at its ``max_iter``-th result.

    Args:
        max_iter: the number of results, at least 1.
    """

    def __init__(self, max_iter: int) -> None:
        check_count("MaximumIterationStopper", "max_iter", max_iter, least=1)
        super().__init__(Condition(TRAINING_ITERATION, max_iter))


class FunctionStopper(Stopper):
    """Stop a trial when a function returns a true value.

    A function that remembers results does not learn that a trial restarts: write a `Stopper` for
    that.

    Args:
        function: called as ``function(trial_id, result)``.
    """

    def __init__(self, function: Callable[[str, dict[str, Any]], bool]) -> None:
        _check_function(function)
        self._function = function
        name = getattr(function, "__qualname__", type(function).__qualname__)
        self.reason = f"{name}(trial_id, result) is true"

    def __call__(self, trial_id: str, result: dict[str, Any]) -> bool:
        """Return the function's answer."""
        return bool(self._function(trial_id, result))

    def stop_all(self) -> bool:
        """Return False."""
        return False


class TimeoutStopper(Stateless, Stopper):
    """Stop the experiment some time after the first call of `stop_all`.

    The time counts from zero again in each process; ``TuneConfig(time_budget_s=...)`` counts over
    restarts.

    Args:
        timeout: seconds, or a `datetime.timedelta`.
    """

    def __init__(self, timeout: float | dt.timedelta) -> None:
        seconds = timeout.total_seconds() if isinstance(timeout, dt.timedelta) else timeout
        check_positive("TimeoutStopper(timeout)", seconds)
        self._seconds = seconds
        self._since: float | None = None
        self.reason = f"{seconds:g} s have passed"

    def __call__(self, trial_id: str, result: dict[str, Any]) -> bool:  # noqa: ARG002
        """Return False: it stops all trials together."""
        return False

    def stop_all(self) -> bool:
        """Return whether the time has passed."""
        now = time.monotonic()
        if self._since is None:
            self._since = now
        return now - self._since >= self._seconds

    def horizon(self, trial_id: str) -> Horizon | None:  # noqa: ARG002
        """Return ``()``: never ask about a result."""
        return TO_THE_END


class CombinedStopper(Stopper):
    """Stop a trial, or the experiment, when one of several stoppers does.

    Args:
        *stoppers: the stoppers. All are asked about every result, so that each sees all results.
    """

    def __init__(self, *stoppers: Stopper) -> None:
        for stopper in stoppers:
            if not isinstance(stopper, Stopper):
                raise ConfigError(f"CombinedStopper({stopper!r}): a Stopper is needed.")
        self.stoppers = stoppers
        #: The stopper that answered True last.
        self.deciding: Stopper | None = None

    def __call__(self, trial_id: str, result: dict[str, Any]) -> bool:
        """Return whether one of the stoppers stops the trial."""
        return self._any([stopper(trial_id, result) for stopper in self.stoppers])

    def stop_all(self) -> bool:
        """Return whether one of the stoppers stops the experiment."""
        return self._any([stopper.stop_all() for stopper in self.stoppers])

    def _any(self, answers: Iterable[bool]) -> bool:
        """Note the first stopper that answered True; return whether there is one."""
        answered = zip(self.stoppers, answers, strict=True)
        self.deciding = next((one for one, answer in answered if answer), None)
        return self.deciding is not None

    def on_trial_complete(self, trial_id: str, result: dict[str, Any]) -> None:
        """Tell all stoppers."""
        for stopper in self.stoppers:
            stopper.on_trial_complete(trial_id, result)

    def on_trial_restart(self, trial_id: str) -> None:
        """Tell all stoppers."""
        for stopper in self.stoppers:
            stopper.on_trial_restart(trial_id)

    def horizon(self, trial_id: str) -> Horizon | None:
        """Return all conditions of all stoppers; None if one of them has no horizon."""
        conditions: list[Condition] = []
        for stopper in self.stoppers:
            horizon = stopper.horizon(trial_id)
            if horizon is None:
                return None
            conditions.extend(horizon)
        return tuple(conditions)

    def get_state(self) -> dict[str, Any] | None:
        """Return the states of all stoppers; None if one of them offers none."""
        states = [state_of(stopper) for stopper in self.stoppers]
        return None if None in states else {"stoppers": states}

    def set_state(self, state: dict[str, Any]) -> None:
        """Restore the states that `get_state` returned.

        Raises:
            ConfigError: the number of stoppers differs.
        """
        if len(state["stoppers"]) != len(self.stoppers):
            raise ConfigError(
                f"there are {len(self.stoppers)} stoppers now and there were "
                f"{len(state['stoppers'])}; resume with the same."
            )
        for stopper, its_state in zip(self.stoppers, state["stoppers"], strict=True):
            stopper.set_state(its_state)


def reason_of(stopper: Stopper, what: str) -> str:
    """Return why a stopper answered True; ``what`` it stopped if it does not say."""
    if isinstance(stopper, CombinedStopper) and stopper.deciding is not None:
        return reason_of(stopper.deciding, what)
    name, reason = type(stopper).__name__, stopper.reason
    # A user's stopper may have a method of that name.
    return f"{name}: {reason}" if isinstance(reason, str) and reason else f"{name} stopped {what}"


# --- RunConfig(stop=...) ---------------------------------------------------------


def make_stopping(stop: Any) -> tuple[tuple[Condition, ...], Stopper | None]:
    """Split a stop setting into conditions for trial processes and a stopper for the loop.

    Args:
        stop: None; a dict of criteria, ``{"training_iteration": 10, "info/loss": 3}``, of which the
            first that is reached (``>=``) stops the trial; a `Stopper`; a function of ``(trial_id,
            result)``; or a list of any of these.

    Returns:
        The conditions, and the stopper or None.

    Raises:
        ConfigError: ``stop`` is none of these, or a criterion is not a number.
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
        conditions.extend(stop.conditions)  # trial processes can check these
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
    """Check that a value is a number above 0.

    Raises:
        ConfigError: it is not; the message names ``what``.
    """
    if not is_real(value) or not value > 0:
        raise ConfigError(f"{what} is {value!r}; it must be a number above 0.")


def read_metric(result: Mapping[str, Any], metric: str) -> float:
    """Return a metric as a float; NaN if it is missing or not a number."""
    try:
        return float(lookup(result, metric))
    except (TypeError, ValueError):
        return math.nan
