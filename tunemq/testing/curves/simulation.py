"""`Simulation`: what a simulated search did, for reading and plotting."""

from __future__ import annotations

import math
from dataclasses import dataclass, field
from typing import Any, NamedTuple

from tunemq_scheduler.search.objective import is_real
from tunemq_shared.base.errors import ConfigError
from tunemq_shared.protocol.result_conditions import lookup


class SimulatedResult(NamedTuple):
    """One result of a trial.

    Attributes:
        time_s: the virtual time, in seconds.
        worker_s: the worker time that the search had used by then, in seconds.
        trial: the trial's number.
        step: the trial's ``training_iteration``.
        config: the trial's configuration at this step.
        metrics: what its curve returned.
    """

    time_s: float
    worker_s: float
    trial: int
    step: int
    config: dict[str, Any]
    metrics: dict[str, Any]


class SimulatedDecision(NamedTuple):
    """What the trial scheduler or a stopper decided about a trial.

    Attributes:
        time_s: the virtual time, in seconds.
        trial: the trial's number.
        step: the step of the trial's last result.
        action: STOP, PAUSE, RESUME, EXPLOIT, SET_CONFIG or SET_RESOURCES.
        reason: why.
    """

    time_s: float
    trial: int
    step: int
    action: str
    reason: str


class BestPoint(NamedTuple):
    """A moment at which a search found a better value than before.

    Attributes:
        time_s: the virtual time, in seconds.
        worker_s: the worker time used by then, in seconds.
        value: the metric's value.
        trial: the number of the trial.
    """

    time_s: float
    worker_s: float
    value: float
    trial: int


@dataclass
class SimulatedTrial:
    """A trial of a simulated search.

    Attributes:
        number: its place in the search, from 0.
        configs: its configurations in order, each with the step after which it got it.
        status: TERMINATED, or ERROR.
        reason: why it ended.
        step: its last step.
        metrics: those of its last result.
        decisions: what was decided about it, in order.
        worker_s: the worker time that it used, in seconds.
    """

    number: int
    configs: list[tuple[int, dict[str, Any]]] = field(default_factory=list)
    status: str = "PENDING"
    reason: str = ""
    step: int = 0
    metrics: dict[str, Any] = field(default_factory=dict)
    decisions: list[SimulatedDecision] = field(default_factory=list)
    worker_s: float = 0.0

    @property
    def config(self) -> dict[str, Any]:
        """Its last configuration."""
        return self.configs[-1][1]


@dataclass
class Simulation:
    """What a simulated search did.

    Attributes:
        metric: the metric that it optimised; None if it had none.
        mode: ``min`` or ``max``.
        results: all results, in order.
        trials: all trials, by number.
        decisions: all decisions, in order.
        time_s: the virtual time at its end, in seconds.
        worker_s: the worker time that it used, in seconds.
        notices: what the search would have told on the terminal.
    """

    metric: str | None
    mode: str | None
    results: list[SimulatedResult] = field(default_factory=list)
    trials: list[SimulatedTrial] = field(default_factory=list)
    decisions: list[SimulatedDecision] = field(default_factory=list)
    time_s: float = 0.0
    worker_s: float = 0.0
    notices: list[str] = field(default_factory=list)

    def best_over_time(self, metric: str | None = None, mode: str | None = None) -> list[BestPoint]:
        """Return each moment at which a trial reported a better value than all before.

        Args:
            metric: the metric to look at. Default: the one that the search optimised.
            mode: ``min`` or ``max``. Default: the search's mode.

        Raises:
            ConfigError: neither the search nor the caller names a metric.

        Example:
            >>> from tunemq import uniform
            >>> from tunemq.testing import simulate
            >>> search = simulate(
            ...     None,
            ...     None,
            ...     lambda config, step: {"loss": config["x"] / step},
            ...     param_space={"x": uniform(0, 1)},
            ...     metric="loss",
            ...     mode="min",
            ...     num_samples=10,
            ...     stop={"training_iteration": 5},
            ... )
            >>> best = search.best_over_time()
            >>> best[-1].value == min(one.metrics["loss"] for one in search.results)
            True
        """
        metric, mode = metric or self.metric, mode or self.mode
        if metric is None or mode not in {"min", "max"}:
            raise ConfigError(
                f"best_over_time(metric={metric!r}, mode={mode!r}): name a metric of the results, "
                "and 'min' or 'max'."
            )
        sign = 1 if mode == "max" else -1
        best, found = -math.inf, list[BestPoint]()
        for one in self.results:
            value = lookup(one.metrics, metric)
            if is_real(value) and math.isfinite(value) and sign * value > best:
                best = sign * value
                found.append(BestPoint(one.time_s, one.worker_s, float(value), one.trial))
        return found
