"""Searches on Syne Tune's own simulator; an interpreter with syne-tune runs this file as a script.

It reads the table from stdin, and writes regret over worker time to stdout; see `compare`.
"""

from __future__ import annotations

import contextlib
import json
import logging
import os
import sys
import tempfile
from typing import Any

import numpy as np
import pandas as pd
from syne_tune import StoppingCriterion, Tuner
from syne_tune.backend.simulator_backend.simulator_callback import SimulatorCallback
from syne_tune.blackbox_repository.blackbox_tabular import BlackboxTabular
from syne_tune.blackbox_repository.simulated_tabular_backend import UserBlackboxBackend
from syne_tune.config_space import choice, randint
from syne_tune.optimizer.baselines import ASHA, RandomSearch
from syne_tune.optimizer.schedulers.median_stopping_rule import MedianStoppingRule


def search(problem: dict[str, Any], name: str, seed: int) -> list[tuple[float, float]]:
    """Run one search; return its regret over worker time."""
    steps = len(problem["values"][0])
    space = {key: choice(values) for key, values in problem["grid"].items()}
    values = np.array(problem["values"])
    elapsed = np.outer(problem["seconds"], np.arange(1, steps + 1))
    blackbox = BlackboxTabular(
        hyperparameters=pd.DataFrame(problem["configs"]),
        configuration_space=space,
        fidelity_space={"epoch": randint(1, steps)},
        objectives_evaluations=np.stack([values, elapsed], axis=-1)[:, None],
        objectives_names=["error", "elapsed"],
    )
    backend = UserBlackboxBackend(blackbox, elapsed_time_attr="elapsed")
    if name == "ASHA":
        scheduler = ASHA(
            space, "error", "epoch", steps, random_seed=seed, grace_period=1, reduction_factor=3
        )
    else:
        scheduler = RandomSearch(space, ["error"], random_seed=seed)
        if name == "median stopping":
            scheduler = MedianStoppingRule(
                scheduler, "epoch", metric="error", grace_time=1, grace_population=3
            )
    is_fifo = name.startswith("random")
    until_s = problem["budget"] / 2 / problem["workers"]
    stop = (
        StoppingCriterion(max_num_trials_finished=problem["configurations"])
        if is_fifo
        else StoppingCriterion(max_wallclock_time=until_s)
    )
    callback = SimulatorCallback()
    np.random.seed(seed)  # noqa: NPY002  it draws from numpy's global state
    tuner = Tuner(
        trial_backend=backend,
        scheduler=scheduler,
        stop_criterion=stop,
        n_workers=problem["workers"],
        sleep_time=0,
        callbacks=[callback],
        results_update_interval=1e9,
        print_update_interval=1e9,
        save_tuner=False,
        tuner_name=f"s{seed}",
    )
    tuner.run()
    found = callback.results
    best, points = np.inf, []
    for one in sorted(found, key=lambda result: result["st_tuner_time"]):
        if one["error"] < best:
            best = one["error"]
            used = one["st_tuner_time"] * problem["workers"] / problem["budget"]
            points.append((used, best - problem["best"]))
    return points


def main() -> None:
    """Run all searches."""
    problem = json.load(sys.stdin)
    logging.disable(logging.INFO)
    names = ("random search (FIFO)", "ASHA", "median stopping")
    with tempfile.TemporaryDirectory() as folder, contextlib.redirect_stdout(sys.stderr):
        os.environ["SYNETUNE_FOLDER"] = folder
        found = {
            name: [search(problem, name, seed) for seed in range(problem["seeds"])]
            for name in names
        }
    json.dump(found, sys.stdout)


if __name__ == "__main__":
    main()
