"""A search whose trials die, or wait, while they clean up after their last result.

``stopping_search.py FOLDER OPTIONS``: OPTIONS is the JSON of an `Options`. Each trial that begins
to clean up adds a line to ``FOLDER/cleaned``. At its end, the search writes the status and the
error of each trial to FOLDER/results.json, and its state to ``FOLDER/snapshot``. If the search
exists already, the script resumes it.
"""

from __future__ import annotations

import json
import os
import signal
import sys
import time
from dataclasses import dataclass
from pathlib import Path

import tunemq as tune
import tunemq_scheduler.experiment.search_run as parts
from tunemq.schedulers import ASHAScheduler
from tunemq.testing.comparable_state import comparable


@dataclass
class Options:
    """The options of the script.

    Attributes:
        way: what a trial does while it cleans up: it ``is_killed``, ``exits`` or ``waits``.
        form: ``class`` or ``function``.
        stop: what stops a trial at its step 8: ``criteria``, ``max_t`` or its own ``done``.
        last: the last step that the criteria allow.
        max_failures: of the search's `FailureConfig`.
    """

    way: str
    form: str = "class"
    stop: str = "criteria"
    last: int = 8
    max_failures: int = 0


FOLDER, OPTIONS = Path(sys.argv[1]), Options(**json.loads(sys.argv[2]))


def clean_up():
    with open(FOLDER / "cleaned", "a", encoding="utf-8") as file:
        file.write(f"{os.getpid()}\n")
    if OPTIONS.way == "is_killed":
        os.kill(os.getpid(), signal.SIGKILL)
    elif OPTIONS.way == "exits":
        os._exit(7)
    elif OPTIONS.way == "waits":
        time.sleep(600)


class Counts(tune.Trainable):
    def setup(self, config):
        self.step_now = 0

    def step(self):
        self.step_now += 1
        told = {"value": self.step_now}
        return told | {"done": self.step_now == 8} if OPTIONS.stop == "done" else told

    def save_checkpoint(self, folder):
        Path(folder, "step").write_text(str(self.step_now), encoding="utf-8")

    def load_checkpoint(self, folder):
        self.step_now = int(Path(folder, "step").read_text(encoding="utf-8"))

    def cleanup(self):
        clean_up()


def count(_config):
    step, checkpoint = 0, tune.get_checkpoint()
    if checkpoint is not None:
        with checkpoint.as_directory() as folder:
            step = int(Path(folder, "step").read_text(encoding="utf-8"))
    Path("saved").mkdir(exist_ok=True)
    try:
        while True:
            step += 1
            Path("saved", "step").write_text(str(step), encoding="utf-8")
            told = {"value": step}
            if OPTIONS.stop == "done":
                told["done"] = step == 8
            tune.report(told, checkpoint=tune.Checkpoint.from_directory("saved"))
    finally:
        clean_up()


class WatchedLoop(parts.ExperimentLoop):
    """A loop that writes its final state to a file."""

    def run(self, *given, **options):
        try:
            super().run(*given, **options)
        finally:
            (FOLDER / "snapshot").write_bytes(comparable(self.runner))


parts.ExperimentLoop = WatchedLoop

if __name__ == "__main__":
    trainable = Counts if OPTIONS.form == "class" else count
    by_asha = OPTIONS.stop == "max_t"
    config = tune.RunConfig(
        name="search",
        storage_path=str(FOLDER),
        stop={"training_iteration": OPTIONS.last} if OPTIONS.stop == "criteria" else None,
        failure_config=tune.FailureConfig(max_failures=OPTIONS.max_failures),
        checkpoint_config=tune.CheckpointConfig(
            checkpoint_frequency=2 if OPTIONS.form == "class" else 0
        ),
    )
    if tune.Tuner.can_restore(FOLDER / "search"):
        tuner = tune.Tuner.restore(FOLDER / "search", trainable, run_config=config)
    else:
        tuner = tune.Tuner(
            trainable,
            param_space={"number": tune.grid_search([0, 1])},
            tune_config=tune.TuneConfig(
                metric="value",
                mode="max",
                scheduler=ASHAScheduler(max_t=8, grace_period=8) if by_asha else None,
            ),
            run_config=config,
        )
    told = [[result.status, str(result.error or "")] for result in tuner.fit()]
    (FOLDER / "results.json").write_text(json.dumps(told), encoding="utf-8")
