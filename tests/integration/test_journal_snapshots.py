"""A search that takes many snapshots: its journal gives the state that its runner had."""

from __future__ import annotations

from pathlib import Path

import pytest

import tunemq as tune
from tests.searches import fit
from tunemq.schedulers import ASHAScheduler
from tunemq_scheduler.core.runner import TrialRunner
from tunemq_scheduler.journal import FILE_NAME, recover, writing
from tunemq_scheduler.opening import Opened
from tunemq_scheduler.replay import replay_recovered

pytestmark = pytest.mark.integration


def climbs(config):
    for step in range(1, 10):
        tune.report({"score": config["slope"] * step})


@pytest.mark.parametrize("segment_bytes", [1_000, 5_000])
def test_the_journal_gives_the_state_whatever_it_was_shortened_to(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, segment_bytes: int
) -> None:
    monkeypatch.setattr(writing, "SEGMENT_BYTES", segment_bytes)
    runners: list[TrialRunner] = []
    take = Opened.take_snapshot

    def noted(self: Opened) -> None:
        runners.append(self.runner)
        take(self)

    monkeypatch.setattr(Opened, "take_snapshot", noted)
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
    assert replay_recovered(found).snapshot() == runners[-1].snapshot()
    assert len({id(runner) for runner in runners}) == 1
