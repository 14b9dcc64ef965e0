"""Draws docs/simulator.svg from the results of `benchmarks.simulator.compare`; needs matplotlib."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any, Final

import matplotlib as mpl
import matplotlib.pyplot as plt
import numpy as np

ROOT: Final = Path(__file__).parents[2]
RESULTS: Final = ROOT / "benchmarks" / "results" / "simulator.json"
OUTPUT: Final = ROOT / "docs" / "simulator.svg"


def main() -> None:
    """Draw one plot for each problem, side by side."""
    mpl.rcParams.update({"svg.fonttype": "none", "svg.hashsalt": "tunemq"})
    kept = json.loads(RESULTS.read_text())
    problems = {name: found for name, found in kept.items() if name in {"digits_mlp", "branin"}}
    figure, axes = plt.subplots(
        1, len(problems), figsize=(6.5 * len(problems), 4.5), squeeze=False, layout="constrained"
    )
    for axis, (problem, found) in zip(axes[0], problems.items(), strict=True):
        _draw(axis, problem, found)
    figure.savefig(OUTPUT, metadata={"Date": None})
    print(OUTPUT, OUTPUT.stat().st_size)


def _draw(axis: Any, problem: str, found: dict[str, Any]) -> None:
    colours: dict[str, Any] = {}
    for name, runs in found.items():
        own = name.removeprefix("Syne Tune: ")
        colours.setdefault(own, f"C{len(colours)}")
        until = 1.0 if "FIFO" in name else 0.5
        times = np.geomspace(0.02, until, 60)
        values = np.array([[_at(run, time) for time in times] for run in runs])
        first, middle, last = np.quantile(values, [0.25, 0.5, 0.75], axis=0)
        line = "--" if name != own else "-"
        axis.plot(times, middle, line, label=name, color=colours[own])
        if name == own:
            axis.fill_between(times, first, last, color=colours[own], alpha=0.12, linewidth=0)
    axis.set(xscale="log", yscale="symlog" if problem == "digits_mlp" else "log", title=problem)
    if problem == "digits_mlp":
        axis.set_yscale("symlog", linthresh=0.002)
    axis.set_xlabel("worker time (1: 256 full trainings)")
    axis.set_ylabel("regret: median and quartiles")
    axis.legend(fontsize="small")


def _at(run: list[list[float]], time: float) -> float:
    best = 1.0 if not run else max(regret for _, regret in run)
    return min((regret for used, regret in run if used <= time), default=best)


if __name__ == "__main__":
    main()
