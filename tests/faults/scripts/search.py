"""A search that does what its arguments say, for tests that kill parts of it.

``search.py FOLDER OPTIONS``: the trials write to FOLDER, beside TuneMQ's files; OPTIONS is the JSON
of an `Options`. When a step begins, its trial appends a line with the step and the process to
``FOLDER/steps/<number of the trial>``. At its end, the search writes its state to
``FOLDER/snapshot``.
"""

from __future__ import annotations

import ctypes
import json
import os
import signal
import sys
import threading
import time
from dataclasses import dataclass
from pathlib import Path

import msgspec

import tunemq as tune
import tunemq_scheduler.experiment.run_experiment as parts
import tunemq_scheduler.experiment.search_run as search_parts
from tunemq.testing.comparable_state import comparable
from tunemq_scheduler.experiment.experiment_loop import INTERRUPT_GRACE_S


@dataclass
class Options:
    """The options of the script.

    Attributes:
        trials, steps, step_s: the number of trials, the steps of each, and the seconds that a step
            takes at least.
        save_every: steps between two checkpoints; 0 for no checkpoints.
        lock_step: every step waits for the scheduler.
        kind: of trial: the name of a function below.
        ending: of the script: the name of a function below.
        stop_grace_s: as in `ExperimentPlan`.
        interrupt_grace_s: as in `ExperimentLoop`.
        gate: the step behind this one does not end until the test opens FOLDER/gate further.
    """

    trials: int = 2
    steps: int = 10
    step_s: float = 0.05
    save_every: int = 0
    max_failures: int = 0
    lock_step: bool = False
    kind: str = "plain"
    ending: str = "returns"
    stop_grace_s: float = 5.0
    interrupt_grace_s: float = INTERRUPT_GRACE_S
    gate: int | None = None


FOLDER, OPTIONS = Path(sys.argv[1]), Options(**json.loads(sys.argv[2]))


# --- trials ---------------------------------------------------------------------------------------


def plain(config, in_step=lambda step: None):
    number, first = config["number"], 1
    if (checkpoint := tune.get_checkpoint()) is not None:
        first = 1 + int((Path(checkpoint.path) / "step").read_text(encoding="ascii"))
    log = os.open(FOLDER / "steps" / str(number), os.O_WRONLY | os.O_CREAT | os.O_APPEND)
    for step in range(first, OPTIONS.steps + 1):
        os.write(log, b"%d %d\n" % (step, os.getpid()))
        in_step(step)
        time.sleep(OPTIONS.step_s)
        while OPTIONS.gate is not None and step > int((FOLDER / "gate").read_text("ascii")):
            time.sleep(0.005)  # between two looks
        checkpoint = None
        if OPTIONS.save_every and step % OPTIONS.save_every == 0:
            Path("to_keep").mkdir(exist_ok=True)
            Path("to_keep", "step").write_text(str(step), encoding="ascii")
            checkpoint = tune.Checkpoint.from_directory("to_keep")
        tune.report({"value": 1000 * number + step}, checkpoint=checkpoint)


def process_tree(config):
    """Fork two children that hold every pipe, and a grandchild in a separate session."""
    pids = []
    for is_daemon in (False, False, True):
        reading, writing = os.pipe()
        if os.fork() == 0:
            if is_daemon:
                os.setsid()
                if os.fork():
                    os._exit(0)
            for number in (signal.SIGTERM, signal.SIGHUP, signal.SIGINT):
                signal.signal(number, signal.SIG_IGN)
            os.write(writing, b"%d" % os.getpid())
            while True:
                time.sleep(600)
        pids.append(int(os.read(reading, 20)))
    members = FOLDER / "families" / f"{config['number']}_{os.getpid()}"
    members.with_suffix(".new").write_text(" ".join(map(str, pids)), encoding="ascii")
    members.with_suffix(".new").rename(members)
    plain(config)


def stubborn(config):
    """Ignore every signal that asks it to end, and hold the GIL."""
    for number in (signal.SIGTERM, signal.SIGHUP, signal.SIGINT):
        signal.signal(number, signal.SIG_IGN)
    plain(config, lambda step: step == 2 and ctypes.PyDLL(None).sleep(600))


def first_holds_the_gil(config):
    """Hold the GIL in the third step of the first trial; the other trials train as usual."""
    holds = config["number"] == 0
    plain(config, lambda step: holds and step == 3 and ctypes.PyDLL(None).sleep(90))


# --- the search -----------------------------------------------------------------------------------


class AsksAtEveryResult(tune.Stopper):
    """A stopper that stops nothing and declares no horizon: every step waits for the scheduler."""

    def __call__(self, trial_id, result):
        return False

    def stop_all(self):
        return False


class FailingCallback(tune.Callback):
    def on_trial_result(self, iteration, trials, trial, result, **info):
        if result["training_iteration"] == 1 and trial.config["number"] == 1:
            raise ValueError("the callback fails")


class WatchedLoop(search_parts.ExperimentLoop):
    """A loop that writes its final state, and stops trials whose numbers it reads from stdin."""

    def __init__(self, **given):
        super().__init__(**given)
        self.interrupt_grace_s = OPTIONS.interrupt_grace_s
        threading.Thread(target=self._listen, daemon=True).start()

    def _listen(self):
        while line := os.read(0, 100).decode():
            for trial in [trial for trial in self.trials if int(trial[-5:]) == int(line)]:
                self.request_stop("a test asked for it", trial)

    def run(self, *given, **options):
        try:
            super().run(*given, **options)
        finally:
            (FOLDER / "snapshot").write_bytes(comparable(self.runner))


class Experiment(parts.Experiment):
    def _plan(self, blobs):
        return msgspec.structs.replace(super()._plan(blobs), stop_grace_s=OPTIONS.stop_grace_s)


search_parts.ExperimentLoop, parts.Experiment = WatchedLoop, Experiment


def search(*callbacks):
    for name in ("steps", "families"):
        (FOLDER / name).mkdir(exist_ok=True)
    return tune.Tuner(
        globals()[OPTIONS.kind],
        param_space={"number": tune.grid_search(list(range(OPTIONS.trials)))},
        tune_config=tune.TuneConfig(metric="value", mode="max", seed=1),
        run_config=tune.RunConfig(
            name="search",
            storage_path=str(FOLDER),
            callbacks=callbacks,
            stop=AsksAtEveryResult() if OPTIONS.lock_step else None,
            failure_config=tune.FailureConfig(max_failures=OPTIONS.max_failures),
        ),
    ).fit()


# --- endings --------------------------------------------------------------------------------------


def returns():
    search()


def raises_in_a_callback():
    search(FailingCallback())


def raises_afterwards():
    search()
    raise ValueError("the script fails")


def in_a_thread():
    thread = threading.Thread(target=search)
    thread.start()
    thread.join()


def with_handlers_of_its_own():
    """Print after each search whether the script's handlers are back, and their signals."""
    got = []

    def note(number, frame):
        got.append(number)

    numbers = (signal.SIGINT, signal.SIGTERM)
    for number in numbers:
        signal.signal(number, note)
    try:
        search()
    except KeyboardInterrupt:
        print("KeyboardInterrupt")
    print("handlers are back:", all(signal.getsignal(number) is note for number in numbers), got)


def again_after_ctrl_c():
    try:
        search()
    except KeyboardInterrupt:
        print("once more", flush=True)
        OPTIONS.steps, OPTIONS.kind = 2, "plain"
        search()


if __name__ == "__main__":
    globals()[OPTIONS.ending]()
