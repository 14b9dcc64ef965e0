"""Stoppers that end an experiment when a budget is spent, or a target is reached."""

from __future__ import annotations

import math
from typing import Any, Final

from tunemq_scheduler.search.objective import check_count, is_real
from tunemq_scheduler.stopping.stopper import Stopper, check_positive, read_metric
from tunemq_shared.base.errors import ConfigError, SearchFailed
from tunemq_shared.protocol.result_conditions import (
    TO_THE_END,
    TRAINING_ITERATION,
    Condition,
    Horizon,
    lookup,
)
from tunemq_shared.trial.results import LINEAGE

_SECONDS_PER_HOUR: Final = 3600.0


class MaximumTrialsStopper(Stopper):
    """Stop the experiment when a number of trials have ended.

    All trials count, whether they came to their end, were stopped early, or failed. Trials that
    still run then are stopped. It gives an endless search (``num_samples=-1``) an end. A failed
    trial that starts from scratch counts when it ends again.

    Args:
        max_num_trials_finished (int): the number of trials, at least 1 (Syne Tune's name).

    Raises:
        ConfigError: the number is invalid.

    Example:
        >>> from tunemq import RunConfig
        >>> from tunemq.stopper import MaximumTrialsStopper
        >>> run_config = RunConfig(stop=MaximumTrialsStopper(100))
    """

    def __init__(self, max_num_trials_finished: int) -> None:
        check_count(
            "MaximumTrialsStopper", "max_num_trials_finished", max_num_trials_finished, least=1
        )
        self._most = max_num_trials_finished
        self._ended: set[str] = set()

    def __call__(self, trial_id: str, result: dict[str, Any]) -> bool:  # noqa: ARG002
        """Return False: it stops all trials together."""
        return False

    def stop_all(self) -> bool:
        """Return whether enough trials have ended."""
        self.reason = f"{len(self._ended)} trials have ended, and {self._most} are the most"
        return len(self._ended) >= self._most

    def on_trial_complete(self, trial_id: str, result: dict[str, Any]) -> None:  # noqa: ARG002
        """Count the trial."""
        self._ended.add(trial_id)

    def on_trial_restart(self, trial_id: str) -> None:
        """Count the trial no longer."""
        self._ended.discard(trial_id)

    def horizon(self, trial_id: str) -> Horizon | None:  # noqa: ARG002
        """Return ``()``: never ask about a result."""
        return TO_THE_END

    def get_state(self) -> dict[str, Any]:
        """Return the trials that ended."""
        return {"ended": sorted(self._ended)}

    def set_state(self, state: dict[str, Any]) -> None:
        """Restore the state that `get_state` returned."""
        self._ended = set(state["ended"])


class _BudgetStopper(Stopper):
    """Stops the experiment when the sum of all trials' cumulative values reaches a budget.

    A value below the trial's last one counts in full: the trial began to count from 0 again, as one
    without checkpoints does after a failure. A result that is repeated counts once. The first
    result of a trial that continues from the state of another counts nothing.

    Args:
        budget: the sum at which the experiment stops.
        key: the result key of the cumulative value.
    """

    def __init__(self, budget: float, key: str) -> None:
        self._budget, self._key = budget, key
        self._spent = 0.0
        #: The lineage, the step and the value of each trial's last result.
        self._last: dict[str, tuple[int, float, float]] = {}

    def __call__(self, trial_id: str, result: dict[str, Any]) -> bool:
        """Return False: it stops all trials together.

        Raises:
            SearchFailed: a trial has never reported the value, so that the budget has no effect.
        """
        self._add(trial_id, result)
        if trial_id not in self._last:
            raise SearchFailed(
                f"{type(self).__name__} cannot add up {self._key!r}: trial {trial_id} reported "
                f"{lookup(result, self._key)!r}. Report a number of at least 0 with each result."
            )
        return False

    def _add(self, trial_id: str, result: dict[str, Any]) -> None:
        value = read_metric(result, self._key)
        if not 0 <= value < math.inf:
            return
        lineage = result.get(LINEAGE, 0)
        last_lineage, last_step, last = self._last.get(trial_id, (lineage, -1, 0.0))
        step = result.get(TRAINING_ITERATION, last_step + 1)
        if lineage != last_lineage:  # from here on it counts from the value of another trial
            self._last[trial_id] = (lineage, step, value)
        elif step > last_step:
            self._spent += value - last if value >= last else value
            self._last[trial_id] = (lineage, step, value)

    def stop_all(self) -> bool:
        """Return whether the budget is spent."""
        if self._spent < self._budget:
            return False
        self.reason = (
            f"the sum of {self._key} over all trials, {self._spent:g}, has reached {self._budget:g}"
        )
        return True

    def on_trial_complete(self, trial_id: str, result: dict[str, Any]) -> None:
        """Add the value of the trial's last result."""
        self._add(trial_id, result)

    def on_trial_restart(self, trial_id: str) -> None:
        """Expect the trial to count from 0 again; what it spent stays spent."""
        self._last.pop(trial_id, None)

    def get_state(self) -> dict[str, Any]:
        """Return the sum, and the lineage, step and value of each trial's last result."""
        return {"spent": self._spent, "last": {name: list(one) for name, one in self._last.items()}}

    def set_state(self, state: dict[str, Any]) -> None:
        """Restore the state that `get_state` returned."""
        self._spent = state["spent"]
        self._last = {trial: (one[0], one[1], one[2]) for trial, one in state["last"].items()}


