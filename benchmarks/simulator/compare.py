"""Compares trial schedulers by regret over worker time: 64 workers, 50 seeds.

    python -m benchmarks.simulator.compare
    python -m benchmarks.simulator.compare --syne-python /somewhere/syne/bin/python
    python -m benchmarks.simulator.plot

The second command adds Syne Tune's searches on its own simulator and the recorded table. Install it
with `pip install syne-tune huggingface_hub` into a separate environment, and matplotlib for the
third.

BOHB has its own search algorithm, the others use random search: there each seed draws the same
configurations for all schedulers. *Regret* is the best value so far minus the best possible;
*worker time* counts the time of all busy workers, in units of what 256 full trainings take on
average. FIFO trains 256 configurations; the others get half of that time. It writes
`results/simulator.json`, from which the third command draws docs/simulator.svg.
"""

from __future__ import annotations

import argparse
import json
import math
import multiprocessing
import statistics
import subprocess
from collections.abc import Callable
from pathlib import Path
from typing import Any, Final

from tunemq.schedulers import (
    PASHA,
    ASHAScheduler,
    FIFOScheduler,
    HyperBandForBOHB,
    HyperBandScheduler,
    MedianStoppingRule,
    TrialScheduler,
)
from tunemq.testing import CurveTable, SyntheticCurves, recorded_curves, simulate

OUTPUT: Final = Path(__file__).parents[1] / "results" / "simulator.json"
WORKERS: Final = 64
CONFIGURATIONS: Final = 256
STEPS: Final = 27
#: A point of a curve: worker time as a part of the budget, and regret.
Point = tuple[float, float]

METHODS: Final[dict[str, Callable[[], TrialScheduler]]] = {
    "random search (FIFO)": FIFOScheduler,
    "ASHA": lambda: ASHAScheduler(max_t=STEPS, reduction_factor=3),
    "ASHA, promotion": lambda: ASHAScheduler(max_t=STEPS, reduction_factor=3, type="promotion"),
    "HyperBand": lambda: HyperBandScheduler(max_t=STEPS, reduction_factor=3),
    "PASHA": lambda: PASHA(max_t=STEPS, reduction_factor=3),
    "median stopping": lambda: MedianStoppingRule("training_iteration", grace_period=1),
    "BOHB": lambda: HyperBandForBOHB(max_t=STEPS, reduction_factor=3),
}
#: The search algorithms of methods that do not use random search.
SEARCHERS: Final = {"BOHB": "bohb"}
RECORDED: Final = "digits_mlp"
FIFO: Final = "random search (FIFO)"


def table_problem() -> tuple[CurveTable, str, float, float]:
    """The recorded table, its metric, its best value, and the seconds of an average training."""
    table = recorded_curves()
    found = [table(config, step) for config in table.configs() for step in range(1, STEPS + 1)]
    seconds = sum(one["time_this_iter_s"] for one in found) / len(table)
    return table, "error", min(one["error"] for one in found), seconds


def synthetic_problem() -> tuple[SyntheticCurves, str, float, float]:
    """The same of synthetic curves."""
    return SyntheticCurves("branin", steps=STEPS, noise=0.0), "loss", 0.0, float(STEPS)


PROBLEMS: Final[dict[str, Callable[[], tuple[Any, str, float, float]]]] = {
    RECORDED: table_problem,
    "branin": synthetic_problem,
}


