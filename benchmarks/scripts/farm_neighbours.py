"""From a result to its decision, in a farm: alone, and beside experiments that misbehave.

    python farm_neighbours.py ROUNDS RESULTS

One trial, whose search has to be asked about every result: it reports the next one when it has the
answer. So what a report takes is a decision, there and back. The neighbours: a search algorithm
that sleeps, a callback that segfaults, a callback that looks for keys all the time.
"""

from __future__ import annotations

import json
import sys
from statistics import median

from measured import tell
from served_farm import ServedFarm, served_farm, wait_until

GOOD = """
import json
import time
from pathlib import Path
import tunemq as tune

def train(config):
    times = []
    for _ in range({results}):
        began = time.perf_counter()
        tune.report({{"loss": 1.0}})
        times.append(time.perf_counter() - began)
    path = Path({path!r})
    path.with_suffix(".new").write_text(json.dumps(times))
    path.with_suffix(".new").replace(path)

def goes_on(trial_id, result):
    return False

tuner = tune.Tuner(train, run_config=tune.RunConfig(verbose=0, stop=goes_on))
"""
SLEEPER = """
import time
import tunemq as tune
from tunemq.search import Searcher

class Sleeper(Searcher):
    def suggest(self, trial_id):
        time.sleep(60)
        return {{}}

    def on_trial_complete(self, trial_id, result=None, error=False):
        pass

def train(config):
    tune.report({{"loss": 1.0}})

tuner = tune.Tuner(
    train,
    tune_config=tune.TuneConfig(metric="loss", mode="min", search_alg=Sleeper(), num_samples=9),
)
"""
CRASHER = """
import ctypes
import time
import tunemq as tune

class Crasher(tune.Callback):
    def on_trial_result(self, iteration, trials, trial, result, **info):
        ctypes.string_at(0)

def train(config):
    while True:
        time.sleep(0.1)
        tune.report({{"loss": 1.0}})

tuner = tune.Tuner(train, run_config=tune.RunConfig(callbacks=[Crasher()]))
"""
READER = """
import os
import time
from pathlib import Path
import tunemq as tune

class Reader(tune.Callback):
    def on_trial_result(self, iteration, trials, trial, result, **info):
        for name in ("environ", "maps", "mem", "fd", "cmdline"):
            try:
                Path("/proc", str(os.getppid()), name).read_bytes()
            except OSError:
                pass

def train(config):
    while True:
        time.sleep(0.1)
        tune.report({{"loss": 1.0}})

tuner = tune.Tuner(train, run_config=tune.RunConfig(callbacks=[Reader()]))
"""


BAD = {"sleeper": SLEEPER, "crasher": CRASHER, "reader": READER}


def measure(farm: ServedFarm, name: str, results: int) -> float:
    """The time that 99 of 100 decisions do not take, in ms."""
    path = farm.folder / f"{name}.times"
    farm.submit(name, farm.code(name, GOOD.format(results=results, path=str(path))))
    wait_until(path.exists)
    times = sorted(json.loads(path.read_text())[results // 10 :])
    wait_until(lambda: farm.rows()[name].state.is_over)
    return 1_000 * times[int(len(times) * 0.99)]


def begin(farm: ServedFarm, number: int) -> None:
    """Start the neighbours, and wait until each has done its worst."""
    said = farm.said().count("SIGSEGV")
    for name, text in BAD.items():
        farm.submit(f"{name}_{number}", farm.code(name, text.format()))
    wait_until(lambda: farm.said().count("SIGSEGV") > said)
    wait_until(lambda: farm.rows()[f"reader_{number}"].trials.get("RUNNING"))


def end(farm: ServedFarm, number: int) -> None:
    """Stop them."""
    for name in BAD:
        farm.stop(f"{name}_{number}")
    # The sleeper hears of it when it wakes.
    quick = [f"{name}_{number}" for name in BAD if name != "sleeper"]
    wait_until(lambda: all(farm.rows()[name].state.is_over for name in quick))


def main() -> None:
    """Measure, in turns: other work on the machine is then in both."""
    rounds, results = int(sys.argv[1]), int(sys.argv[2])
    alone, beside = [], []
    with served_farm() as farm:
        farm.start(8)
        measure(farm, "warm", results // 10)
        for number in range(rounds):
            alone.append(measure(farm, f"alone_{number}", results))
            begin(farm, number)
            beside.append(measure(farm, f"beside_{number}", results))
            end(farm, number)
    figures = {"alone_ms": median(alone), "beside_ms": median(beside)}
    tell({**figures, "ratio": figures["beside_ms"] / figures["alone_ms"]})


if __name__ == "__main__":
    main()
