"""Look up a key in a reported result, automatic keys included."""

from __future__ import annotations

from typing import Any

from tunemq_shared.protocol.messages import ResultReported
from tunemq_shared.protocol.result_conditions import (
    TRAINING_ITERATION,
    Condition,
    Horizon,
    lookup,
)
from tunemq_shared.trial.results import measured


def value_of(result: ResultReported, key: str) -> Any:
    """Return the value at ``key`` (``a/b`` if nested), or None if there is none."""
    # Nearly all horizons use the step, which needs no dictionary.
    return result.step if key == TRAINING_ITERATION else lookup(measured(result), key)


def reaches(result: ResultReported, horizon: Horizon) -> bool:
    """Whether the result meets any condition of ``horizon``; it never meets an empty horizon."""
    return reached(result, horizon) is not None


def reached(result: ResultReported, horizon: Horizon) -> Condition | None:
    """Return the first condition of ``horizon`` that the result meets, if any."""
    for condition in horizon:
        value = value_of(result, condition.key)
        if value is not None and value >= condition.bound:
            return condition
    return None
