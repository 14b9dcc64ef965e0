"""The cost of the scheduler's core alone; prints it as a line of JSON.

Searches run on the simulated executor, a backend like any other, without delays.
"""

from __future__ import annotations

import gc
import time
from statistics import median
from typing import Any

import psutil
from asha_decision import SIZES, asha_decisions_us
from measured import tell

from tests.simulation.farm import CountingJournal, Search
from tunemq.testing.simulated_executor import SimulationSettings
from tunemq_scheduler.core.commands import NotifyResult
from tunemq_scheduler.schedulers import ASHAScheduler, FIFOScheduler


def asha() -> ASHAScheduler:
    return ASHAScheduler(max_t=100, grace_period=10, reduction_factor=3)


def simulated(make: Any, *, trials: int, nodes: int, deaths: float = 0.0) -> Search:
    simulation = SimulationSettings(
        nodes=nodes, latency_s=0.1, deaths=deaths, death_window_s=60.0, seed=1
    )
    return Search(make, simulation=simulation, trials=trials, max_t=100, journal=CountingJournal())


def ready_asha() -> ASHAScheduler:
    scheduler = asha()
    scheduler.set_search_properties("loss", "min", seed=1)
    return scheduler


def turn_us(finished: int) -> float:
    """Microseconds for one loop turn that handles one result, with `finished` trials finished."""
    run = simulated(FIFOScheduler, trials=finished + 100, nodes=1)
    while len(run.runner.finished) < finished:
        run.loop.step()
    taken: list[float] = []
    while len(taken) < 500:
        results, begin = run.dispatcher.counts[NotifyResult], time.perf_counter()
        run.loop.step()
        if run.dispatcher.counts[NotifyResult] > results:  # else it was a tick of the clock
            taken.append(time.perf_counter() - begin)
    return median(taken) * 1e6


def bytes_per_finished_trial() -> float:
    """Resident memory that each finished trial leaves, under ASHA."""
    run = simulated(asha, trials=10_000, nodes=100)
    process = psutil.Process()
    while len(run.runner.finished) < 1_000:
        run.loop.step()
    gc.collect()
    before = process.memory_info().rss
    while len(run.runner.finished) < 9_900:
        run.loop.step()
    gc.collect()
    return (process.memory_info().rss - before) / (9_900 - 1_000)


def scale(trials: int) -> tuple[float, float]:
    """A whole search on 1,000 nodes, 1 in 100 dying: its seconds, and the median us an event."""
    run = simulated(asha, trials=trials, nodes=1_000, deaths=0.01)
    begin, taken = time.perf_counter(), []
    while not run.runner.is_finished:
        journal_records, turn = run.journal.journal_records, time.perf_counter()
        run.loop.step()
        taken.append(
            (time.perf_counter() - turn) / max(1, run.journal.journal_records - journal_records)
        )
    return time.perf_counter() - begin, median(taken) * 1e6


def measure() -> dict[str, Any]:
    left = bytes_per_finished_trial()  # first, while no memory is free to be used again
    small, large = scale(1_000), scale(10_000)
    return {
        "asha_us": asha_decisions_us(ready_asha),
        "turn_us": {size: turn_us(size) for size in SIZES},
        "bytes_per_finished_trial": left,
        "scale_s": large[0],
        "event_us": {1_000: small[1], 10_000: large[1]},
    }


if __name__ == "__main__":
    tell(measure())
