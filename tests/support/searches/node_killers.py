"""Trials that kill their node, among three searches on one farm: real processes, real SIGKILL.

    python -m tests.support.searches.node_killers [--limit N] [--trials N] [--killers N] [--nodes N]

Each search has killers and innocent trials, which share nodes. A killer sends SIGKILL to the node's
process, at once or after a result that it then repeats. The test restarts every node that died. At
the end every search has ended, its killers are in ERROR, and every innocent trial has the results
of an undisturbed run.
"""

from __future__ import annotations

import argparse
import random
import tempfile
import time
from pathlib import Path
from typing import Final

from tests.support.farms.farm_service import FarmService, Search, farm_service
from tests.support.searches.chain import expected

SEARCHES: Final = 3
#: Results that a killer reports before it sends the signal.
_BEHIND: Final = (0, 2)
_CODE: Final = """
import glob, os, signal, time
import psutil

def recorded(number):
    files = glob.glob({results!r} + "/*_" + number + "/result.json")
    return sum(line.endswith("\\n") for file in files for line in open(file))

def train(config):
    behind = {killers!r}.get(config["own"])
    if behind is None:
        return work.chain(config)
    for step in range(behind):
        tune.report({{"score": float(step)}})
    # A result that is recorded only after its node died would be new later, and count as progress.
    number = tune.get_context().get_trial_id().rpartition("_")[2]
    while behind and recorded(number) < behind:
        time.sleep(0.01)
    for process in psutil.Process().parents():
        if "tunemq_workers.node.node_process" in process.cmdline():
            os.kill(process.pid, signal.SIGKILL)
    time.sleep(600)
"""


def kill_nodes(
    folder: Path,
    *,
    limit: int = 0,
    nodes: int = 2,
    trials: int = 4,
    killers: int = 1,
    steps: int = 30,
    accidents: int = 0,
    seed: int = 0,
    within: float = 280.0,
) -> str:
    """Run the searches; return a summary.

    Args:
        trials: of each search, of which ``killers`` are killers.
        accidents: how often the test kills a node, in addition to the trials.

    Raises:
        AssertionError: a search did not end, or an innocent trial did not finish.
    """
    rng = random.Random(seed)
    with farm_service(folder) as farm:
        names = [f"node-{number}" for number in range(nodes)]
        for name in names:
            farm.add_worker(name, 2)
        farm.has_nodes(*names)
        searches: dict[str, tuple[Search, dict[int, int]]] = {}
        for number in range(SEARCHES):
            chosen = rng.sample(range(trials), killers)
            of_search = {own: _BEHIND[(own + number) % 2] for own in chosen}
            search = Search(
                name=f"search-{number}",
                trials=trials,
                steps=steps,
                step_s=0.1,
                trainable="train",
                code=_CODE.format(
                    killers=of_search, results=str(farm.results / f"search-{number}")
                ),
                policy=f"max_node_losses={limit}",
            )
            searches[search.name] = search, of_search
            farm.submit(search)
        begun = time.monotonic()
        deaths, left = 0, accidents
        next_accident = begun + rng.uniform(5, 15)
        while not all(row.state.is_over for row in farm.rows().values()):
            assert time.monotonic() < begun + within, f"{farm.rows()}{farm}"
            if left and time.monotonic() > next_accident:
                left -= 1
                next_accident = time.monotonic() + rng.uniform(5, 15)
                farm.workers[rng.choice(names)].kill()
            for name in names:
                if farm.workers[name].poll() is not None:
                    deaths += 1
                    farm.add_worker(name, 2)
            time.sleep(0.2)  # between two looks
        took = time.monotonic() - begun
        for search, of_search in searches.values():
            _check(farm, search, of_search)
        at_most = SEARCHES * killers * (max(1, limit) + limit + 1) + accidents
        assert SEARCHES * killers * (limit + 1) <= deaths <= at_most, deaths
        return (
            f"{SEARCHES} searches of {trials} trials on {nodes} nodes, max_node_losses={limit}: "
            f"{SEARCHES * killers} killers took {deaths} nodes (at most {at_most}, {accidents} of "
            f"them by accident) and are in ERROR, {SEARCHES * (trials - killers)} innocent trials "
            f"have all results; {took:.0f} s"
        )


def _check(farm: FarmService, search: Search, killers: dict[int, int]) -> None:
    rows = farm.json("show", search.name)["trials"]
    found = {int(row["trial"].rpartition("_")[2]): row["status"] for row in rows}
    wanted = {own: "ERROR" if own in killers else "TERMINATED" for own in range(search.trials)}
    assert found == wanted, f"{search.name}: {found}{farm}"
    recorded = farm.recorded(search.name)
    for own in range(search.trials):
        if own not in killers:
            steps = [line["training_iteration"] for line in recorded[own]]
            assert steps == list(range(1, search.steps + 1)), f"{search.name} {own}: {steps}"
            last = recorded[own][-1]["chain"]
            assert last == expected({"own": own}, search.steps), f"{search.name} {own}"


def main() -> None:
    """Run the command line."""
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--limit", type=int, default=2, help="max_node_losses")
    parser.add_argument("--trials", type=int, default=6, help="of each search")
    parser.add_argument("--killers", type=int, default=2, help="of them")
    parser.add_argument("--nodes", type=int, default=3)
    parser.add_argument("--accidents", type=int, default=0, help="nodes killed by no trial")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--within", type=float, default=1800.0, help="seconds")
    with tempfile.TemporaryDirectory(prefix="tunemq-killers-") as folder:
        print(kill_nodes(Path(folder), **vars(parser.parse_args())))


if __name__ == "__main__":
    main()
