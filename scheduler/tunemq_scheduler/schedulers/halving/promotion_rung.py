"""`PromotionRung`: a rung at which trials wait until they are among the best."""

from __future__ import annotations

import math
from typing import Any

from tunemq_scheduler.schedulers.halving.rung import Rung
from tunemq_scheduler.schedulers.sorted_values import SortedValues

_SLACK = 1e-9


class PromotionRung(Rung):
    """A rung of which ``keep`` of all recorded trials may be promoted.

    The rank of a waiting trial is among all values that were recorded, also those of trials that
    have been promoted or have ended.
    """

    __slots__ = ("_keep", "_waiting")

    def __init__(self, milestone: float, keep: float) -> None:
        super().__init__(milestone, keep)
        self._keep = keep
        #: The value of each waiting trial, and the trial; the best is last.
        self._waiting = SortedValues[tuple[float, str]]()

    @property
    def waiting(self) -> list[str]:
        """The waiting trials, the best first."""
        return [trial for _, trial in reversed(list(self._waiting))]

    @property
    def most_promoted(self) -> int:
        """How many of the recorded trials may be promoted."""
        return int(self.count * self._keep + _SLACK)

    def rank(self, trial: str) -> int:
        """Return the rank of a recorded trial, from 1; a better one has a lower rank."""
        value = self.ranked_value(trial)
        worst = -math.inf if value is None else value
        return len(self.values) - self.values.up_to(worst) + 1

    def is_best(self, trial: str) -> bool:
        """Whether a trial has a finite value that is among the best of all."""
        value = self.ranked_value(trial)
        is_finite = value is not None and math.isfinite(value)
        return is_finite and self.rank(trial) <= self.most_promoted

    def wait(self, trial: str, value: float | None) -> None:
        """Record a trial that waits here."""
        self.record(trial, value)
        self._waiting.add((-math.inf if value is None else value, trial))

    def best_waiting(self) -> str | None:
        """Return the best waiting trial if it is among the best of all."""
        if not self._waiting:
            return None
        _, trial = self._waiting[-1]
        return trial if self.is_best(trial) else None

    def leave(self, trial: str) -> None:
        """Let a trial wait no longer; its value stays."""
        value = self._by_trial.get(trial)
        self._waiting.remove((-math.inf if value is None else value, trial))

    def forget(self, trial: str) -> None:
        """Remove the trial and its value."""
        self.leave(trial)
        super().forget(trial)

    def get_state(self) -> list[Any]:
        """Return the state as JSON values."""
        return [*super().get_state(), [list(one) for one in self._waiting]]

    def set_state(self, state: list[Any]) -> None:
        """Restore the state that `get_state` returned."""
        super().set_state(state)
        self._waiting = SortedValues((value, trial) for value, trial in state[2])
