"""Searches in the test's process by the public API, and their remains."""

from __future__ import annotations

import contextlib
import csv
import dataclasses
import json
from pathlib import Path
from typing import Any

import psutil

import tunemq as tune
from tests.support.stores.object_servers import SERVER_PIDS

_OF_TUNE_CONFIG = {field.name for field in dataclasses.fields(tune.TuneConfig)}
_OF_CHECKPOINTS = {field.name for field in dataclasses.fields(tune.CheckpointConfig)}
_OF_FAILURES = {field.name for field in dataclasses.fields(tune.FailureConfig)}


def tuner(trainable: Any, space: dict[str, Any] | None = None, **options: Any) -> tune.Tuner:
    """A `Tuner`; each option goes into the configuration that has a field of its name."""
    kinds: dict[str, dict[str, Any]] = {"tune": {}, "checkpoints": {}, "failures": {}, "run": {}}
    for name, value in options.items():
        if name in _OF_TUNE_CONFIG:
            kinds["tune"][name] = value
        elif name in _OF_CHECKPOINTS:
            kinds["checkpoints"][name] = value
        elif name in _OF_FAILURES:
            kinds["failures"][name] = value
        else:
            kinds["run"][name] = value
    return tune.Tuner(
        trainable,
        param_space=space,
        tune_config=tune.TuneConfig(**kinds["tune"]),
        run_config=tune.RunConfig(
            **{
                "verbose": 0,
                "checkpoint_config": tune.CheckpointConfig(**kinds["checkpoints"]),
                "failure_config": tune.FailureConfig(**kinds["failures"]),
                **kinds["run"],
            }
        ),
    )


def fit(
    trainable: Any, space: dict[str, Any] | None = None, *, debug: bool = False, **options: Any
) -> tune.ResultGrid:
    """Run a search; see `tuner`."""
    return tuner(trainable, space, **options).fit(debug=debug)


def results_of(result: tune.Result) -> list[dict[str, Any]]:
    """The lines of the trial's ``result.json``."""
    # Text has more line ends than files have.
    lines = Path(result.path, "result.json").read_bytes().splitlines()
    return [json.loads(line) for line in lines]


def table_of(result: tune.Result) -> list[dict[str, str]]:
    """The rows of the trial's ``progress.csv``."""
    with Path(result.path, "progress.csv").open(encoding="utf-8", newline="") as file:
        return list(csv.DictReader(file))


def printed_by(result: tune.Result, stream: str = "stdout") -> str:
    """The output of the trial."""
    return Path(result.path, stream).read_text(encoding="utf-8")


def farm_processes(process: psutil.Process | None = None) -> list[psutil.Process]:
    """The processes of a script's farm, by default of this process, except object servers."""
    running = []
    for child in (process or psutil.Process()).children(recursive=True):
        with contextlib.suppress(psutil.NoSuchProcess):  # it has just ended
            is_server = SERVER_PIDS & {child.pid, child.ppid()}  # or one that a server started
            if child.status() != psutil.STATUS_ZOMBIE and not is_server:
                running.append(child)
    return running
