"""`make soak KILLS=300`: a farm of which one part after another dies, and loses nothing.

    python -m tests.soak.__main__ --kills 300 [--seed N] [--algorithm NAME] [--keep DIR]

A real redis-server, a real MinIO, three `tunemq worker` and a `tunemq scheduler`, all processes of
their own, run a search of chains (`tests.support.searches.chain`): every result is a hash over all
steps before it. Every 5 s on average one of the six, each equally often, is killed, stopped, cut
off or wiped, and is back after 0 to 10 s; several may be away at once. A store is never wiped, nor
the scheduler's folder: that the disks of both are kept is what all promises rest on.

In the end: the results are those of an undisturbed run, the invariants hold over the whole journal,
every checkpoint that is kept is whole, and no file and no Redis key is left without an owner. The
last line says what was done and how long it took; the exit status is 0 where all of it held.
"""

from __future__ import annotations

import argparse
import random
import sys
import tempfile
import time
from pathlib import Path
from typing import Final

from tests.soak.soak_checks import check_search
from tests.soak.soak_farm import SHARES, SoakFarm

#: Mean seconds between two faults, and the longest seconds until the harmed component returns.
EVERY_S: Final = 5.0
LONGEST_S: Final = 10.0
#: Longest time of the search, as a multiple of its undisturbed time plus the downtime.
MAX_TIMES_PASSED_OVER: Final = 1.5


def main() -> int:
    """Run the command line."""
    parser = argparse.ArgumentParser(prog="make soak", description=__doc__.split("\n")[0])
    parser.add_argument("--kills", type=int, default=20, help="how many faults")
    parser.add_argument("--seed", type=int, help="of the faults; default: another each time")
    parser.add_argument("--algorithm", choices=tuple(SHARES), default="fifo")
    parser.add_argument("--keep", type=Path, metavar="DIR", help="keep all files, in this folder")
    options = parser.parse_args()
    seed = options.seed if options.seed is not None else random.SystemRandom().getrandbits(32)
    print(f"seed {seed}", flush=True)
    if options.keep is not None:
        options.keep.mkdir(parents=True)
        print(soak(options.keep, options.kills, seed, options.algorithm, say=print))
        return 0
    with tempfile.TemporaryDirectory(prefix="tunemq-soak-") as folder:
        print(soak(Path(folder), options.kills, seed, options.algorithm, say=print))
    return 0


def soak(
    folder: Path,
    kills: int,
    seed: int,
    algorithm: str = "fifo",
    *,
    every_s: float = EVERY_S,
    longest_s: float = LONGEST_S,
    patience: float = MAX_TIMES_PASSED_OVER,
    say=lambda _text: None,
) -> str:
    """Run the soak test; return the summary.

    Args:
        patience: the longest run time, as a multiple of the undisturbed time plus the downtime.

    Raises:
        AssertionError: the farm lost, duplicated or left something behind, or took too long.
    """
    chance = random.Random(seed)
    with SoakFarm(folder, algorithm=algorithm, least_s=kills * every_s) as farm:
        farm.start()
        begun = time.monotonic()
        due, done, down_s = begun, 0, 0.0
        while done < kills and farm.is_searching:
            due += chance.expovariate(1 / every_s)
            farm.live_until(due)
            there = [part for part in farm.parts if not part.is_away]
            if there and farm.is_searching:
                part = chance.choice(there)
                what = chance.choice(part.faults)
                away_s = chance.uniform(0, longest_s)
                farm.harm(part, what, away_s)
                done += 1
                down_s += away_s
                say(f"{time.monotonic() - begun:7.1f} s  {what:5} {part.name} for {away_s:.1f} s")
        farm.heal()
        limit_s = patience * (farm.undisturbed_s + down_s)
        took_s = farm.wait_for_the_end(within=limit_s + 60)
        farm.end()
        try:
            told = check_search(farm)
        except AssertionError:
            say(farm.story())
            raise
        assert took_s <= limit_s, f"it took {took_s:.0f} s, at most {limit_s:.0f} s are allowed"
        assert done == kills, f"the search was over after {done} of {kills} faults"
        counts = " ".join(f"{key}={count}" for key, count in sorted(farm.harmed.items()))
        return (
            f"{algorithm}: {done} faults ({counts}), seed {seed}: {told}; {took_s:.0f} s, "
            f"undisturbed {farm.undisturbed_s:.0f} s + {down_s:.0f} s down, limit {limit_s:.0f} s"
        )


if __name__ == "__main__":
    sys.exit(main())
