"""What a decision of Ray Tune's ASHA costs; prints it as a line of JSON."""

from __future__ import annotations

import json
import time
from statistics import median
from types import SimpleNamespace

from ray.tune.schedulers import ASHAScheduler

MARK = "MEASURED "


def asha_decision_us(trials: int) -> float:
    """A decision at the first rung, which so many trials have reached before."""
    scheduler = ASHAScheduler(max_t=100, grace_period=10, reduction_factor=3)
    scheduler.set_search_properties("loss", "min")
    result = {"training_iteration": 10, "loss": 0.0}
    taken = []
    for number in range(trials + 200):
        trial = SimpleNamespace(trial_id=f"t{number}")
        scheduler.on_trial_add(None, trial)
        result["loss"] = (number * 7919 % 10_007) / 10_007
        begin = time.perf_counter()
        scheduler.on_trial_result(None, trial, result)
        if number >= trials:
            taken.append(time.perf_counter() - begin)
    return median(taken) * 1e6


if __name__ == "__main__":
    figures = {"asha_us": {size: asha_decision_us(size) for size in (100, 1_000, 5_000)}}
    print(MARK + json.dumps(figures), flush=True)
