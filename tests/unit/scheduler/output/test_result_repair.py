"""How a restart repairs trials' files that lack results from the journal."""

from __future__ import annotations

import csv
import itertools
import json
from pathlib import Path

import msgspec
import pytest

from tests.support.searches.plans import PLAN
from tests.unit.scheduler.scripted_loop import NODE, Loop, result, started
from tunemq_scheduler.base.experiment_plan import ExperimentPlan
from tunemq_scheduler.core.runner_snapshot import dump
from tunemq_scheduler.core.trial_runner import TrialRunner
from tunemq_scheduler.experiment.algorithm_driver import AlgorithmDriver
from tunemq_scheduler.experiment.event_driver import EventDriver
from tunemq_scheduler.output.result_repair import ResultRepair
from tunemq_scheduler.results.trial_view import TrialView
from tunemq_scheduler.schedulers import FIFOScheduler
from tunemq_scheduler.search import BasicVariantGenerator, SearchGenerator
from tunemq_shared.protocol import messages as m

FAILED = m.TrialFailed("t_00000", 1, "user", "ValueError: no", "Traceback", 1.0)


def fixed(loop: Loop, folder: Path) -> Path:
    """Replay the whole journal and return the folder of the first trial."""
    return Path(replayed(loop, folder)[0].trial_folder("t_00000"))


def replayed(loop: Loop, folder: Path) -> tuple[ExperimentPlan, ResultRepair]:
    """Replay the whole journal and return the plan and the repair."""
    search = SearchGenerator(BasicVariantGenerator(), {"x": 1}, 1)
    plan = msgspec.structs.replace(PLAN, folder=str(folder))
    algorithms = AlgorithmDriver(search=search, scheduler=FIFOScheduler())
    runner = TrialRunner(loop.runner.settings)
    repair = ResultRepair(runner, plan)
    driver = EventDriver(runner, algorithms, plan)
    journal_records = iter(loop.journal.journal_records)
    lengths = [said[1] for said in loop.log if said[0] == "journal"]
    turns = [list(itertools.islice(journal_records, length)) for length in lengths]
    driver.replay(turns, repair.note)
    repair.finish()
    return plan, repair


def losses_of(path: Path) -> list[float]:
    if path.suffix == ".csv":
        with path.open(newline="", encoding="utf-8") as file:
            return [float(row["loss"]) for row in csv.DictReader(file)]
    return [json.loads(line)["loss"] for line in path.read_text(encoding="utf-8").splitlines()]


@pytest.mark.parametrize("kind", ["result.json", "progress.csv"])
def test_repair_of_a_trial_begun_anew_leaves_old_results_out_of_its_new_files(
    tmp_path: Path, kind: str
) -> None:
    loop = Loop(trials=1)
    loop.turn(NODE)
    loop.batch(1, started(), result(1), result(2), result(3), FAILED, m.SlotFreed("t_00000", 1))
    loop.loop.resume(m.ExperimentResumed(2, 0.0, errored="restart"))
    loop.turn(m.NodeJoined("n.2", "n", "host", "127.0.0.1", {"cpu": 1.0}))
    attempt = loop.runner.live["t_00000"].attempt
    begun = m.TrialStarted("t_00000", attempt, 1, "host", "127.0.0.1", 0.0)
    anew = m.ResultReported("t_00000", attempt, 1, {"loss": 7.0}, 0.0, 1.0, 1.0, 1.0, 1)
    loop.turn(m.BatchRead("n.2", 1, 2, "1-0"), begun, anew)

    for _ in range(2):  # the second time no row is missing
        folder = fixed(loop, tmp_path)
        base, _, extension = kind.partition(".")
        assert losses_of(folder / f"{base}.0.{extension}") == [1.0, 1.0, 1.0]
        assert losses_of(folder / kind) == [7.0]


def test_repair_numbers_the_last_failure_of_a_trial_whose_process_died_at_once(
    tmp_path: Path,
) -> None:
    loop = Loop(trials=1)
    loop.turn(NODE)
    loop.batch(1, started(), result(1), FAILED, m.SlotFreed("t_00000", 1))
    told = (fixed(loop, tmp_path) / "error.txt").read_text(encoding="utf-8")
    assert "Failure # 1 (" in told


def test_f04_repair_syncs_rows_that_the_files_already_have(tmp_path: Path) -> None:
    loop = Loop(trials=1)
    loop.turn(NODE)
    loop.batch(1, started(), result(1), FAILED, m.SlotFreed("t_00000", 1))
    folder = fixed(loop, tmp_path)  # perhaps a process wrote the files and died before the fsync
    _, again = replayed(loop, tmp_path)
    names = ("result.json", "progress.csv", "params.json", "params.pkl", "error.txt")
    assert set(again.unsynced) == {str(folder / name) for name in names}


@pytest.mark.parametrize("is_in_error", [False, True])
def test_failed_trial_has_its_error_file_after_a_restart(tmp_path: Path, is_in_error: bool) -> None:
    loop = Loop(trials=2)
    loop.runner.settings = msgspec.structs.replace(
        loop.runner.settings, max_failures=1 - is_in_error
    )
    loop.turn(NODE)
    loop.batch(1, started(), result(1), FAILED, m.SlotFreed("t_00000", 1))
    plan = msgspec.structs.replace(PLAN, folder=str(tmp_path))
    again = TrialRunner.load(loop.runner.settings, dump(loop.runner), loop.runner.finished)
    assert again.summary("t_00000").status == ("ERROR" if is_in_error else "RUNNING")
    views = EventDriver(again, loop.loop.algorithms, plan).trials
    failed = TrialView("t_00000", again.summary("t_00000"), plan)
    assert failed.error_file == str(Path(plan.trial_folder("t_00000"), "error.txt"))
    assert is_in_error or views["t_00000"].error_file == failed.error_file
    assert not is_in_error or views["t_00001"].error_file is None
