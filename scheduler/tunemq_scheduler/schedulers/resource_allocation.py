"""How `ResourceChangingScheduler` divides the resources of the nodes among trials."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from typing import Any, Protocol

from tunemq_scheduler.schedulers.trial_scheduler import RunnerLike, TrialLike
from tunemq_scheduler.search.objective import (
    Metric,
    Mode,
    check_objective,
    need_objective,
    read_number,
)
from tunemq_shared.base.errors import ConfigError
from tunemq_shared.trainable.resource_names import GPU
from tunemq_shared.trainable.resources import PlacementGroupFactory

_Amounts = dict[str, float]
#: Sums of amounts such as 0.1 are rounded.
_ROUNDING = 1e-6
#: More units than any node has.
_MOST_UNITS = 1 << 20


class SchedulerLike(Protocol):
    """A `ResourceChangingScheduler` as an allocation function sees it."""

    @property
    def num_trials(self) -> int:
        """The number of trials that have not ended."""
        ...

    @property
    def objective(self) -> tuple[Metric, Mode]:
        """The metric and the mode of the search or of the base scheduler."""
        ...

    def first_resources(self, trial: TrialLike) -> dict[str, float]:
        """Return the request with which a trial began."""
        ...


class DistributeResources:
    """Divide all resources evenly among the trials that have not ended.

    Each trial gets its first request and, beyond it, as many units of ``increase_by`` as all trials
    could have at once if each ran on one node. Trials that wait count, and none grows while the
    search may add further ones. On nodes that other searches share, a trial may have to wait for
    its larger request; ``increase_by_times`` and ``reserve_resources`` limit it.

    Args:
        add_bundles: accepted as in Ray Tune, and makes no difference: bundles are added up.
        increase_by: the unit by which requests grow, such as ``{"cpu": 1}``. Default: one CPU and
            one GPU, of those that the trial requests.
        increase_by_times: the most units for each trial; below 1 means no limit.
        reserve_resources: amounts that are not divided.

    Raises:
        ConfigError: an amount is invalid; the message names it.

    Example:
        >>> from tunemq.schedulers import DistributeResources, ResourceChangingScheduler
        >>> share = DistributeResources(increase_by={"cpu": 2}, reserve_resources={"cpu": 4})
        >>> scheduler = ResourceChangingScheduler(resources_allocation_function=share)
    """

    def __init__(
        self,
        add_bundles: bool = False,  # noqa: ARG002
        increase_by: Mapping[str, float] | None = None,
        increase_by_times: int = -1,
        reserve_resources: Mapping[str, float] | None = None,
    ) -> None:
        who = type(self).__name__
        self._unit = _amounts(who, "increase_by", increase_by)
        self._reserved = _amounts(who, "reserve_resources", reserve_resources)
        if isinstance(increase_by_times, bool) or not isinstance(increase_by_times, int):
            raise ConfigError(
                f"{who}(increase_by_times={increase_by_times!r}) is invalid: give a whole number, "
                "or -1 for no limit."
            )
        self._most = increase_by_times if increase_by_times >= 1 else _MOST_UNITS

    def __call__(
        self,
        runner: RunnerLike,
        trial: TrialLike,
        result: dict[str, Any],  # noqa: ARG002
        scheduler: SchedulerLike,
    ) -> _Amounts | None:
        """Return the request of a trial that has an even share."""
        first, count = scheduler.first_resources(trial), max(1, scheduler.num_trials)
        if runner.expects_trials():
            return first

        def is_possible(request: _Amounts) -> bool:
            together = {name: count * amount for name, amount in request.items()}
            return runner.capacity(request) >= count and self._are_there(runner, together)

        return self._largest(first, is_possible)

    def _are_there(self, runner: RunnerLike, *parts: _Amounts) -> bool:
        """Whether the nodes have these amounts beside the reserved ones."""
        total, parts = runner.total_resources(), (*parts, self._reserved)
        return all(
            sum(part.get(name, 0.0) for part in parts) <= there + _ROUNDING
            for name, there in total.items()
        )

    def _largest(self, first: _Amounts, is_possible: Callable[[_Amounts], bool]) -> _Amounts:
        """Return the largest possible request; the first one if no larger one is possible."""
        unit = self._unit or {name: 1.0 for name in ("cpu", GPU) if name in first}
        if not unit:
            return first
        low, high = 0, 1
        while high <= self._most and is_possible(_grown(first, unit, high)):
            low, high = high, 2 * high
        high = min(high, self._most + 1)
        while high - low > 1:
            middle = (low + high) // 2
            if is_possible(_grown(first, unit, middle)):
                low = middle
            else:
                high = middle
        return _grown(first, unit, low)


class DistributeResourcesToTopJob(DistributeResources):
    """Give the best trial all resources beyond the first requests of the others.

    The best one has the best newest value of the metric. All others get their first requests.

    Args:
        add_bundles: as in `DistributeResources`.
        increase_by: as in `DistributeResources`.
        increase_by_times: as in `DistributeResources`.
        reserve_resources: as in `DistributeResources`.
        metric: the result key to compare. Default: the scheduler's metric.
        mode: ``min`` or ``max``. Default: the scheduler's mode.

    Raises:
        ConfigError: an argument is invalid, or neither it nor the scheduler has a metric and mode.

    Example:
        >>> from tunemq.schedulers import DistributeResourcesToTopJob, ResourceChangingScheduler
        >>> to_the_best = DistributeResourcesToTopJob(metric="loss", mode="min")
        >>> scheduler = ResourceChangingScheduler(resources_allocation_function=to_the_best)
    """

    def __init__(
        self,
        add_bundles: bool = False,
        increase_by: Mapping[str, float] | None = None,
        increase_by_times: int = -1,
        reserve_resources: Mapping[str, float] | None = None,
        metric: str | None = None,
        mode: str | None = None,
    ) -> None:
        super().__init__(add_bundles, increase_by, increase_by_times, reserve_resources)
        check_objective(type(self).__name__, metric, mode)
        self._metric, self._mode = metric, mode

    def __call__(
        self,
        runner: RunnerLike,
        trial: TrialLike,
        result: dict[str, Any],  # noqa: ARG002
        scheduler: SchedulerLike,
    ) -> _Amounts | None:
        """Return the request of a trial, by whether it is the best one.

        Raises:
            ConfigError: there is no metric or no mode.
        """
        metric, mode = self._metric or scheduler.objective[0], self._mode or scheduler.objective[1]
        need_objective(type(self).__name__, metric, mode)
        trials = runner.get_trials()
        is_best = isinstance(metric, str) and _best(trials, metric, mode) == trial.trial_id
        if runner.expects_trials() or not is_best:
            return scheduler.first_resources(trial)
        others: _Amounts = {}
        for one in trials:
            if one.trial_id != trial.trial_id:
                for name, amount in scheduler.first_resources(one).items():
                    others[name] = others.get(name, 0.0) + amount

        def is_possible(request: _Amounts) -> bool:
            return runner.capacity(request) > 0 and self._are_there(runner, request, others)

        return self._largest(scheduler.first_resources(trial), is_possible)


def _best(trials: Sequence[TrialLike], metric: str, mode: Mode) -> str:
    """Return the trial whose newest value is best, of equal ones the first; empty if none has."""
    sign = 1.0 if mode == "max" else -1.0
    scores = [
        (sign * value, -one.number, one.trial_id)
        for one in trials
        if (value := read_number(one.last_result, metric)) is not None
    ]
    return max(scores)[2] if scores else ""


def _grown(first: _Amounts, unit: _Amounts, times: int) -> _Amounts:
    """Return a request with more units; several GPUs are whole ones."""
    grown = {
        name: round(first.get(name, 0.0) + times * unit.get(name, 0.0), 6) for name in first | unit
    }
    if grown.get(GPU, 0.0) > 1:
        grown[GPU] = float(math.ceil(grown[GPU]))
    return grown


def _amounts(who: str, field: str, given: Mapping[str, float] | None) -> _Amounts:
    """Return the amounts of an argument by normalised names.

    Raises:
        ConfigError: one is invalid.
    """
    if not given:
        return {}
    try:
        return PlacementGroupFactory([given]).required_resources
    except ConfigError as error:
        raise ConfigError(f"{who}({field}={given!r}) is invalid: {error}") from error
