"""Log policies, and a child process that runs out of GPU memory, on real nodes and processes."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

import tunemq as tune
from tests.support.farms.own_farm import Listener, farm
from tests.support.journal_records import read_records
from tests.support.searches.searches import fit
from tunemq_scheduler.core.trials.trial import TrialSummary
from tunemq_scheduler.journal.journal_files import FILE_NAME
from tunemq_scheduler.journal.journal_reader import recover
from tunemq_scheduler.journal.journal_replay import replay_recovered
from tunemq_shared.protocol import messages as m

__all__ = ["farm"]

pytestmark = pytest.mark.integration

ECC, ASSERT = r"uncorrectable +ECC", "device-side assert"
#: A pattern whose time doubles with each x if no y follows.
CATASTROPHIC = r"(x+x+)+y"
POLICIES = [
    tune.LogPolicy(ECC, "exclude_node"),
    tune.LogPolicy(CATASTROPHIC, "do_not_retry"),
    tune.LogPolicy(ASSERT, "do_not_retry"),
]


def is_first(config: dict[str, Any]) -> bool:
    """Return whether this is the trial's first attempt."""
    folder = tune.get_context().get_trial_dir()
    try:
        Path(folder, "was_here").touch(exist_ok=False)
    except FileExistsError:
        return False
    return True


def train(config: dict[str, Any]) -> None:
    tune.report({"step": 1})
    print("x" * 500, flush=True)
    if config["way"] == "bad_node" and is_first(config):
        # The last output comes straight from the file descriptor, and without a newline.
        os.write(2, b"NCCL: uncorrectable ECC error encountered")
        os.kill(os.getpid(), signal.SIGKILL)
    if config["way"] == "asserts":
        print("CUDA error: device-side assert triggered")
        raise RuntimeError("it went wrong")
    tune.report({"step": 2})


def events_of(results: tune.ResultGrid) -> list[m.Event]:
    path = Path(results.experiment_path, FILE_NAME)
    return [entry.event for entry in read_records(path)]


def nodes_of(events: list[m.Event], trial: str) -> list[str]:
    """Return the names of the nodes on which the trial's attempts began, in order."""
    names: dict[str, str] = {}
    found, instance_id = [], ""
    for event in events:
        if isinstance(event, m.NodeJoined):
            names[event.instance_id] = event.node
        elif isinstance(event, m.BatchRead):
            instance_id = event.instance_id
        elif isinstance(event, m.TrialStarted) and event.trial == trial:
            found.append(names[instance_id])
    return found


def summary_of(results: tune.ResultGrid, place: int) -> TrialSummary:
    """Return the trial's summary from the journal."""
    runner = replay_recovered(recover(Path(results.experiment_path, FILE_NAME)))
    (found,) = [
        runner.summary(one)
        for one in (*runner.finished, *runner.live)
        if runner.summary(one).number == place
    ]
    return found


def test_f23_log_policies_decide_on_failures_by_trial_output(farm: Any) -> None:
    farm(nodes=2)
    told: list[str] = []
    results = fit(
        train,
        {"way": tune.grid_search(["bad_node", "asserts", "continues"])},
        max_failures=5,
        log_policies=POLICIES,
        progress_reporter=Listener(told),
        verbose=1,
    )

    events = events_of(results)
    assert [one.status for one in results] == ["TERMINATED", "ERROR", "TERMINATED"], told
    bad, asserts, _ = results
    (matched,) = [e for e in events if isinstance(e, m.LogMatched) and e.pattern == ECC]
    assert matched.line == "NCCL: uncorrectable ECC error encountered"
    first, second = nodes_of(events, matched.trial)
    assert first != second
    place = summary_of(results, 0)
    assert (place.excluded, place.num_failures, place.failures) == ((first,), 1, {})
    assert f"it is not placed on node {first} any more" in Path(bad.path, "error.txt").read_text()

    # The trial is not retried; the pattern that times out has no influence on that.
    assert summary_of(results, 1).attempt == 1
    assert "not retried, because it printed 'CUDA error: device-side assert" in str(asserts.error)
    for failure in [e for e in events if isinstance(e, m.TrialProcessDied | m.TrialFailed)]:
        before = events[: events.index(failure)]
        assert any(isinstance(e, m.LogMatched) and e.trial == failure.trial for e in before)
    assert any(f"The log policy {CATASTROPHIC!r} is not applied" in text for text in told)


def rank_runs_out(config: dict[str, Any]) -> None:
    tune.report({"step": 1})
    if is_first(config):
        said = "print('torch.OutOfMemoryError: CUDA out of memory.', file=__import__('sys').stderr)"
        subprocess.run([sys.executable, "-c", said], check=True)
        os._exit(1)  # as a launcher does when one of its ranks has failed
    tune.report({"step": 2})


def test_f23_gpu_out_of_memory_in_a_child_is_retried_once_with_a_whole_gpu(
    farm: Any,
) -> None:
    farm(nodes=1, options=("--resources", '{"gpu": 1}'))
    results = fit(
        tune.with_resources(rank_runs_out, {"cpu": 1, "gpu": 0.5}), retry_cuda_memory="alone"
    )

    (result,) = results
    assert result.status == "TERMINATED"
    (died,) = [e for e in events_of(results) if isinstance(e, m.TrialProcessDied)]
    assert died.cause == "cuda_memory"
    assert summary_of(results, 0).resources == {"cpu": 1.0, "gpu": 1.0}
    written = Path(result.path, "error.txt").read_text()
    assert "out of GPU memory: it shared a GPU (gpu=0.5), and gets a whole one" in written
