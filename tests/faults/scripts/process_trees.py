"""A search whose trials start different kinds of process trees, for tests that stop them.

``process_trees.py FOLDER OPTIONS``: each process of a tree appends its pid to
``FOLDER/members/KIND``. Each trial reports the findings of its processes repeatedly until
``FOLDER/hang`` exists. When ``FOLDER/stop`` exists, the search stops the trial. OPTIONS:
``stall_s`` as in `TrialLimits`.
"""

from __future__ import annotations

import json
import multiprocessing
import os
import subprocess
import sys
import time
from multiprocessing.shared_memory import SharedMemory
from pathlib import Path

import tunemq as tune

FOLDER, OPTIONS = Path(sys.argv[1]), json.loads(sys.argv[2])
LAUNCHER = str(Path(__file__).with_name("launcher.py"))
ITEMS = 8


def note(kind):
    with open(FOLDER / "members" / kind, "ab", buffering=0) as file:
        file.write(b"%d\n" % os.getpid())


class Squares:
    """The data set that the workers load; like many users' data sets, a class of the script."""

    def __getitem__(self, number):
        return number * number


def load(kind, data, memory, asked, loaded):
    """Load items into shared memory, as a worker of a DataLoader does."""
    note(kind)
    block = SharedMemory(memory)
    while True:
        number = asked.get()
        block.buf[number] = data[number]
        loaded.put(number)


def loads(method):
    """Start three workers that load all items and then stay alive."""

    def begin():
        context, block = multiprocessing.get_context(method), SharedMemory(create=True, size=ITEMS)
        asked, loaded = context.Queue(), context.Queue()
        given = (method, Squares(), block.name, asked, loaded)
        workers = [
            context.Process(target=load, args=given, daemon=is_daemon)
            for is_daemon in (True, True, False)
        ]
        for worker in workers:
            worker.start()
        for number in range(ITEMS):
            asked.put(number)
        for _ in range(ITEMS):
            loaded.get()
        total = sum(block.buf[:ITEMS])
        return total, (workers, block, asked, loaded)

    return begin


def launches():
    """Launch two ranks that add up 7 and 35."""
    launcher = subprocess.Popen(
        [sys.executable, "-I", "-S", LAUNCHER, str(FOLDER / "members" / "launch")],
        stdout=subprocess.PIPE,
    )
    return int(launcher.stdout.readline()), launcher


def bombs():
    """Start eight chains of processes that fork their successors and end, for five minutes."""
    until = time.monotonic() + 300
    for _ in range(8):
        if os.fork() == 0:
            os.environ.clear()
            while time.monotonic() < until:
                if os.fork():
                    os._exit(0)
                os.setsid()
                time.sleep(0.001)  # a bomb within limits leaves something to others
            os._exit(0)
    note("bomb")
    return 8, None


BEGINNINGS = {
    "fork": loads("fork"),
    "spawn": loads("spawn"),
    "forkserver": loads("forkserver"),
    "launch": launches,
    "bomb": bombs,
}


def train(config):
    tune.report({"found": 0})
    found, _process_tree = BEGINNINGS[config["kind"]]()
    while not (FOLDER / "hang").exists():
        tune.report({"found": found})
        time.sleep(0.05)  # a step
    while True:
        time.sleep(600)


class IsToStop(tune.Stopper):
    def __call__(self, trial_id, result):
        return result["found"] and (FOLDER / "stop").exists()

    def stop_all(self):
        return False


def main():
    (FOLDER / "members").mkdir()
    tune.Tuner(
        train,
        param_space={"kind": tune.grid_search(list(BEGINNINGS))},
        run_config=tune.RunConfig(
            name="search",
            storage_path=str(FOLDER),
            stop=IsToStop(),
            env_vars={"TMPDIR": str(FOLDER)},  # a killed process leaves sockets there
            trial_limits=tune.TrialLimits(stall_s=OPTIONS.get("stall_s")),
        ),
    ).fit()


if __name__ == "__main__":
    main()
