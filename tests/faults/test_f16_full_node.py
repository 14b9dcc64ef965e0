"""F16: one node of a farm has a full disk; the trials that need its disk run on other nodes."""

from __future__ import annotations

import math
import os
import subprocess
import threading
from pathlib import Path

import pytest

import tunemq as tune
from tests.support.farms.own_farm import NodeProcess, farm
from tests.support.journal_records import read_records
from tests.support.searches.chain import chain, expected, open_gate
from tests.support.small_disk import on_small_disk
from tests.support.waiting import eventually
from tunemq_scheduler.core.nodes.failing_nodes import FIRST_PAUSE_S, TRIALS_IN_A_ROW
from tunemq_scheduler.journal.journal_files import FILE_NAME
from tunemq_shared.protocol import messages as m

__all__ = ["farm"]

pytestmark = [pytest.mark.faults, pytest.mark.integration]

TRIALS, STEPS = 8, 12


class NodeOnAFullDisk(NodeProcess):
    """A node that has 64 KiB for copies of checkpoints."""

    def __init__(self, url: str, folder: Path, disk: Path) -> None:
        self._disk = disk
        super().__init__(url, "full", folder, 1, {})

    def start(self) -> None:
        command = on_small_disk(self._disk, self._command, options="size=64k")
        self.process = subprocess.Popen(command, stdin=subprocess.DEVNULL)


def test_f16_node_with_a_full_disk_is_set_aside_and_no_trial_ends(farm, tmp_path, minio, bucket):
    own = farm(nodes=1)
    folder = Path(os.environ["TUNEMQ_RESULTS"]) / "search"
    executed = tmp_path / "executed"
    executed.mkdir()
    # Trials wait halfway until the other node has joined.
    open_gate(tmp_path / "gate", STEPS // 2)
    tuner = tune.Tuner(
        chain,
        param_space={
            "seed": tune.grid_search(list(range(TRIALS))),
            "executed": str(executed),
            "steps": STEPS,
            "save_every": 3,
            "payload": 100_000,
            "step_s": 0.1,
            "gate": str(tmp_path / "gate"),
        },
        tune_config=tune.TuneConfig(metric="score", mode="max", seed=1),
        run_config=tune.RunConfig(name="search", storage_path=minio.address(bucket, "runs")),
    )
    results: list[tune.ResultGrid] = []
    search = threading.Thread(target=lambda: results.append(tuner.fit()), daemon=True)
    search.start()

    def events(kind):
        return [e.event for e in read_records(folder / FILE_NAME) if isinstance(e.event, kind)]

    eventually(lambda: list(folder.glob(".cache/*/checkpoint*")), within=60, message=own.logs)
    own.nodes.append(NodeOnAFullDisk(own.server.url, tmp_path / "full", folder / ".cache"))
    eventually(lambda: len(events(m.NodeJoined)) == 2, within=60, message=own.logs)
    open_gate(tmp_path / "gate", STEPS)
    search.join(200)
    assert not search.is_alive(), own.logs()

    (ended,) = results
    for result in ended:
        assert result.error is None, result.error
        assert [line["training_iteration"] for line in result.history] == list(range(1, STEPS + 1))
        assert result.metrics["chain"] == expected(result.config, STEPS)
    failures = failures_until_its_pause_has_ended(folder / FILE_NAME)
    assert {failure.kind for failure in failures} == {"storage"}
    for failure in failures:
        assert f"{folder}/.cache" in failure.error
        assert "No space left on device (" in failure.error
        assert "bytes are free)" in failure.error
    # Each of ``TRIALS_IN_A_ROW`` trials failed there once or twice; then the node was paused.
    assert len({failure.trial for failure in failures}) == TRIALS_IN_A_ROW
    assert len(failures) < 3 * TRIALS_IN_A_ROW


def failures_until_its_pause_has_ended(journal: Path) -> list[m.TrialFailed]:
    """Return the failures before the end of the node's pause; after it the node is tried again."""
    failures: list[m.TrialFailed] = []
    elapsed, is_over_at = 0.0, math.inf
    for event in (entry.event for entry in read_records(journal)):
        if isinstance(event, m.Tick):
            elapsed = event.elapsed
        elif isinstance(event, m.TrialFailed) and elapsed < is_over_at:
            failures.append(event)
            if len({failure.trial for failure in failures}) == TRIALS_IN_A_ROW:
                is_over_at = min(is_over_at, elapsed + FIRST_PAUSE_S)
    return failures
