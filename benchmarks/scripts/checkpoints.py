"""A search with large checkpoints, on TuneMQ or on Ray Tune; prints its measurements.

As in `search.py`, the same code runs on both: the peer is the imported module.
"""

from __future__ import annotations

import argparse
import os
import shutil
import tempfile
import time
from typing import Any

from measured import tell
from peer_module import PEERS, load_peer

MB = 10**6


def saver(config: dict[str, Any]) -> None:
    """Save different bytes each time, unless the configuration asks for the same bytes.

    The bytes change in place, so that the measurement excludes a model library's serialization.
    """
    folder = tempfile.mkdtemp(dir=config["scratch"])
    with open(os.path.join(folder, "model.bin"), "wb") as file:
        file.write(os.urandom(config["mb"] * MB))
    began = time.time()
    reports, steps = [], []
    for save in range(config["saves"]):
        started = time.perf_counter()
        spin(config["step_s"])
        steps.append(time.perf_counter() - started)
        if not (config["unchanged"] and save):
            with open(os.path.join(folder, "model.bin"), "r+b") as file:
                file.write(save.to_bytes(8, "big"))
        saved = save % config["every"] == 0
        checkpoint = tune.Checkpoint.from_directory(folder) if saved else None
        started = time.perf_counter()
        tune.report({"step": save}, checkpoint=checkpoint)
        if saved:
            reports.append(time.perf_counter() - started)
    tune.report({"step": -1, "began": began, "reports": reports, "steps": steps})
    shutil.rmtree(folder)


def spin(seconds: float) -> None:
    """Compute for about so long: a fixed amount of work, measured once by the caller's machine."""
    left = int(seconds * options.spins_per_s)
    while left > 0:
        left -= 1


def watcher() -> Any:
    class Watcher(tune.Callback):
        """Record when checkpoints are safe, and the trials' measurements."""

        def __init__(self) -> None:
            self.saved: list[float] = []
            self.last: dict[str, Any] = {}

        def on_checkpoint(self, iteration: int, trials: Any, trial: Any, **info: Any) -> None:
            del iteration, trials, trial, info
            self.saved.append(time.time())

        def on_trial_result(
            self, iteration: int, trials: Any, trial: Any, result: Any, **info: Any
        ) -> None:
            del iteration, trials, info
            if result["step"] == -1:
                self.last[trial.trial_id] = result

    return Watcher()


def search(storage: str, scratch: str) -> dict[str, Any]:
    watch = watcher()
    about = {
        name: getattr(options, name) for name in ("mb", "saves", "every", "unchanged", "step_s")
    }
    tune.Tuner(
        saver,
        param_space={"x": tune.uniform(0, 1), "scratch": scratch, **about},
        tune_config=tune.TuneConfig(num_samples=options.trials),
        run_config=tune.RunConfig(
            storage_path=storage,
            callbacks=[watch],
            name="bench",
            checkpoint_config=tune.CheckpointConfig(num_to_keep=options.kept),
        ),
    ).fit()
    last = watch.last.values()
    return {
        "began": min(result["began"] for result in last),
        "safe": max(watch.saved, default=0.0),
        "checkpoints": len(watch.saved),
        "reports": [taken for result in last for taken in result["reports"]],
        "steps": [taken for result in last for taken in result["steps"]],
        "end": time.time(),
    }


def spins_per_s() -> float:
    count, started = 3_000_000, time.perf_counter()
    left = count
    while left > 0:
        left -= 1
    return count / (time.perf_counter() - started)


parser = argparse.ArgumentParser()
parser.add_argument("--peer", choices=PEERS, required=True)
parser.add_argument("--storage", required=True, help="a folder, or the address of a store")
parser.add_argument("--scratch", required=True, help="a folder for what trials write")
parser.add_argument("--trials", type=int, default=4)
parser.add_argument("--saves", type=int, default=20, help="steps of each trial")
parser.add_argument("--every", type=int, default=1, help="steps from one save to the next")
parser.add_argument("--mb", type=int, default=10, help="of one checkpoint, in 10^6 bytes")
parser.add_argument("--kept", type=int, default=2)
parser.add_argument("--cpus", type=int, default=4)
parser.add_argument("--step-s", type=float, default=0.0, help="computing before each save")
parser.add_argument("--spins-per-s", type=float, default=0.0)
parser.add_argument("--unchanged", action="store_true", help="save the same bytes each time")
options = parser.parse_args()
options.spins_per_s = options.spins_per_s or spins_per_s()
tune = load_peer(options.peer, options.cpus)

if __name__ == "__main__":
    figures = search(options.storage, options.scratch)
    tell(figures | {"spins_per_s": options.spins_per_s})