def main() -> None:
    """Run all searches; print and write what they found."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("problems", nargs="*", help=", ".join(PROBLEMS))
    parser.add_argument("--seeds", type=int, default=50)
    parser.add_argument("--workers", type=int, default=WORKERS)
    parser.add_argument("--methods", nargs="*", default=list(METHODS), help="some of them")
    parser.add_argument("--processes", type=int, default=2)
    parser.add_argument("--syne-python", help="an interpreter with syne-tune")
    options = parser.parse_args()
    if options.syne_python:
        keep(RECORDED, syne_tune(options.syne_python, options.seeds))
        return
    for problem in options.problems or PROBLEMS:
        runs = [
            (problem, name, seed, options.workers)
            for name in options.methods
            for seed in range(options.seeds)
        ]
        with multiprocessing.Pool(options.processes) as pool:
            curves = pool.starmap(regret, runs, chunksize=1)
        found: dict[str, list[list[Point]]] = {name: [] for name in options.methods}
        for (_, name, _, _), curve in zip(runs, curves, strict=True):
            found[name].append(curve)
        title = problem if options.workers == WORKERS else f"{problem}, {options.workers} workers"
        keep(title, found)


def keep(title: str, found: dict[str, list[list[Point]]]) -> None:
    """Add these searches to the results, and print all of the problem's."""
    kept = json.loads(OUTPUT.read_text()) if OUTPUT.exists() else {}
    kept[title] = {**kept.get(title, {}), **found}
    OUTPUT.parent.mkdir(exist_ok=True)
    OUTPUT.write_text(json.dumps(kept))
    print(f"\n{title}\n\n{table(kept[title])}", flush=True)


def regret(problem: str, name: str, seed: int, workers: int) -> list[Point]:
    """Run one search; return its regret over worker time."""
    curves, metric, best, seconds = PROBLEMS[problem]()
    budget = CONFIGURATIONS * seconds
    is_fifo = name == FIFO
    found = simulate(
        METHODS[name](),
        SEARCHERS.get(name),
        curves,
        metric=metric,
        mode="min",
        num_samples=CONFIGURATIONS if is_fifo else -1,
        time_budget_s=None if is_fifo else budget / 2 / workers,
        workers=workers,
        seed=seed,
    )
    return [(one.worker_s / budget, one.value - best) for one in found.best_over_time()]


def syne_tune(python: str, seeds: int) -> dict[str, list[list[Point]]]:
    """Run the searches that Syne Tune has, too, on its own simulator and the same table."""
    curves, metric, best, seconds = table_problem()
    problem = {
        "configs": [*curves.configs()],
        "grid": {name: domain.categories for name, domain in curves.param_space.items()},
        "values": [[curves(c, s)[metric] for s in range(1, STEPS + 1)] for c in curves.configs()],
        "seconds": [curves(config, 1)["time_this_iter_s"] for config in curves.configs()],
        "best": best,
        "budget": CONFIGURATIONS * seconds,
        "configurations": CONFIGURATIONS,
        "workers": WORKERS,
        "seeds": seeds,
    }
    script = Path(__file__).with_name("syne_tune_search.py")
    done = subprocess.run(
        [python, str(script)], input=json.dumps(problem), capture_output=True, text=True, check=True
    )
    return {f"Syne Tune: {name}": runs for name, runs in json.loads(done.stdout).items()}


def table(found: dict[str, list[list[Point]]]) -> str:
    """Return the regrets at some worker times, and when FIFO's last value was reached."""
    lines = [
        "| | regret at 1/8 | 1/4 | 1/2 | 1 | time to FIFO's last value |",
        "|---|--:|--:|--:|--:|--:|",
    ]
    for name, runs in found.items():
        cells = [spread([at(run, part) for run in runs]) for part in (1 / 8, 1 / 4, 1 / 2)]
        cells.append(spread([at(run, 1.05) for run in runs]) if FIFO in name else "")
        times = [reached(run, goal[-1][1]) for run, goal in zip(runs, found[FIFO], strict=False)]
        lines.append(f"| {name} | {' | '.join(cells)} | {spread(times)} |")
    return "\n".join(lines)


def at(run: list[Point], part: float) -> float:
    """Return a run's regret when this part of the worker time was used."""
    return min((regret for used, regret in run if used <= part), default=math.inf)


def reached(run: list[Point], goal: float) -> float:
    """Return when a run's regret came down to this; infinity if it did not."""
    return min((used for used, regret in run if regret <= goal), default=math.inf)


def spread(values: list[float]) -> str:
    """Return the median, and the quartiles around it."""
    first, middle, last = statistics.quantiles([min(one, 9e9) for one in values], n=4)
    shown = [f"{one:.3g}" if one < 1e6 else "never" for one in (middle, first, last)]
    return f"{shown[0]} ({shown[1]} to {shown[2]})"


if __name__ == "__main__":
    main()
