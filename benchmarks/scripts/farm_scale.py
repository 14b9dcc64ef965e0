"""A farm of 10,000 GPUs in virtual time: the computation of a supervisor and its experiments.

The scheduler is real except Redis and the processes; see `tests.simulation.large_farm`. Prints
seconds of CPU time by part, and counts of events.
"""

from __future__ import annotations

import gc
import time
from typing import Any

from measured import tell

from tests.simulation.cost_meters import Meter
from tests.simulation.large_farm import LargeFarm

NODES, EXPERIMENTS = 1_250, 40
#: Slots of the preemption that is measured.
URGENT = 64


def stretch(farm: LargeFarm, seconds: float) -> dict[str, Any]:
    """Run for this many virtual seconds; return the cost, the events, and the longest times."""
    farm.start_anew()
    farm.run(seconds)
    meter = farm.meter
    return {
        "virtual_s": seconds,
        "seen": dict(farm.seen + farm.nodes.seen),
        "cpu_s": dict(meter.spent),
        "times": dict(meter.times),
        "worst_s": dict(meter.worst),
    }


def measure() -> dict[str, Any]:
    farm = LargeFarm(NODES, EXPERIMENTS, Meter(time.thread_time))
    try:
        joined = dict(farm.meter.spent)
        filled = stretch(farm, 5.0)
        gc.collect()
        gc.freeze()  # forty processes have no common heap that is looked through
        steady = stretch(farm, 60.0)
        farm.turn_s = 0.1
        batched = stretch(farm, 60.0)
        farm.turn_s = 0.0
        farm.stop(next(iter(farm.experiments.values())))
        farm.submit({"cpu": 1.0, "gpu": 1.0})
        changed = stretch(farm, 5.0)
        farm.submit({"cpu": 1.0, "gpu": 1.0}, priority=1, at_most=URGENT)
        urgent = stretch(farm, 30.0)
        return {
            "gpus": farm.held(),
            "joined": joined,
            "filled": filled,
            "steady": steady,
            "batched": batched,
            "one_goes_one_comes": changed,
            "urgent": urgent,
        }
    finally:
        farm.close()


if __name__ == "__main__":
    tell(measure())