class CostStopper(_BudgetStopper):
    """Stop the experiment when all trials together have cost as much as a budget.

    Each trial reports what it has cost so far, in any unit; only growth counts. A value below the
    last one counts in full, as of a trial that counts from 0 again. A failed trial that starts from
    scratch does not give back what it spent. Each trial waits for an answer after each result, as
    with any stopper that must see all results.

    Args:
        max_cost (float): the budget, above 0, in the unit of ``cost_attr`` (Syne Tune's name).
        cost_attr (str): the result key of a trial's cost so far.

    Raises:
        ConfigError: an argument is invalid.

    Example:
        >>> from tunemq import RunConfig
        >>> from tunemq.stopper import CostStopper
        >>> run_config = RunConfig(stop=CostStopper(25.0, cost_attr="dollars"))
    """

    def __init__(self, max_cost: float, cost_attr: str) -> None:
        _check_budget("CostStopper", "max_cost", max_cost)
        if not isinstance(cost_attr, str) or not cost_attr:
            raise ConfigError(
                f"CostStopper(cost_attr={cost_attr!r}): pass the result key of a trial's cost."
            )
        super().__init__(max_cost, cost_attr)


class GPUHoursStopper(_BudgetStopper):
    """Stop the experiment when all trials together have used a number of GPU hours.

    A trial's time is the ``time_total_s`` of its last result. It leaves out work that a failed
    trial repeats, the start of its process, and the time for which it is paused. Each trial waits
    for an answer after each result, as with any stopper that must see all results.

    Args:
        max_gpu_hours (float): the budget in GPU hours, above 0.
        gpus_per_trial (float): the GPUs of each trial, as in its resources; may be below 1.

    Raises:
        ConfigError: an argument is invalid.

    Example:
        >>> from tunemq import RunConfig
        >>> from tunemq.stopper import GPUHoursStopper
        >>> run_config = RunConfig(stop=GPUHoursStopper(48, gpus_per_trial=0.5))
    """

    def __init__(self, max_gpu_hours: float, gpus_per_trial: float = 1.0) -> None:
        _check_budget("GPUHoursStopper", "max_gpu_hours", max_gpu_hours)
        _check_budget("GPUHoursStopper", "gpus_per_trial", gpus_per_trial)
        super().__init__(max_gpu_hours * _SECONDS_PER_HOUR / gpus_per_trial, "time_total_s")


class TargetStopper(Stopper):
    """Stop the experiment when a trial's metric reaches a target.

    With the mode ``max`` trials run on without waiting for an answer until they reach it.

    Args:
        metric (str): the result key.
        target (float): the value to reach; an equal value reaches it.
        mode (str): ``min`` if values up to the target reach it, ``max`` if values from it on.

    Raises:
        ConfigError: an argument is invalid.

    Example:
        >>> from tunemq import RunConfig
        >>> from tunemq.stopper import TargetStopper
        >>> run_config = RunConfig(stop=[TargetStopper("accuracy", 0.99, "max"), {"epoch": 50}])
    """

    def __init__(self, metric: str, target: float, mode: str) -> None:
        if not isinstance(metric, str) or not metric:
            raise ConfigError(f"TargetStopper(metric={metric!r}): pass the name of a result key.")
        if not is_real(target) or not math.isfinite(target):
            raise ConfigError(f"TargetStopper(target={target!r}): pass a finite number.")
        if mode not in ("min", "max"):
            raise ConfigError(f"TargetStopper(mode={mode!r}): pass 'min' or 'max'.")
        self._metric, self._target, self._mode = metric, target, mode
        #: The values with which trials reached the target.
        self._there: dict[str, float] = {}

    def __call__(self, trial_id: str, result: dict[str, Any]) -> bool:
        """Return whether the trial has reached the target."""
        value = read_metric(result, self._metric)  # NaN reaches nothing
        is_there = self._reaches(value)
        if is_there:
            self._there[trial_id] = value
            self._explain(trial_id)
        return is_there

    def _explain(self, trial_id: str) -> None:
        self.reason = (
            f"{self._metric} {self._there[trial_id]:g} of trial {trial_id} has reached the target "
            f"{self._target:g}"
        )

    def _reaches(self, value: float) -> bool:
        return value <= self._target if self._mode == "min" else value >= self._target

    def stop_all(self) -> bool:
        """Return whether a trial has reached the target."""
        for trial_id in self._there:
            self._explain(trial_id)
            return True
        return False

    def on_trial_complete(self, trial_id: str, result: dict[str, Any]) -> None:
        """Check the trial's last result."""
        self(trial_id, result)

    def on_trial_restart(self, trial_id: str) -> None:
        """Forget that the trial reached the target."""
        self._there.pop(trial_id, None)

    def horizon(self, trial_id: str) -> Horizon | None:  # noqa: ARG002
        """Return the target with the mode ``max``; else ask about the next result."""
        if self._mode == "min" or type(self).__call__ is not TargetStopper.__call__:
            return None
        return (Condition(self._metric, self._target),)

    def get_state(self) -> dict[str, Any]:
        """Return the values with which trials reached the target."""
        return {"there": self._there}

    def set_state(self, state: dict[str, Any]) -> None:
        """Restore the state that `get_state` returned; the target may differ."""
        there = state["there"].items()
        self._there = {trial: value for trial, value in there if self._reaches(value)}


def _check_budget(who: str, name: str, value: Any) -> None:
    """Check that a value is a finite number above 0.

    Raises:
        ConfigError: it is not; the message names ``who``, ``name`` and the value.
    """
    check_positive(f"{who}({name})", value)
    if not math.isfinite(value):
        raise ConfigError(f"{who}({name}={value!r}): pass a finite number; leave it out for none.")
