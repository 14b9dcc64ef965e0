"""The value of a key in a reported result, automatic keys included."""

from __future__ import annotations

from typing import Any

from tunemq_shared.protocol.conditions import TRAINING_ITERATION, Horizon, lookup
from tunemq_shared.protocol.messages import ResultReported
from tunemq_shared.trial.results import measured


def value_of(result: ResultReported, key: str) -> Any:
    """The value at ``key`` (``a/b`` for nested ones), None when there is none."""
    # Nearly all horizons are about the step: those need no dictionary.
    return result.step if key == TRAINING_ITERATION else lookup(measured(result), key)


def reaches(result: ResultReported, horizon: Horizon) -> bool:
    """Whether any condition of ``horizon`` is true of the result; the empty horizon never is."""
    for condition in horizon:
        value = value_of(result, condition.key)
        if value is not None and value >= condition.bound:
            return True
    return False
