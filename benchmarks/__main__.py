"""``python -m benchmarks [scenario ...]``: measures, prints a table, keeps the figures as JSON."""

from __future__ import annotations

import argparse
import json
import sys
import tempfile
import time
from pathlib import Path

from benchmarks.bench import Bench
from benchmarks.figures import Row, table
from benchmarks.machine import describe
from benchmarks.peers import RAY_PYTHON, ROOT, BenchmarkFailed, find_peers
from benchmarks.scenarios import SCENARIOS

RESULTS = Path(__file__).parent / "results"


def main() -> None:
    """Run the benchmarks that the command line names."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks", description=__doc__)
    parser.add_argument("names", nargs="*", metavar="scenario", help=", ".join(SCENARIOS))
    parser.add_argument("--runs", type=int, default=3, help="of ours; peers are measured once")
    parser.add_argument("--ray-python", help=f"an interpreter with ray[tune]; or ${RAY_PYTHON}")
    parser.add_argument("--folder", type=Path, default=ROOT / "build", help="for results meanwhile")
    options = parser.parse_args()
    names = options.names or list(SCENARIOS)
    if unknown := set(names) - SCENARIOS.keys():
        parser.error(f"there is no {', '.join(sorted(unknown))}; choose of {', '.join(SCENARIOS)}")
    about = describe()
    print(about, flush=True)
    # One folder for all runs, removed at the end. Not the system's temporary folder: ext4 creates
    # files slowly where others were just deleted, which would distort the measurements.
    options.folder.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(prefix="bench-", dir=options.folder) as folder:
        try:
            bench = Bench(find_peers(options.ray_python, folder), options.runs)
            rows = measure(bench, names)
        except BenchmarkFailed as failure:
            sys.exit(f"benchmark failed: {failure}")
    print(f"\n{table(rows)}\n\nkept in {keep(about, rows)}")


def measure(bench: Bench, names: list[str]) -> list[Row]:
    """The rows of these scenarios."""
    rows: list[Row] = []
    for name in names:
        print(f"  {name}: {SCENARIOS[name].__doc__}", flush=True)
        rows += SCENARIOS[name](bench)
    return rows


def keep(about: str, rows: list[Row]) -> str:
    """Write all rows to a new JSON file; return its path."""
    RESULTS.mkdir(exist_ok=True)
    path = RESULTS / time.strftime("%Y-%m-%d_%H-%M-%S.json")
    path.write_text(
        json.dumps({"machine": about, "rows": [row.as_json() for row in rows]}, indent=1)
    )
    return str(path.relative_to(RESULTS.parent.parent))


if __name__ == "__main__":
    main()
