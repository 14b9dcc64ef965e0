"""A million events of a farm in which everything goes wrong: prints how long that took as JSON.

A thousand trials, audited: each event by itself, and every thousand events the whole state. Ticks
of the clock are not counted.
"""

from __future__ import annotations

import time
from typing import Any

from measured import tell

from tests.simulation.faulty_farms import FaultySearch
from tunemq.testing.simulated_faults import FaultSettings
from tunemq.testing.simulated_uploads import UploadSettings
from tunemq_scheduler.schedulers import FIFOScheduler

TRIALS, RESULTS = 1_000, 330


def search() -> FaultySearch:
    faults = FaultSettings(
        lost=0.02,
        doubled=0.02,
        late=0.05,
        node_deaths=100,
        process_deaths=200,
        cut_offs=100,
        outages=2,
        wipes=5,
        skew_s=3600.0,
        until_s=1_500.0,
    )
    return FaultySearch(
        FIFOScheduler,
        seed=1,
        faults=faults,
        scheduler_deaths=3,
        trials=TRIALS,
        max_t=RESULTS,
        nodes=50,
        cpus=4.0,
        uploads=UploadSettings(upload_s=1.0, unchanged=0.5, lost=0.001, damaged=0.02),
        snapshots=0.0005,
        every=1_000,
    )


def measure() -> dict[str, Any]:
    begin, used = time.perf_counter(), time.process_time()
    run = search().run()
    seconds, busy = time.perf_counter() - begin, time.process_time() - used
    assert run.results() == run.expected()
    return {
        "events": run.events,
        "schedulers": run.lives,
        "events_per_cpu_s": run.events / busy,
        "events_per_s": run.events / seconds,
    }


if __name__ == "__main__":
    tell(measure())
