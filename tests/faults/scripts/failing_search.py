"""A search in which each trial fails in a different way, for tests of the trials beside it.

``failing_search.py FOLDER OPTIONS``: OPTIONS is the JSON of an `Options`. The healthy trials train
eight short steps. Each step appends a line to ``FOLDER/steps/<number of the trial>`` when it
begins. At its end, the search writes its state to ``FOLDER/snapshot``.
"""

from __future__ import annotations

import ctypes
import json
import os
import signal
import sys
import time
from dataclasses import dataclass, field
from pathlib import Path

import psutil

import tunemq as tune
import tunemq_scheduler.experiment.search_run as parts
from tunemq.testing.comparable_state import comparable

STEPS = 8


@dataclass
class Options:
    """The options of the script.

    Attributes:
        ways: what each trial does: one of `WAYS`.
        at_step: the step at which it does that.
        failures: the fields of the search's `FailureConfig`.
    """

    ways: list[str]
    at_step: int = 3
    failures: dict[str, int | bool] = field(default_factory=dict)


FOLDER, OPTIONS = Path(sys.argv[1]), Options(**json.loads(sys.argv[2]))


class OutOfMemoryError(RuntimeError):
    """An exception with the name of torch.cuda.OutOfMemoryError."""


OutOfMemoryError.__module__ = "torch.cuda"


def continues():
    pass


def raises():
    raise ValueError("the data are wrong")


def is_killed():
    os.kill(os.getpid(), signal.SIGKILL)


def segfaults():
    ctypes.string_at(0)


def aborts():
    os.abort()


def exits():
    os._exit(7)


def needs_a_bigger_gpu():
    raise OutOfMemoryError("CUDA out of memory. Tried to allocate 20.00 GiB (GPU 0)")


def needs_a_bigger_gpu_in_old_words():
    raise RuntimeError("CUDA error: out of memory")


def reports_text():
    tune.report({"value": "large"})


def kills_its_node():
    for process in psutil.Process().parents():
        if "tunemq_workers.node.node_process" in process.cmdline():
            os.kill(process.pid, signal.SIGKILL)
            time.sleep(600)


def kills_its_forkserver():
    os.kill(os.getppid(), signal.SIGKILL)
    time.sleep(600)


WAYS = {
    way.__name__: way
    for way in (
        continues,
        raises,
        is_killed,
        segfaults,
        aborts,
        exits,
        needs_a_bigger_gpu,
        needs_a_bigger_gpu_in_old_words,
        reports_text,
        kills_its_node,
        kills_its_forkserver,
    )
}


def train(config):
    number, way = config["number"], OPTIONS.ways[config["number"]]
    log = os.open(FOLDER / "steps" / str(number), os.O_WRONLY | os.O_CREAT | os.O_APPEND)
    for step in range(1, STEPS + 1):
        os.write(log, b"%d %d\n" % (step, os.getpid()))
        if step == OPTIONS.at_step:
            WAYS[way]()
        time.sleep(0.02)
        tune.report({"value": 1000 * number + step})


class WatchedLoop(parts.ExperimentLoop):
    """A loop that writes its final state to a file."""

    def run(self, *given, **options):
        try:
            super().run(*given, **options)
        finally:
            (FOLDER / "snapshot").write_bytes(comparable(self.runner))


parts.ExperimentLoop = WatchedLoop

if __name__ == "__main__":
    (FOLDER / "steps").mkdir()
    results = tune.Tuner(
        train,
        param_space={"number": tune.grid_search(list(range(len(OPTIONS.ways))))},
        tune_config=tune.TuneConfig(metric="value", mode="max", seed=1),
        run_config=tune.RunConfig(
            name="search",
            storage_path=str(FOLDER),
            failure_config=tune.FailureConfig(**OPTIONS.failures),
        ),
    ).fit()
    told = [[result.status, str(result.error or "")] for result in results]
    (FOLDER / "results.json").write_text(json.dumps(told), encoding="utf-8")
