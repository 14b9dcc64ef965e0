"""The GPU use of each trial is recorded over all attempts and displayed."""

from __future__ import annotations

import pytest

from tests.unit.scheduler.scripted_runner import Story
from tunemq.testing.comparable_state import comparable
from tunemq_scheduler.api import farm_answer_types as a
from tunemq_scheduler.cli.farm_tables import show_detail
from tunemq_scheduler.core.runner_snapshot import dump
from tunemq_scheduler.core.trial_runner import TrialRunner
from tunemq_shared.protocol import messages as m
from tunemq_shared.protocol.device_use import DeviceUse

FIRST = DeviceUse("GPU-a", "H100", 10.0, 1.0, 0.5, 2e9, 100.0)
SECOND = DeviceUse("GPU-b", "H100", 30.0, 1.0, 1.0, 1e9, 50.0)
AGAIN = DeviceUse("GPU-a", "H100", 10.0, 1.0, 1.0, 3e9, 300.0)
TOTAL = (DeviceUse("GPU-a", "H100", 20.0, 1.0, 0.75, 3e9, 400.0), SECOND)


def used(trial: str, attempt: int, *devices: DeviceUse) -> m.DevicesUsed:
    return m.DevicesUsed(trial, attempt, devices)


def test_devices_used_sum_over_all_attempts_including_lost_ones() -> None:
    story = Story(max_failures=1)
    story.start("a")
    story.die("a")
    story.tell(used("a", 1, FIRST))
    story.free("a")
    story.choose("a")
    story.tell(used("a", 2, SECOND))
    story.tell(used("a", 1, AGAIN))  # sent late by a node that was away
    story.finish("a", 2)
    story.free("a", 2)
    assert story.runner.summary("a").devices_used == TOTAL


def test_devices_used_are_recorded_between_the_trials_end_and_its_freed_slot() -> None:
    story = Story()
    story.start("a")
    story.finish("a")
    story.tell(used("a", 1, FIRST))
    story.free("a")
    assert story.runner.summary("a").devices_used == (FIRST,)
    assert story.tell(used("a", 1, FIRST)) == []  # too late: the trial has finished and is archived
    assert story.runner.summary("a").devices_used == (FIRST,)


def test_devices_used_are_in_snapshots() -> None:
    story = Story()
    story.start("a")
    story.tell(used("a", 1, FIRST))
    again = TrialRunner.load(story.settings, dump(story.runner), {})
    assert again.live["a"].devices_used == (FIRST,)
    assert comparable(again) == comparable(story.runner)


def shown(capsys: pytest.CaptureFixture[str], *uses: a.DeviceUseRow) -> list[str]:
    row = a.ExperimentRow(
        name="e", id="e", owner="me", priority=0, state="RUNNING", submitted=0.0, started=0.0
    )
    trial = a.TrialRow(trial="t1", name="t1", status="TERMINATED", devices_used=uses)
    show_detail(a.ExperimentDetail(experiment=row, trials=(trial,)), now=1.0)
    return capsys.readouterr().out.splitlines()


def test_table_of_trials_shows_devices_used_where_any_trial_had_a_gpu(capsys) -> None:
    first = a.DeviceUseRow(uuid="A", seconds=10, utilisation=0.5, memory_peak=2e9, energy_j=7200.0)
    other = a.DeviceUseRow(uuid="B", seconds=30, utilisation=0.9, memory_peak=5e9, energy_j=3600.0)
    header, _, line = shown(capsys, first, other)[-3:]
    assert " gpu " in header
    assert "80% 5.0 GB 3.0 Wh" in line
    assert "Wh" not in shown(capsys, a.DeviceUseRow(uuid="A"))[-1]
    assert " gpu " not in shown(capsys)[-3]
