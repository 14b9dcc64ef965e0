"""`FIFOScheduler`: first in, first out."""

from __future__ import annotations

from typing import Any

from tunemq_scheduler.schedulers.trial_scheduler import (
    RunnerLike,
    TrialLike,
    TrialScheduler,
    decides_as,
)
from tunemq_scheduler.search.algorithm_states import Stateless
from tunemq_scheduler.search.objective import Metric
from tunemq_shared.protocol.result_conditions import TO_THE_END, Horizon


class FIFOScheduler(Stateless, TrialScheduler):
    """Start trials in their order and let each run to its end.

    A subclass that overrides ``on_trial_result`` is asked about every result.
    """

    @property
    def metric(self) -> Metric:
        """None: it uses no metric."""
        return None if decides_as(self, FIFOScheduler) else self._metric

    def on_trial_result(
        self,
        runner: RunnerLike,  # noqa: ARG002
        trial: TrialLike,  # noqa: ARG002
        result: dict[str, Any],  # noqa: ARG002
    ) -> str:
        """Return CONTINUE."""
        return self.CONTINUE

    def horizon(self, trial: TrialLike) -> Horizon | None:  # noqa: ARG002
        """Return ``()``: never ask."""
        return TO_THE_END if decides_as(self, FIFOScheduler) else None

    def debug_string(self) -> str:
        """Return one line about its state, for the terminal."""
        return "Using FIFO scheduling."
