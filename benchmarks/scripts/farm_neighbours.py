"""Time from a result to its decision in a farm: alone, and beside experiments that misbehave.

    python farm_neighbours.py ROUNDS SECONDS

One trial, whose search decides about every result, reports the next result when it has the
decision: a report takes one decision round trip. The trial runs throughout, and its time is cut
into slices of three kinds: alone, beside neighbours, and once more alone as a control, whose ratio
to the first kind shows the error of the method. A round has one slice of each kind; the orders of
rounds are balanced, so that drift affects all kinds equally.

The neighbours start with their slice, submission included, and end before the next slice: a search
algorithm that sleeps, a callback that segfaults (and does it again after each restart), and a
callback that reads keys all the time.
"""

from __future__ import annotations

import os
import random
import sys
import time
from array import array
from bisect import bisect_left
from collections.abc import Mapping, Sequence
from heapq import merge
from itertools import islice
from pathlib import Path

from measured import tell
from served_farm import ServedFarm, served_farm, wait_until

GOOD = """
import time
from array import array
import tunemq as tune

def train(config):
    with open({times!r}, "ab", buffering=0) as file:
        while True:
            began = time.monotonic()
            tune.report({{"loss": 1.0}})
            file.write(array("d", (began, time.monotonic() - began)))

def continues(trial_id, result):
    return False

tuner = tune.Tuner(train, run_config=tune.RunConfig(verbose=0, stop=continues))
"""
#: Sleeps for a minute, or until there is something to read: a slice is shorter.
SLEEPER = """
import os
import select
import tunemq as tune
from tunemq.search import Searcher

class Sleeper(Searcher):
    def suggest(self, trial_id):
        alarm = os.open({alarm!r}, os.O_RDONLY | os.O_NONBLOCK)
        open({signs!r} + "/asleep", "a").close()
        select.select([alarm], [], [], 60)
        open({signs!r} + "/awake", "a").close()
        return {{}}

    def on_trial_complete(self, trial_id, result=None, error=False):
        pass

def train(config):
    tune.report({{"loss": 1.0}})

tuner = tune.Tuner(
    train, tune_config=tune.TuneConfig(metric="loss", mode="min", search_alg=Sleeper())
)
"""
#: Stops when its slice ends, so that the scheduler does not restart it again and again.
CRASHER = """
import ctypes
import time
from pathlib import Path
import tunemq as tune

class Crasher(tune.Callback):
    def on_trial_result(self, iteration, trials, trial, result, **info):
        if not Path({signs!r}, "over").exists():
            ctypes.string_at(0)

def train(config):
    while True:
        time.sleep(0.1)
        tune.report({{"loss": 1.0}})

tuner = tune.Tuner(train, run_config=tune.RunConfig(callbacks=[Crasher()]))
"""
#: The experiment process's parent, and that process's parent, which has the keys.
READER = """
import os
import time
from pathlib import Path
import tunemq as tune

def parent_of(pid):
    return int(Path("/proc", str(pid), "stat").read_text().rpartition(")")[2].split()[1])

def look(pid):
    for name in ("environ", "maps", "mem", "fd", "cmdline"):
        try:
            Path("/proc", str(pid), name).read_bytes()
        except OSError:
            pass

class Reader(tune.Callback):
    def on_trial_result(self, iteration, trials, trial, result, **info):
        until = time.monotonic() + 0.08
        while time.monotonic() < until:
            forkserver = os.getppid()
            look(forkserver)
            look(parent_of(forkserver))
            time.sleep(0.005)
        with open({signs!r} + "/looked", "a") as file:
            file.write("x")

def train(config):
    while True:
        time.sleep(0.1)
        tune.report({{"loss": 1.0}})

tuner = tune.Tuner(train, run_config=tune.RunConfig(callbacks=[Reader()]))
"""
BAD = {"sleeper": SLEEPER, "crasher": CRASHER, "reader": READER}

ALONE, CONTROL, BESIDE = "alone", "control", "beside"
#: Each kind is as often first, second and last, and every second round is the one before backwards.
_ORDERS = (
    (ALONE, CONTROL, BESIDE),
    (BESIDE, CONTROL, ALONE),
    (CONTROL, BESIDE, ALONE),
    (ALONE, BESIDE, CONTROL),
    (BESIDE, ALONE, CONTROL),
    (CONTROL, ALONE, BESIDE),
)
#: Pause before each slice, in which the slice before finishes its work.
_SETTLE_S = 0.7
_WARM_S = 3.0
_RESAMPLES = 1_000

#: When the slice of each kind began, by the monotonic clock.
Round = dict[str, float]
#: The times of a slice in seconds, longest first.
Times = Sequence[float]


