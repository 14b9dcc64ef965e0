"""A search for a farm; its options are in the file that $FARM_TEST_OPTIONS names."""

from __future__ import annotations

import json
import os
from pathlib import Path

import tunemq as tune
from tests.support.searches.chain import chain

options = {
    "trials": 4,
    "steps": 20,
    "save_every": 1000,
    "payload": 10,
    "step_s": 0.05,
    "max_failures": 0,
    "gate": "",
    **json.loads(Path(os.environ["FARM_TEST_OPTIONS"]).read_text()),
}


tuner = tune.Tuner(
    tune.with_resources(chain, {"cpu": 1}),
    param_space={
        "own": tune.grid_search(list(range(options["trials"]))),
        **{
            key: options[key]
            for key in ("executed", "steps", "save_every", "payload", "step_s", "gate")
        },
    },
    tune_config=tune.TuneConfig(metric="score", mode="min", seed=1),
    run_config=tune.RunConfig(
        failure_config=tune.FailureConfig(max_failures=options["max_failures"]),
    ),
)

if __name__ == "__main__":
    raise AssertionError("a farm does not run this part")
