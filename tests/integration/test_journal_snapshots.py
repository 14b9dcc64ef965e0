"""A search with many snapshots: its journal gives the same state as its runner.

Before a snapshot drops results that only the journal has, these are on the disk.
"""

from __future__ import annotations

import os
from pathlib import Path

import pytest

import tunemq as tune
from tests.support.searches.searches import fit
from tunemq.schedulers import ASHAScheduler
from tunemq.testing.comparable_state import comparable
from tunemq_scheduler.core.trial_runner import TrialRunner
from tunemq_scheduler.experiment.open_experiment import OpenExperiment
from tunemq_scheduler.journal import journal_files, journal_writer
from tunemq_scheduler.journal.journal_files import FILE_NAME
from tunemq_scheduler.journal.journal_reader import recover
from tunemq_scheduler.journal.journal_replay import replay_recovered
from tunemq_scheduler.output import pending_fsyncs

pytestmark = pytest.mark.integration


def climbs(config):
    for step in range(1, 10):
        tune.report({"score": config["slope"] * step})


@pytest.mark.parametrize("segment_bytes", [1_000, 5_000])
def test_shortened_journal_gives_the_same_state(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, segment_bytes: int
) -> None:
    monkeypatch.setattr(journal_writer, "SEGMENT_BYTES", segment_bytes)
    runners: list[TrialRunner] = []
    take = OpenExperiment.take_snapshot

    def noted(self: OpenExperiment) -> None:
        runners.append(self.runner)
        take(self)

    monkeypatch.setattr(OpenExperiment, "take_snapshot", noted)
    grid = fit(
        climbs,
        {"slope": tune.uniform(0.0, 1.0)},
        name="e",
        storage_path=str(tmp_path),
        num_samples=12,
        metric="score",
        mode="max",
        scheduler=ASHAScheduler(max_t=9, grace_period=1, reduction_factor=3),
        seed=1,
    )
    assert not grid.errors
    found = recover(Path(grid.experiment_path, FILE_NAME))
    assert found.snapshot is not None
    assert found.finished or segment_bytes > 1_000
    assert found.snapshot_turn > 5
    assert comparable(replay_recovered(found)) == comparable(runners[-1])
    assert len({id(runner) for runner in runners}) == 1


class Disk:
    """Tracks how much of each file a power cut would leave."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self._sizes: dict[tuple[int, int], int] = {}
        self._fsync = os.fsync
        monkeypatch.setattr(os, "fsync", self.fsync)

    def fsync(self, descriptor: int) -> None:
        found = os.fstat(descriptor)
        self._fsync(descriptor)
        self._sizes[found.st_dev, found.st_ino] = found.st_size

    def lacks(self, path: Path) -> int:
        """Return how many bytes at the file's end are not durable; -1 if its name is not."""
        found, folder = path.stat(), path.parent.stat()
        size = self._sizes.get((found.st_dev, found.st_ino), 0)
        return found.st_size - size if (folder.st_dev, folder.st_ino) in self._sizes else -1


def fails_first(config):
    for step in range(1, 10):
        tune.report({"score": config["slope"] * step, **({"late": 1} if step > 5 else {})})
    if config["slope"] > 0.5:
        raise ValueError("too steep")


@pytest.mark.parametrize("at_once", [1000, 0])
def test_f04_trial_files_are_on_disk_before_a_snapshot_drops_their_records(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, at_once: int
) -> None:
    monkeypatch.setattr(journal_writer, "SEGMENT_BYTES", 3_000)
    monkeypatch.setattr(
        pending_fsyncs, "AT_ONCE", at_once
    )  # with 0 a thread does it, as far as it can
    disk = Disk(monkeypatch)
    put_in_place = journal_files.put_in_place
    missing: list[tuple[str, int]] = []
    names: set[str] = set()
    snapshots = 0

    def noted(part: Path, path: Path) -> None:
        nonlocal snapshots
        if path.suffix == journal_files.SNAPSHOT_SUFFIX:
            snapshots += 1
            found = [
                one
                for kind in ("*.json", "*.csv", "*.pkl", "error.txt")
                for one in tmp_path.glob(f"e/*/{kind}")
            ]
            names.update(one.name for one in found)
            missing.extend((str(one), lacks) for one in found if (lacks := disk.lacks(one)))
        put_in_place(part, path)

    monkeypatch.setattr(journal_files, "put_in_place", noted)
    fit(
        fails_first,
        {"slope": tune.grid_search([0.1, 0.6, 0.2, 0.7])},
        name="e",
        storage_path=str(tmp_path),
        metric="score",
        mode="max",
    )
    assert snapshots > 0
    assert names >= {"result.json", "progress.csv", "params.json", "params.pkl"}
    assert not missing
