"""Decisions about a trial in its ``result.json``, and the results that are read from there."""

from __future__ import annotations

import csv
import json
from pathlib import Path
from typing import Any

import pytest

from tests.unit.scheduler.output.test_result_rebuild import Search
from tunemq import Result
from tunemq_scheduler.core.trial_decisions import TrialDecision
from tunemq_scheduler.results.decision_rows import decisions_in
from tunemq_scheduler.schedulers import SetConfig, TrialScheduler
from tunemq_scheduler.storage.folders import PARAMS_JSON

CHANGED = {"step": 1, "action": "SET_CONFIG", "reason": "x 1 to 2"}
STOPPED = {"step": 2, "action": "STOP", "reason": 'null is "not" enough'}


class ChangesAtOne(TrialScheduler):
    """It changes the configuration at the first step."""

    def on_trial_result(self, runner: Any, trial: Any, result: dict[str, Any]) -> Any:
        if result["training_iteration"] == 1:
            return SetConfig(trial, str(CHANGED["reason"]), {"x": 2})
        return self.CONTINUE


class StopsAtTwo(TrialScheduler):
    """It stops the trial at the second step."""

    def on_trial_result(self, runner: Any, trial: Any, result: dict[str, Any]) -> Any:
        if result["training_iteration"] == 2:
            return self.STOP.because(str(STOPPED["reason"]))
        return self.CONTINUE


SCHEDULERS = pytest.mark.parametrize(
    ("scheduler", "told"), [(ChangesAtOne, CHANGED), (StopsAtTwo, STOPPED)]
)


def rebuilt(folder: Path, scheduler: type[TrialScheduler]) -> Path:
    """Return the folder of a trial whose files were written anew from the journal."""
    search = Search(folder, scheduler())
    search.restart()
    return search.folder


def without_times(rows: list[dict[str, Any]]) -> list[dict[str, Any]]:
    return [{key: value for key, value in row.items() if key != "elapsed_s"} for row in rows]


@SCHEDULERS
def test_row_has_the_decisions_up_to_its_step_and_the_table_has_none(
    tmp_path: Path, scheduler: type[TrialScheduler], told: dict[str, Any]
) -> None:
    folder = rebuilt(tmp_path, scheduler)
    rows = [json.loads(line) for line in (folder / "result.json").read_text().splitlines()]
    assert "decisions" not in rows[0]
    assert without_times(rows[1]["decisions"]) == [told]
    with (folder / "progress.csv").open(newline="") as file:
        table = list(csv.DictReader(file))
    assert [row["training_iteration"] for row in table] == ["1", "2"]
    assert "decisions" not in table[0]


@SCHEDULERS
def test_result_of_a_folder_has_the_decisions_of_its_rows(
    tmp_path: Path, scheduler: type[TrialScheduler], told: dict[str, Any]
) -> None:
    folder = rebuilt(tmp_path, scheduler)
    assert (folder / PARAMS_JSON).exists()
    (found,) = Result.from_path(folder).decisions
    assert (found.step, found.action, found.reason) == tuple(told.values())


def test_foreign_value_in_place_of_a_decision_is_left_out() -> None:
    foreign = [
        *(3, None, [], "STOP", {}, {"step": "1", "action": "STOP"}, {"step": 1}),
        {"step": 1, "action": "STOP", "reason": 5},
        {"step": 1, "action": "STOP", "reason": "x" * 501},
        {"step": 1, "action": "PAUSE", "color": "red"},
    ]
    rows = [{"decisions": 4}, {"decisions": "all"}, {}, {"decisions": foreign}]
    assert list(decisions_in(rows)) == [TrialDecision(1, "PAUSE")]
