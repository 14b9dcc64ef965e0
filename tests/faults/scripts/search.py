"""A search that is told by its arguments what to do, for tests that kill parts of it.

``search.py FOLDER OPTIONS``: FOLDER gets what the trials did, besides what TuneMQ writes; OPTIONS is
the JSON of a `Options`. Each trial writes a line into ``FOLDER/steps/<trial>`` when a step begins:
its number and its process.
"""

from __future__ import annotations

import json
import os
import signal
import sys
import threading
import time
from dataclasses import dataclass
from pathlib import Path

import tunemq as tune


@dataclass
class Options:
    """What to do.

    Attributes:
        trials, steps, step_s: how many, how many each, and how long each takes at least.
        save_every: a checkpoint belongs to every so many steps; 0 for none.
        lock_step: every step waits for the scheduler.
        kind: of trial, a function below.
        ending: of the script, a key of `ENDINGS`.
        fails_at: where ``ending`` wants a failing callback: the step.
    """

    trials: int = 2
    steps: int = 10
    step_s: float = 0.05
    save_every: int = 0
    max_failures: int = 0
    lock_step: bool = False
    kind: str = "plain"
    ending: str = "returns"
    fails_at: int = 3


FOLDER, OPTIONS = Path(sys.argv[1]), Options(**json.loads(sys.argv[2]))


# --- trials -----------------------------------------------------------------------------------------


def run_steps(config, at_step=lambda step: None):
    options, trial = config["options"], tune.get_context().get_trial_id()
    first = 1
    if (checkpoint := tune.get_checkpoint()) is not None:
        first = 1 + int((Path(checkpoint.path) / "step").read_text(encoding="ascii"))
    steps = os.open(config["folder"] / "steps" / trial, os.O_WRONLY | os.O_CREAT | os.O_APPEND)
    for step in range(first, options["steps"] + 1):
        os.write(steps, b"%d %d\n" % (step, os.getpid()))
        time.sleep(options["step_s"])
        at_step(step)
        metrics = {"value": 1000 * config["number"] + step}
        if options["save_every"] and step % options["save_every"] == 0:
            folder = Path(f"to_keep_{os.getpid()}")
            folder.mkdir(exist_ok=True)
            (folder / "step").write_text(str(step), encoding="ascii")
            tune.report(metrics, checkpoint=tune.Checkpoint.from_directory(str(folder)))
        else:
            tune.report(metrics)


def plain(config):
    run_steps(config)


def family(config):
    """Two forked children that hold every pipe, and a grandchild in a session of its own."""
    pids = []
    for is_daemon in (False, False, True):
        reading, writing = os.pipe()
        child = os.fork()
        if child == 0:
            if is_daemon and (os.setsid(), os.fork())[1]:
                os._exit(0)
            os.write(writing, b"%d" % os.getpid())
            for number in (signal.SIGTERM, signal.SIGHUP, signal.SIGINT):
                signal.signal(number, signal.SIG_IGN)
            while True:
                time.sleep(60)
        pids.append(int(os.read(reading, 20)))
    trial = tune.get_context().get_trial_id()
    file = config["folder"] / "families" / f"{trial}_{os.getpid()}"
    file.with_suffix(".new").write_text(" ".join(map(str, pids)), encoding="ascii")
    file.with_suffix(".new").rename(file)
    run_steps(config)


def stubborn(config):
    """Ignores whatever asks it to end, and holds the GIL."""
    import ctypes

    for number in (signal.SIGTERM, signal.SIGHUP, signal.SIGINT):
        signal.signal(number, signal.SIG_IGN)
    run_steps(config, lambda step: step == 2 and ctypes.PyDLL(None).sleep(60))


def first_holds_the_gil(config):
    """The first trial, in its third step, does not let go of the GIL for 30 s; the others go on."""
    import ctypes

    def at_step(step):
        if config["number"] == 0 and step == 3:
            ctypes.PyDLL(None).sleep(30)

    run_steps(config, at_step)


# --- the script -------------------------------------------------------------------------------------


class FailingCallback(tune.Callback):
    def on_trial_result(self, iteration, trials, trial, result, **info):
        if result["training_iteration"] == OPTIONS.fails_at:
            raise ValueError("the callback fails")


class AsksAtEveryResult(tune.Stopper):
    """Never stops anything, and declares no horizon: so every step waits for the scheduler."""

    def __call__(self, trial_id, result):
        return False

    def stop_all(self):
        return False


def search(callbacks=None):
    for name in ("steps", "families"):
        (FOLDER / name).mkdir(exist_ok=True)
    results = tune.Tuner(
        globals()[OPTIONS.kind],
        param_space={
            "number": tune.grid_search(list(range(OPTIONS.trials))),
            "options": vars(OPTIONS),
            "folder": FOLDER,
        },
        tune_config=tune.TuneConfig(metric="value", mode="max", seed=1),
        run_config=tune.RunConfig(
            name="search",
            storage_path=str(FOLDER),
            callbacks=callbacks,
            stop=AsksAtEveryResult() if OPTIONS.lock_step else None,
            failure_config=tune.FailureConfig(max_failures=OPTIONS.max_failures),
        ),
    ).fit()
    print(json.dumps({"done": [[r.trial_id, r.status, str(r.error)] for r in results]}))
    return results


search()
