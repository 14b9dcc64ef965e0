"""`kill -9` of a farm's scheduler, and its command again: how long until a new result is recorded.

    python farm_restart.py KILLS

Four trials report every 10 ms, so that the figure is that of the scheduler.
"""

from __future__ import annotations

import sys
import time
from pathlib import Path

from measured import tell
from served_farm import served_farm

SEARCH = """
import time
import tunemq as tune

def train(config):
    while True:
        time.sleep(0.01)
        tune.report({"loss": 1.0})

tuner = tune.Tuner(
    train,
    param_space={"n": tune.grid_search([1, 2, 3, 4])},
    run_config=tune.RunConfig(verbose=0),
)
"""
_TIMEOUT_S = 60.0


def recorded(results: Path) -> int:
    """How many bytes of results there are."""
    return sum(path.stat().st_size for path in results.glob("search/*/result.json"))


def wait_for_more(results: Path, than: int) -> None:
    """Return when more is recorded."""
    deadline = time.monotonic() + _TIMEOUT_S
    while recorded(results) <= than:
        if time.monotonic() > deadline:
            raise TimeoutError("no result is recorded")
        time.sleep(0.002)


def main() -> None:
    """Measure."""
    kills = int(sys.argv[1])
    with served_farm() as farm:
        farm.start(cpus=4)
        farm.submit("search", farm.code("search", SEARCH))
        wait_for_more(farm.results, 10_000)
        times = []
        for _ in range(kills):
            farm.kill_scheduler()
            before, began = recorded(farm.results), time.monotonic()
            farm.start_scheduler()
            wait_for_more(farm.results, before)
            times.append(time.monotonic() - began)
            wait_for_more(farm.results, recorded(farm.results) + 10_000)
        tell({"restart_s": sorted(times)[len(times) // 2]})


if __name__ == "__main__":
    main()
