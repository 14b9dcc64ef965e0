"""One search, on TuneMQ or on Ray Tune; prints its measurements as a line of JSON.

The same code runs on both: a peer is the imported module. An interpreter that has this peer runs
the file as a script, so the script imports only modules beside it.
"""

from __future__ import annotations

import argparse
import tempfile
import time
from typing import Any

from measured import tell
from peer_module import PEERS, load_peer


def one_result(config: dict[str, Any]) -> None:
    tune.report({"loss": config["x"]})


def one_result_of_a_model(config: dict[str, Any]) -> None:
    tune.report({"loss": LogisticRegression(C=1 + config["x"]).C})


def many_results(config: dict[str, Any]) -> None:
    began = time.time()
    for step in range(config["results"]):
        tune.report({"loss": 1 / (step + 1), "accuracy": step * 1e-5, "lr": 0.1, "began": began})


def sleeper(config: dict[str, Any]) -> None:
    while True:
        tune.report({"loss": config["x"]})
        time.sleep(3600)


TRAINABLES = {
    "one": one_result,
    "model": one_result_of_a_model,
    "many": many_results,
    "sleep": sleeper,
}


def watcher() -> Any:
    class Watcher(tune.Callback):
        """Record when trials end, and the start times in their last results."""

        def __init__(self) -> None:
            self.ends: list[float] = []
            self.began: list[float] = []

        def on_trial_complete(self, iteration: int, trials: Any, trial: Any, **info: Any) -> None:
            del iteration, trials, info
            self.ends.append(time.time())
            self.began.append(trial.last_result.get("began", 0.0))

    class EagerWatcher(Watcher):
        """Record the first result, too; a separate class, because each callback has a cost."""

        def __init__(self) -> None:
            super().__init__()
            self.results = 0

        def on_trial_result(
            self, iteration: int, trials: Any, trial: Any, result: Any, **info: Any
        ) -> None:
            del iteration, trials, trial, result, info
            self.results += 1
            if self.results == options.announce:
                tell({"first_result": time.time()})

    return EagerWatcher() if options.announce else Watcher()


def decides_about_every_result() -> Any:
    """A trial scheduler that has to be asked about every result."""
    if options.peer == "ray":  # there each one is
        return tune.schedulers.FIFOScheduler()

    class Asked(tune.schedulers.TrialScheduler):
        pass

    return Asked()


def search(storage: str) -> dict[str, Any]:
    watch = watcher()
    config: dict[str, Any] = {"x": tune.uniform(0, 1), "results": options.results}
    tuner = tune.Tuner(
        TRAINABLES[options.trainable],
        param_space=config,
        tune_config=tune.TuneConfig(
            metric="loss",
            mode="min",
            num_samples=options.trials,
            reuse_actors=options.reuse,
            scheduler=decides_about_every_result() if options.lock_step else None,
        ),
        run_config=tune.RunConfig(storage_path=storage, callbacks=[watch], name="bench"),
    )
    begin = time.time()
    tuner.fit()
    return {"begin": begin, "end": time.time(), "ends": watch.ends, "began": min(watch.began)}


parser = argparse.ArgumentParser()
parser.add_argument("--peer", choices=PEERS, required=True)
parser.add_argument("--storage", help="the folder to make the results folder in")
parser.add_argument("--trainable", choices=TRAINABLES, default="one")
parser.add_argument("--trials", type=int, default=1)
parser.add_argument("--results", type=int, default=1, help="of each trial")
parser.add_argument("--cpus", type=int, default=2)
parser.add_argument("--reuse", action="store_true")
parser.add_argument("--lock-step", action="store_true")
parser.add_argument("--announce", type=int, default=0, help="print a line after this many results")
parser.add_argument("--stay", action="store_true", help="wait for a line of input at the end")
options = parser.parse_args()
tune = load_peer(options.peer, options.cpus)
if options.trainable == "model":  # at the top, where it is found and preloaded
    from sklearn.linear_model import LogisticRegression

if __name__ == "__main__":
    tell(search(tempfile.mkdtemp(prefix="search-", dir=options.storage)))
    if options.stay:
        input()
