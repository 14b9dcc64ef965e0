"""A search of `chain` on a store, for tests that kill parts of it or cut its connections.

``chain_search.py FOLDER OPTIONS``: as `search.py`. At its end, the search writes
FOLDER/results.json: for each trial its last value and step, its status and the keys of its
checkpoints. If the search exists already, the script resumes it.
"""

from __future__ import annotations

import json
import sys
from dataclasses import dataclass
from pathlib import Path

from tunemq.testing.comparable_state import comparable

sys.path.insert(0, str(Path(__file__).parents[3]))

import tunemq as tune
import tunemq_scheduler.experiment.search_run as search_parts
from tests.support.searches.chain import chain, chain_class
from tests.support.waiting import eventually
from tunemq_shared.objects.store_address import join


@dataclass
class Options:
    """The options of the script.

    Attributes:
        storage: the address or folder.
        trials, steps, step_s: the number of trials, the steps of each, and the seconds that a step
            takes at least.
        save_every: steps between two checkpoints.
        payload: bytes of each of the two files in a checkpoint.
        kept: checkpoints kept per trial.
        form: ``function`` or ``class``.
        sync_timeout: as in `SyncConfig`.
        gate: trials wait behind this step until the test opens FOLDER/gate further.
        restores: restore the search from its address instead.
        waits: after that, write FOLDER/restored and wait for FOLDER/fit.
    """

    storage: str
    trials: int = 2
    steps: int = 30
    step_s: float = 0.02
    save_every: int = 3
    payload: int = 100_000
    kept: int | None = 2
    max_failures: int = -1
    max_storage_failures: int = -1
    max_node_losses: int = -1
    form: str = "function"
    sync_timeout: float = 1800.0
    gate: int | None = None
    restores: bool = False
    waits: bool = False


FOLDER, OPTIONS = Path(sys.argv[1]), Options(**json.loads(sys.argv[2]))


class WatchedLoop(search_parts.ExperimentLoop):
    """A loop that writes its final state to a file."""

    def run(self, *given, **options):
        try:
            super().run(*given, **options)
        finally:
            (FOLDER / "snapshot").write_bytes(comparable(self.runner))


search_parts.ExperimentLoop = WatchedLoop


def search():
    executed = FOLDER / "executed"
    executed.mkdir(exist_ok=True)
    is_function = OPTIONS.form == "function"
    trainable = chain if is_function else chain_class()
    if OPTIONS.restores:
        tuner = tune.Tuner.restore(join(OPTIONS.storage, "search"), trainable)
        if OPTIONS.waits:
            (FOLDER / "restored").touch()
            eventually((FOLDER / "fit").exists)
    elif tune.Tuner.can_restore(FOLDER / "search"):
        tuner = tune.Tuner.restore(FOLDER / "search", trainable)
    else:
        tuner = new_tuner(trainable, executed)
    results = tuner.fit()
    told = [
        {
            "seed": result.config["seed"],
            "value": result.metrics.get("chain"),
            "step": result.metrics.get("training_iteration"),
            "status": result.status,
            "recorded": [line["training_iteration"] for line in result.history],
            "checkpoints": [
                metrics["training_iteration"] for _, metrics in result.best_checkpoints
            ],
        }
        for result in results
    ]
    (FOLDER / "results.json").write_text(json.dumps(told), encoding="utf-8")


def new_tuner(trainable, executed):
    return tune.Tuner(
        trainable,
        param_space={
            "seed": tune.grid_search(list(range(OPTIONS.trials))),
            "executed": str(executed),
            "steps": OPTIONS.steps,
            "save_every": OPTIONS.save_every,
            "payload": OPTIONS.payload,
            "step_s": OPTIONS.step_s,
            "gate": "" if OPTIONS.gate is None else str(FOLDER / "gate"),
        },
        tune_config=tune.TuneConfig(metric="score", mode="max", seed=1),
        run_config=tune.RunConfig(
            name="search",
            storage_path=OPTIONS.storage,
            sync_config=tune.SyncConfig(sync_timeout=OPTIONS.sync_timeout),
            failure_config=tune.FailureConfig(
                max_failures=OPTIONS.max_failures,
                max_storage_failures=OPTIONS.max_storage_failures,
                max_node_losses=OPTIONS.max_node_losses,
            ),
            checkpoint_config=tune.CheckpointConfig(
                num_to_keep=OPTIONS.kept,
                checkpoint_frequency=OPTIONS.save_every if OPTIONS.form == "class" else 0,
            ),
        ),
    )


if __name__ == "__main__":
    search()
