"""F18, F22: `Result.history` of a finished search names its damaged result files."""

from __future__ import annotations

import logging
import os
from collections.abc import Callable
from pathlib import Path

import pytest

import tunemq as tune
from tests.support.searches.journals import ended_searches
from tests.support.searches.searches import fit

__all__ = ["ended_searches"]

pytestmark = [pytest.mark.faults, pytest.mark.integration]

STEPS = 6
LOGGER = "tunemq_scheduler.results.result"


def reports(config):
    for step in range(STEPS):
        tune.report({"loss": float(step)})


def cut(file: Path) -> None:
    content = file.read_bytes()
    file.write_bytes(content[: len(content) // 2])


def double(file: Path) -> None:
    file.write_bytes(file.read_bytes() * 2)


def flip_in_the_middle(file: Path) -> None:
    lines = file.read_bytes().splitlines(keepends=True)
    lines[2] = b"#" + lines[2][1:]
    file.write_bytes(b"".join(lines))


@pytest.mark.parametrize(
    ("damage", "rows", "said"),
    [
        (cut, 3, "has 3 rows up to step 3"),
        (double, 6, "has 6 rows up to step 6, and 6 rows that are doubled"),
        (flip_in_the_middle, 5, "and 1 lines that cannot be read"),
        (os.unlink, 1, "is missing: of 6 steps only the last is known"),
    ],
)
def test_f18_history_of_a_damaged_result_file_is_named_once(
    tmp_path: Path,
    caplog: pytest.LogCaptureFixture,
    damage: Callable[[Path], None],
    rows: int,
    said: str,
):
    first = fit(reports, {"n": tune.grid_search([0, 1])}, storage_path=str(tmp_path), name="e")
    assert [len(one.metrics_dataframe) for one in first] == [STEPS, STEPS]
    file = Path(first[0].path, "result.json")
    damage(file)
    caplog.clear()
    restored = tune.Tuner.restore(str(tmp_path / "e"), reports).get_results()
    for _ in range(2):
        assert len(restored[0].metrics_dataframe) in (rows, rows - 1)  # a row may be cut in two
        assert len(restored[1].history) == STEPS
    (warned,) = [one.getMessage() for one in caplog.records if one.name == LOGGER]
    assert warned.startswith(str(file))
    assert said in warned or damage is cut
    if damage is not os.unlink:
        assert "the journal ends with step 6" in warned


def test_f18_history_of_whole_files_is_not_warned_of(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
):
    caplog.set_level(logging.WARNING, LOGGER)

    def fails_at_first(config):
        for step in range(STEPS):
            tune.report({"loss": float(step)})
            if step == 3 and not (tmp_path / "failed").exists():
                raise ValueError("on purpose")

    found = fit(fails_at_first, storage_path=str(tmp_path), name="e")
    assert len(found[0].history) == 4
    (tmp_path / "failed").touch()
    restored = tune.Tuner.restore(str(tmp_path / "e"), fails_at_first, restart_errored=True)
    assert len(restored.get_results()[0].history) == 4
    (anew,) = restored.fit()
    assert len(anew.history) == STEPS
    cut(Path(anew.path, "result.json"))
    assert len(tune.Result.from_path(anew.path).history) < STEPS
    assert not [one for one in caplog.records if one.name == LOGGER]


def test_f18_history_while_files_are_written_is_not_warned_of(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
):
    """They follow the journal: callbacks may still write when it has ended."""
    lengths = tmp_path / "lengths"

    class Looks(tune.Callback):
        """Reads the results that the search has so far, as another process would."""

        def on_trial_complete(self, iteration, trials, trial, **info):
            self.look(trial)

        def on_experiment_end(self, trials, **info):
            self.look(trials[0])

        def look(self, trial: tune.TrialView) -> None:
            file = Path(trial.local_path, "result.json")
            file.rename(file.with_suffix(".away"))
            grid = tune.Tuner.restore(str(tmp_path / "e"), reports).get_results()
            with lengths.open("a") as kept:  # to restore the class replaces what it closes over
                print(*(len(one.history) for one in grid), file=kept)
            file.with_suffix(".away").rename(file)

    fit(
        reports,
        {"n": tune.grid_search([0, 1])},
        storage_path=str(tmp_path),
        name="e",
        max_concurrent_trials=1,
        callbacks=[Looks()],
    )
    assert lengths.read_text().splitlines()[-2:] == ["6 1", "1 6"]
    assert not [one for one in caplog.records if one.name == LOGGER]
