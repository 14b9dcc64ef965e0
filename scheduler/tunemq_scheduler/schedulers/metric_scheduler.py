"""`MetricScheduler`: the base class of schedulers that compare trials by one metric."""

from __future__ import annotations

from typing import Any

from tunemq_scheduler.schedulers.decisions import Answer
from tunemq_scheduler.schedulers.trial_scheduler import RunnerLike, TrialLike, TrialScheduler
from tunemq_scheduler.search.objective import Metric, Mode, check_objective, need_objective
from tunemq_shared.base.errors import ConfigError


class MetricScheduler(TrialScheduler):
    """Compares trials by one metric, at their progress.

    Args:
        time_attr: the result key that measures progress; its values grow.
        metric: the result key to compare; None for ``TuneConfig``'s.
        mode: ``min`` or ``max``.

    Raises:
        ConfigError: metric or mode is invalid.
    """

    def __init__(self, time_attr: str, metric: str | None, mode: str | None) -> None:
        check_objective(type(self).__name__, metric, mode)
        self._metric: Metric = metric
        self._mode: Mode = mode
        self._time_attr = time_attr
        #: The metric, once it is known; and the sign with which larger is better.
        self._name = ""
        self._sign = 1.0

    def set_search_properties(self, metric: Metric, mode: Mode, **spec: Any) -> bool:
        """Set the experiment's metric and mode.

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
        return True

    def on_trial_complete(
        self,
        runner: RunnerLike,
        trial: TrialLike,
        result: dict[str, Any],  # noqa: ARG002
    ) -> Answer:
        """As `on_trial_remove`."""
        return self.on_trial_remove(runner, trial)

    def on_trial_error(self, runner: RunnerLike, trial: TrialLike) -> Answer:
        """As `on_trial_remove`."""
        return self.on_trial_remove(runner, trial)

    def _need_metric(self) -> None:
        """Raise ConfigError unless the metric is known."""
        need_objective(type(self).__name__, self._metric if self._name else None, self._mode)
