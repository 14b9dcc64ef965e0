"""Predicates on a result: stop criteria, and the horizon up to which a trial may run ahead.

A *condition* is ``(key, bound)``: true of a result whose value at ``key`` is at least ``bound``. A
*horizon* is a tuple of conditions of which any one suffices; the empty tuple is the end of the
trial (only its stop criteria end it). The trial process and the scheduler evaluate the same code on
the same numbers, so they agree on the exact step (DESIGN: steps, and running ahead).
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

import msgspec

TRAINING_ITERATION = "training_iteration"


class Condition(msgspec.Struct, frozen=True, array_like=True):
    """True of a result with ``result[key] >= bound``; nested keys are written ``outer/inner``."""

    key: str
    #: The journal keeps an int an int, so that a replay gives equal bytes.
    bound: int | float

    def holds(self, result: Mapping[str, Any]) -> bool:
        """Whether ``result`` has reached the bound; a missing key or NaN has not."""
        value = lookup(result, self.key)
        return value is not None and bool(value >= self.bound)


Horizon = tuple[Condition, ...]

#: Run to the end of the trial without a further decision.
TO_THE_END: Horizon = ()


def next_result(step: int) -> Horizon:
    """The horizon of a trial that needs a decision about every result: the one after ``step``."""
    return (Condition(TRAINING_ITERATION, step + 1),)


def first_that_holds(
    conditions: Iterable[Condition], result: Mapping[str, Any]
) -> Condition | None:
    """The first of ``conditions`` that ``result`` has reached, if any."""
    for condition in conditions:
        if condition.holds(result):
            return condition
    return None


def lookup(result: Mapping[str, Any], key: str) -> Any:
    """``result[key]``, where ``a/b`` also finds ``result["a"]["b"]``; None when there is none."""
    value = result.get(key)
    if value is None and "/" in key and key not in result:
        value = result
        for part in key.split("/"):
            if not isinstance(value, Mapping):
                return None
            value = value.get(part)
    return value
