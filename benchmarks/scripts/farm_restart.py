"""`kill -9` of a farm's scheduler, and its command again: how long until a new result is recorded.

    python farm_restart.py KILLS

Two workers run four trials that report every 10 ms, so that the figure is that of the scheduler.
"""

from __future__ import annotations

import os
import subprocess
import sys
import tempfile
import time
from pathlib import Path

from measured import tell

from tunemq_scheduler.embedded.redis_server import find_redis_server, redis_command

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
    run_config=tune.RunConfig(name="search", verbose=0),
)
"""
_PATIENCE_S = 60.0


def recorded(results: Path) -> int:
    """How many bytes of results there are."""
    return sum(path.stat().st_size for path in results.glob("search/*/result.json"))


def wait_for_more(results: Path, than: int) -> None:
    """Return when more is recorded."""
    deadline = time.monotonic() + _PATIENCE_S
    while recorded(results) <= than:
        if time.monotonic() > deadline:
            raise TimeoutError("no result is recorded")
        time.sleep(0.002)


def main() -> None:
    """Measure."""
    kills = int(sys.argv[1])
    with tempfile.TemporaryDirectory(prefix="bench-") as name:
        folder, url = Path(name), f"unix://{name}/redis"
        results = folder / "results"
        (folder / "search.py").write_text(SEARCH)
        running: list[subprocess.Popen[bytes]] = []

        def start(*command: str) -> subprocess.Popen[bytes]:
            running.append(
                subprocess.Popen(
                    command, cwd=folder, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL
                )
            )
            return running[-1]

        def schedule() -> subprocess.Popen[bytes]:
            line = ("scheduler", "--redis", url, "--results", str(results), "search.py")
            return start(sys.executable, "-m", "tunemq", *line)

        try:
            start(*redis_command(find_redis_server(), f"{name}/redis"))
            for worker in ("one", "two"):
                line = ("worker", "--redis", url, "--name", worker, "--cpus", "2")
                start(
                    sys.executable, "-m", "tunemq", *line, "--workdir", os.path.join(name, worker)
                )
            scheduler = schedule()
            wait_for_more(results, 10_000)
            times = []
            for _ in range(kills):
                scheduler.kill()
                scheduler.wait()
                before, began = recorded(results), time.monotonic()
                scheduler = schedule()
                wait_for_more(results, before)
                times.append(time.monotonic() - began)
                wait_for_more(results, recorded(results) + 10_000)
            tell({"restart_s": sorted(times)[len(times) // 2]})
        finally:
            for process in reversed(running):
                process.kill()
                process.wait()


if __name__ == "__main__":
    main()