class Neighbours:
    """The neighbours of one slice."""

    def __init__(self, farm: ServedFarm, number: int) -> None:
        self._farm = farm
        self._signs = farm.folder / f"signs_{number}"
        self._signs.mkdir()
        path = self._signs / "alarm"
        os.mkfifo(path)
        self._alarm = os.open(path, os.O_RDWR)
        given = {"alarm": str(path), "signs": str(self._signs)}
        self._codes = {
            f"{name}_{number}": farm.code(f"{name}_{number}", text.format(**given))
            for name, text in BAD.items()
        }
        self._crasher = f"crasher_{number}"

    def begin(self) -> None:
        """Submit them."""
        for name, code in self._codes.items():
            self._farm.submit(name, code)

    def crashes(self) -> int:
        """How often the one that crashes did; 0 unless all have done their worst."""
        signs = {path.name for path in self._signs.iterdir()}
        if not {"asleep", "looked"} <= signs or "awake" in signs:
            return 0
        return self._farm.said().count(f"{self._crasher}: its process was killed by SIGSEGV")

    def end(self) -> None:
        """Have them stop, and return when they have."""
        (self._signs / "over").touch()
        for name in self._codes:
            self._farm.stop(name)
        os.write(self._alarm, b"x")
        wait_until(lambda: all(self._farm.rows()[name].state.is_over for name in self._codes))
        os.close(self._alarm)


def run_round(farm: ServedFarm, number: int, seconds: float) -> tuple[Round, int]:
    """One slice of each kind; returns when they began, and how often the neighbour crashed."""
    begins, crashes = {}, 0
    for kind in _ORDERS[number % len(_ORDERS)]:
        neighbours = Neighbours(farm, number) if kind == BESIDE else None
        time.sleep(_SETTLE_S)
        begins[kind] = time.monotonic()
        if neighbours is not None:
            neighbours.begin()
        time.sleep(max(0.0, begins[kind] + seconds - time.monotonic()))
        if neighbours is not None:
            crashes = neighbours.crashes()
            neighbours.end()
    return begins, crashes


def run_rounds(farm: ServedFarm, rounds: int, seconds: float) -> tuple[list[Round], int, int]:
    """Return the rounds, the number of neighbours' crashes, and the number of rounds left out.

    On a busy machine neighbours may not misbehave fully within their slice; the function leaves
    such a round out, at most one of four.

    Raises:
        TimeoutError: more rounds were left out.
    """
    found: list[Round] = []
    crashed = 0
    most = rounds + rounds // 3
    for number in range(most):
        one, crashes = run_round(farm, number, seconds)
        if crashes:
            found.append(one)
            crashed += crashes
        if len(found) == rounds:
            time.sleep(_SETTLE_S)  # the last report of the last slice has ended, too
            return found, crashed, number + 1 - rounds
    raise TimeoutError(f"neighbours did their worst in {len(found)} of {most} rounds")


def times_within(path: Path, rounds: Sequence[Round], seconds: float) -> dict[str, list[Times]]:
    """The times of each slice, by kind."""
    numbers = array("d")
    numbers.frombytes(path.read_bytes())
    begins, times = numbers[::2], numbers[1::2]

    def within(first: float) -> Times:
        last = first + seconds
        return sorted(times[bisect_left(begins, first) : bisect_left(begins, last)], reverse=True)

    return {kind: [within(one[kind]) for one in rounds] for kind in (ALONE, CONTROL, BESIDE)}


def p99(slices: Sequence[Times]) -> float:
    """Of all times of these slices, the one that 99 of 100 do not exceed."""
    rank = sum(map(len, slices)) // 100
    return next(islice(merge(*slices, reverse=True), rank, None))


def interval(times: Mapping[str, Sequence[Times]], kind: str) -> tuple[float, float]:
    """Where 95 of 100 ratios to alone lie, had chance picked these rounds otherwise."""
    rng = random.Random(1)
    count = len(times[kind])
    found = []
    for _ in range(_RESAMPLES):
        picked = rng.choices(range(count), k=count)
        above, below = ([times[one][number] for number in picked] for one in (kind, ALONE))
        found.append(p99(above) / p99(below))
    found.sort()
    return found[_RESAMPLES * 25 // 1_000], found[-1 - _RESAMPLES * 25 // 1_000]


def main() -> None:
    """Measure."""
    rounds, seconds = int(sys.argv[1]), float(sys.argv[2])
    with served_farm() as farm:
        farm.start(8)
        path = farm.folder / "times"
        farm.submit("good", farm.code("good", GOOD.format(times=str(path))))
        wait_until(lambda: path.exists() and path.stat().st_size)
        time.sleep(_WARM_S)
        measured, crashes, left_out = run_rounds(farm, rounds, seconds)
        times = times_within(path, measured, seconds)
    figures: dict[str, float] = {f"{kind}_ms": 1_000 * p99(of) for kind, of in times.items()}
    for kind, name in ((CONTROL, "control"), (BESIDE, "ratio")):
        figures[f"{name}_low"], figures[f"{name}_high"] = interval(times, kind)
        figures[name] = figures[f"{kind}_ms"] / figures["alone_ms"]
    counts = {f"{kind}_results": sum(map(len, of)) for kind, of in times.items()}
    tell({**counts, "crashes": crashes, "rounds_left_out": left_out, **figures})


if __name__ == "__main__":
    main()
