"""F18: a journal that lost its last turns; trials' files are cut to match, without double rows."""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Any

import pytest

import tunemq as tune
from tests.support.searches.searches import results_of, table_of, tuner
from tunemq_scheduler.api.tuner import Tuner
from tunemq_scheduler.journal.journal_files import FILE_NAME, turns_file
from tunemq_scheduler.journal.journal_frames import JournalFrames
from tunemq_scheduler.journal.salvage import salvage
from tunemq_shared.protocol.messages import ConfigSuggested, TrialFinished, decode_records

pytestmark = pytest.mark.integration

STEPS = 6


def climbs(config: dict[str, Any]) -> None:
    """Report six steps, each with a checkpoint."""
    step = 0
    if (given := tune.get_checkpoint()) is not None:
        step = json.loads(Path(given.path, "step").read_text(encoding="ascii"))
    while step < STEPS:
        step += 1
        Path("state").mkdir(exist_ok=True)
        Path("state", "step").write_text(str(step), encoding="ascii")
        saved = tune.Checkpoint.from_directory("state")
        tune.report({"score": config["slope"] * step}, checkpoint=saved)


def searched(folder: Path) -> Path:
    """Return the folder of a finished experiment with four trials."""
    space = {"slope": tune.grid_search([1.0, 2.0, 3.0, 4.0])}
    options = {"metric": "score", "mode": "max", "max_concurrent_trials": 2}
    grid = tuner(climbs, space, name="e", storage_path=str(folder), **options).fit()
    assert not grid.errors
    return Path(grid.experiment_path)


def check_results(grid: tune.ResultGrid) -> None:
    """Check that each step of each trial has one row in each file, with the right values."""
    assert [one.status for one in grid] == ["TERMINATED"] * 4, grid.errors
    for result in grid:
        slope = result.config["slope"]
        expected = [(step, slope * step) for step in range(1, STEPS + 1)]
        rows = [(row["training_iteration"], row["score"]) for row in results_of(result)]
        table = [(int(row["training_iteration"]), float(row["score"])) for row in table_of(result)]
        frame = result.metrics_dataframe
        assert rows == expected
        assert table == expected
        assert [*zip(frame["training_iteration"], frame["score"], strict=True)] == expected


def place_of(folder: Path, kind: type, number: int) -> int:
    """Return the offset of the turn with the event of this kind and number."""
    path = turns_file(folder, 1)
    for frame in list(JournalFrames(path))[1:]:
        number -= sum(isinstance(one.event, kind) for one in decode_records(frame.payload))
        if number <= 0:
            return frame.offset
    raise AssertionError(f"there are fewer {kind.__name__}")


@pytest.mark.parametrize(
    ("kind", "number", "is_salvaged"), [(TrialFinished, 1, True), (ConfigSuggested, 4, False)]
)
def test_f18_search_whose_journal_lost_turns_has_each_row_once(
    tmp_path: Path,
    *,
    kind: type,
    number: int,
    is_salvaged: bool,
    capsys: pytest.CaptureFixture[str],
) -> None:
    folder = searched(tmp_path)
    journal = folder / FILE_NAME
    path, place = turns_file(journal, 1), place_of(journal, kind, number)
    if is_salvaged:
        with open(path, "r+b") as file:
            file.seek(place + 5)
            file.write(b"\xff\xff")
        done = salvage(journal)
        assert done.kept is not None
        assert done.unusable
    else:
        os.truncate(path, place)

    options = tune.RunConfig(name="e", storage_path=str(tmp_path), verbose=1)
    grid = Tuner.restore(str(folder), climbs, run_config=options).fit()

    check_results(grid)
    told = capsys.readouterr().out
    moved = {
        f"{one.parent / 'result.json'} ({len(one.read_bytes().splitlines())})"
        for one in folder.glob("*/result.unrecorded.json")
    }
    assert any(one in told for one in moved)
