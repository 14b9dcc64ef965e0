"""The cost of a decision of a peer's ASHA."""

from __future__ import annotations

import time
from statistics import median
from types import SimpleNamespace
from typing import Any

#: How many trials have reached the first rung before.
SIZES = (100, 1_000, 5_000)


def asha_decisions_us(ready: Any) -> dict[int, float]:
    """By how many trials have reached the first rung before, the microseconds of a decision there.

    Args:
        ready: makes an ASHA that knows metric and mode, with 100 steps at most, the first rung at
            10, and one trial in three going on.
    """
    return {size: _decision_us(ready(), size) for size in SIZES}


def _decision_us(scheduler: Any, trials: int) -> float:
    result = {"training_iteration": 10, "loss": 0.0}
    taken = []
    for number in range(trials + 200):
        trial = SimpleNamespace(
            trial_id=f"t{number}", number=number, config={}, status="RUNNING", last_result={}
        )
        scheduler.on_trial_add(None, trial)
        result["loss"] = (number * 7919 % 10_007) / 10_007
        begin = time.perf_counter()
        scheduler.on_trial_result(None, trial, result)
        if number >= trials:
            taken.append(time.perf_counter() - begin)
    return median(taken) * 1e6
