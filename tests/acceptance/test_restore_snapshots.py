"""Restores of searches whose journals were compacted while they ran."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

import tunemq as tune
from tests.support.searches.searches import results_of, table_of
from tunemq_scheduler.journal import journal_writer
from tunemq_scheduler.journal.journal_files import FILE_NAME
from tunemq_scheduler.journal.journal_reader import recover

pytestmark = pytest.mark.integration

STEPS = 9


@pytest.fixture(autouse=True)
def short_journals(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(journal_writer, "SEGMENT_BYTES", 2_000)


def train(config):
    step = 0
    if (checkpoint := tune.get_checkpoint()) is not None:
        step = int(Path(checkpoint.path, "step").read_text(encoding="ascii"))
    while step < STEPS:
        step += 1
        if step == 6 and config["number"] % 2 and not Path(config["fixed"]).exists():
            raise ValueError("it fails")
        Path("state").mkdir(exist_ok=True)
        Path("state", "step").write_text(str(step), encoding="ascii")
        checkpoint = tune.Checkpoint.from_directory("state") if step % 2 == 0 else None
        tune.report({"loss": config["number"] / step}, checkpoint=checkpoint)


def tuner(folder: Path, **options) -> tune.Tuner:
    return tune.Tuner(
        train,
        param_space={
            "number": tune.grid_search(list(range(8))),
            "fixed": str(folder / "fixed"),
        },
        tune_config=tune.TuneConfig(metric="loss", mode="min", seed=1, **options),
        run_config=tune.RunConfig(
            name="search",
            storage_path=str(folder),
            verbose=0,
            checkpoint_config=tune.CheckpointConfig(
                num_to_keep=1, checkpoint_score_attribute="loss", checkpoint_score_order="min"
            ),
        ),
    )


def test_shortened_journal_with_its_history_holds_the_whole_experiment(tmp_path: Path) -> None:
    before = tuner(tmp_path).fit()
    assert before.num_errors == 4
    found = recover(tmp_path / "search" / FILE_NAME)
    assert found.snapshot is not None
    assert set(found.snapshot.algorithms) == {"search algorithm", "trial scheduler"}
    assert found.finished

    same = tune.Tuner.restore(str(tmp_path / "search"), train).fit()

    assert [one.metrics for one in same] == [one.metrics for one in before]
    assert [str(one.error) for one in same] == [str(one.error) for one in before]
    kept = [[metrics["loss"] for _, metrics in one.best_checkpoints] for one in before]
    assert [[metrics["loss"] for _, metrics in one.best_checkpoints] for one in same] == kept

    (tmp_path / "fixed").touch()
    for _ in range(2):  # the journal has the restore's events, too
        grid = tune.Tuner.restore(str(tmp_path / "search"), train, resume_errored=True).fit()
        assert not grid.num_errors
        for one in grid:
            recorded = [line["training_iteration"] for line in results_of(one)]
            assert recorded == list(range(1, STEPS + 1))
            assert len(table_of(one)) == STEPS


def test_algorithm_without_a_state_keeps_the_journal_complete(tmp_path: Path) -> None:
    class Mine(tune.schedulers.FIFOScheduler):
        def on_trial_result(self, runner, trial, result):
            return self.CONTINUE

    tuner(tmp_path, scheduler=Mine()).fit()
    found = recover(tmp_path / "search" / FILE_NAME)
    assert found.snapshot is None
    assert sum(path.stat().st_size for path in (tmp_path / "search" / FILE_NAME).iterdir()) > 4_000
    grid = tune.Tuner.restore(str(tmp_path / "search"), train).fit()
    assert (grid.num_errors, grid.num_terminated) == (4, 4)


@pytest.mark.parity(91, 174)
@pytest.mark.parametrize("lost", [1, 3, 100])
def test_restore_completes_result_files_and_writes_nothing_twice(
    tmp_path: Path, lost: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(journal_writer, "SEGMENT_BYTES", 2**30)  # it keeps all turns
    before = tuner(tmp_path).fit()
    written = {}
    for one in before:
        for name in ("result.json", "progress.csv"):
            path = Path(one.path, name)
            written[path] = lines = path.read_text(encoding="utf-8").splitlines(keepends=True)
            path.write_text("".join(lines[: max(0, len(lines) - lost)]) + lines[-1][:7], "utf-8")
        if one.error is not None:
            Path(one.path, "error.txt").unlink()

    tune.Tuner.restore(str(tmp_path / "search"), train).fit()

    for path, lines in written.items():
        if path.suffix == ".csv":
            assert path.read_text(encoding="utf-8").splitlines(keepends=True) == lines
        else:
            again = path.read_text(encoding="utf-8").splitlines()
            assert list(map(json.loads, again)) == list(map(json.loads, lines))
    for one in before:
        told = Path(one.path, "error.txt")
        assert told.exists() == (one.error is not None)
        assert one.error is None or "ValueError: it fails" in told.read_text(encoding="utf-8")
