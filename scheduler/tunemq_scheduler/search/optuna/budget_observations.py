"""`BudgetObservations`: the values of trials at each budget, and which budget has the model.

A budget is a ``training_iteration`` at which trials are compared. No scheduler names its budgets:
an iteration becomes one when the first trial is paused or ends there. From then on each trial that
reaches it counts, even if that trial continues at once.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

#: A training iteration, and the value of the metric there; None if it is missing or not finite.
Progress = tuple[int, float | None]


class BudgetObservations:
    """Observations by budget.

    The model uses the largest budget with enough observations. It never returns to a smaller one,
    so observations at smaller budgets are dropped.

    Args:
        enough: the number of observations that a model needs.
    """

    def __init__(self, enough: int) -> None:
        self._enough = enough
        self._model: int | None = None
        self._newest: dict[str, Progress] = {}
        self._observed: dict[int, dict[str, float]] = {}

    @property
    def model_budget(self) -> int | None:
        """The budget of the model; None as long as no budget has enough observations."""
        return self._model

    @property
    def at_model(self) -> Mapping[str, float]:
        """The value of each trial that was observed at the budget of the model."""
        return {} if self._model is None else self._observed[self._model]

    def is_observed(self, trial: str) -> bool:
        """Return whether a trial was observed at the budget of the model, or at a larger one."""
        return any(trial in values for values in self._observed.values())

    def report(self, trial: str, step: int, value: float | None) -> bool:
        """Record a result; return whether it is a new observation for the model."""
        self._newest[trial] = (step, value)
        return step in self._observed and self._observe(trial, step, value)

    def compare(self, trial: str) -> bool:
        """Make a budget of the iteration of a trial's newest result, as it is compared there.

        Returns:
            Whether the result is a new observation for the model.
        """
        if trial not in self._newest:
            return False
        step, value = self._newest[trial]
        if self._model is not None and step < self._model:
            return False
        self._observed.setdefault(step, {})
        return self._observe(trial, step, value)

    def end(self, trial: str) -> None:
        """Forget the progress of a trial that has ended; its observations stay."""
        self._newest.pop(trial, None)

    def _observe(self, trial: str, step: int, value: float | None) -> bool:
        values = self._observed[step]
        if value is None or values.get(trial) == value:
            return False
        values[trial] = value
        if len(values) >= self._enough:
            self._model = step
            self._observed = {
                budget: found for budget, found in self._observed.items() if budget >= step
            }
        return step == self._model

    def get_state(self) -> dict[str, Any]:
        """Return the state as JSON values."""
        return {
            "model": self._model,
            "newest": {trial: list(progress) for trial, progress in self._newest.items()},
            "observed": [[budget, dict(values)] for budget, values in self._observed.items()],
        }

    def set_state(self, state: dict[str, Any]) -> None:
        """Restore the state that `get_state` returned."""
        self._model = state["model"]
        self._newest = {trial: (step, value) for trial, (step, value) in state["newest"].items()}
        self._observed = {budget: dict(values) for budget, values in state["observed"]}
