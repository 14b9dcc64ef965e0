"""A search for `tunemq scheduler`; its options are in the file that $FARM_TEST_OPTIONS names."""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Any

import tunemq as tune
from tests.chain import chain

options = {
    "trials": 4,
    "steps": 20,
    "save_every": 1000,
    "payload": 10,
    "step_s": 0.05,
    "storage": None,
    "max_failures": 0,
    "cpus": 1,
    "lock_step": False,
    "gate": "",
    **json.loads(Path(os.environ["FARM_TEST_OPTIONS"]).read_text()),
}


def stops_nothing(trial_id: str, result: dict[str, Any]) -> bool:
    """A stopper without a horizon."""
    return False


tuner = tune.Tuner(
    tune.with_resources(chain, {"cpu": options["cpus"]}),
    param_space={
        "own": tune.grid_search(list(range(options["trials"]))),
        **{
            key: options[key]
            for key in ("executed", "steps", "save_every", "payload", "step_s", "gate")
        },
    },
    tune_config=tune.TuneConfig(metric="score", mode="min", seed=1),
    run_config=tune.RunConfig(
        name="search",
        storage_path=options["storage"],
        failure_config=tune.FailureConfig(max_failures=options["max_failures"]),
        # What is asked at every result has every step wait for a command.
        stop=stops_nothing if options["lock_step"] else None,
    ),
)

if __name__ == "__main__":
    raise AssertionError("the scheduler command does not run this part")
