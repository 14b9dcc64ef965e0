"""How a restart treats rows in trials' files that the journal does not have."""

from __future__ import annotations

import csv
import itertools
import json
from pathlib import Path

import msgspec

from tests.support.searches.plans import PLAN
from tests.unit.scheduler.scripted_loop import NODE, Loop, result, started
from tunemq_scheduler.base.experiment_plan import ExperimentPlan
from tunemq_scheduler.core.trial_runner import TrialRunner
from tunemq_scheduler.experiment.algorithm_driver import AlgorithmDriver
from tunemq_scheduler.experiment.event_driver import EventDriver
from tunemq_scheduler.output.result_repair import ResultRepair
from tunemq_scheduler.schedulers import FIFOScheduler
from tunemq_scheduler.search import BasicVariantGenerator, SearchGenerator
from tunemq_shared.protocol import messages as m

FAILED = m.TrialFailed("t_00000", 1, "user", "ValueError: no", "Traceback", 1.0)


def replayed(
    loop: Loop, turns: int | None, plan: ExperimentPlan
) -> tuple[TrialRunner, ResultRepair]:
    """Replay the first turns of a journal and repair the files."""
    search = SearchGenerator(BasicVariantGenerator(), {"x": 1}, 2)
    algorithms = AlgorithmDriver(search=search, scheduler=FIFOScheduler())
    runner = TrialRunner(loop.runner.settings)
    repair = ResultRepair(runner, plan)
    journal_records = iter(loop.journal.journal_records)
    lengths = [said[1] for said in loop.log if said[0] == "journal"]
    all_turns = [list(itertools.islice(journal_records, length)) for length in lengths]
    EventDriver(runner, algorithms, plan).replay(all_turns[:turns], repair.note)
    repair.finish()
    return runner, repair


def after_loss(loop: Loop, folder: Path, turns: int | None) -> ResultRepair:
    """Write the files of the whole journal unless they exist; compare with its first turns."""
    plan = msgspec.structs.replace(PLAN, folder=str(folder), experiment_id="t")
    if not [*folder.iterdir()]:
        replayed(loop, None, plan)
    return replayed(loop, turns, plan)[1]


def steps_in(path: Path) -> list[int]:
    if path.suffix == ".csv":
        with path.open(newline="", encoding="utf-8") as file:
            return [int(row["training_iteration"]) for row in csv.DictReader(file)]
    lines = path.read_text(encoding="utf-8").splitlines()
    return [json.loads(line)["training_iteration"] for line in lines]


def acknowledged_up_to(loop: Loop) -> int:
    return sum(said[0] == "journal" for said in loop.log)


def three_steps(trials: int = 1) -> tuple[Loop, int]:
    """Return a loop with a trial that reported, and the number of turns after its first result."""
    loop = Loop(trials=trials)
    loop.turn(NODE)
    loop.batch(1, started(), result(1))
    turns = acknowledged_up_to(loop)
    loop.batch(3, result(2), result(3))
    return loop, turns


def test_unrecorded_rows_of_live_trial_are_moved_aside(tmp_path: Path) -> None:
    loop, turns = three_steps()
    unrecorded = after_loss(loop, tmp_path, turns)
    folder = tmp_path / "train_t_00000"
    assert steps_in(folder / "result.json") == steps_in(folder / "progress.csv") == [1]
    assert steps_in(folder / "result.unrecorded.json") == [2, 3]
    assert unrecorded.folders == {str(folder): None}
    (text,) = unrecorded.notices
    assert f"{folder}/result.json (2)" in text
    assert unrecorded.turns_were_lost


def test_unrecorded_rows_of_a_complete_journal_changes_nothing(tmp_path: Path) -> None:
    loop, _ = three_steps()
    unrecorded = after_loss(loop, tmp_path, None)
    assert not unrecorded.notices
    assert not unrecorded.folders
    assert not unrecorded.turns_were_lost
    assert not [*tmp_path.glob("*/*unrecorded*")]
    assert steps_in(tmp_path / "train_t_00000" / "result.json") == [1, 2, 3]


def test_unrecorded_rows_longer_than_a_block_are_moved_aside(tmp_path: Path) -> None:
    loop, turns = three_steps()
    after_loss(loop, tmp_path, None)
    path = tmp_path / "train_t_00000" / "result.json"
    wide = json.dumps({"training_iteration": 4, "trial_id": "t_00000", "text": "x" * 200_000})
    path.write_text(f"{path.read_text()}{wide}\n{wide[:-5]}", encoding="utf-8")
    after_loss(loop, tmp_path, turns)
    assert steps_in(path) == [1]
    assert steps_in(path.with_name("result.unrecorded.json")) == [2, 3, 4]


def test_unrecorded_rows_of_unknown_trial_are_moved_aside(tmp_path: Path) -> None:
    loop, _ = three_steps()
    unrecorded = after_loss(loop, tmp_path, 0)
    folder = tmp_path / "train_t_00000"
    assert steps_in(folder / "result.json") == steps_in(folder / "progress.csv") == []
    assert steps_in(folder / "result.unrecorded.json") == [1, 2, 3]
    assert unrecorded.turns_were_lost


def test_unrecorded_lineage_returns_the_files_to_the_previous_one(tmp_path: Path) -> None:
    loop, _ = three_steps()
    loop.batch(5, FAILED, m.SlotFreed("t_00000", 1))
    turns = acknowledged_up_to(loop)
    loop.loop.resume(m.ExperimentResumed(2, 0.0, errored="restart"))
    loop.turn(m.NodeJoined("n.2", "n", "host", "127.0.0.1", {"cpu": 1.0}))
    attempt = loop.runner.live["t_00000"].attempt
    begun = m.TrialStarted("t_00000", attempt, 1, "host", "127.0.0.1", 0.0)
    anew = m.ResultReported("t_00000", attempt, 1, {"loss": 7.0}, 0.0, 1.0, 1.0, 1.0, 1)
    loop.turn(m.BatchRead("n.2", 1, 2, "1-0"), begun, anew)
    after_loss(loop, tmp_path, turns)
    folder = tmp_path / "train_t_00000"
    assert steps_in(folder / "result.json") == steps_in(folder / "progress.csv") == [1, 2, 3]
    assert steps_in(folder / "result.unrecorded.json") == [1]
    assert not [*folder.glob("*.0.*")]


def test_unrecorded_failure_is_moved_aside(tmp_path: Path) -> None:
    loop, _ = three_steps()
    turns = acknowledged_up_to(loop)
    loop.batch(5, FAILED, m.SlotFreed("t_00000", 1))
    unrecorded = after_loss(loop, tmp_path, turns)
    folder = tmp_path / "train_t_00000"
    assert (folder / "error.txt").read_text() == ""
    assert "Failure # 1 (" in (folder / "error.unrecorded.txt").read_text()
    assert f"{folder}/error.txt (1)" in unrecorded.notices[0]


def test_unrecorded_rows_leaves_finished_trials_unread_where_no_turn_was_lost(
    tmp_path: Path,
) -> None:
    loop, _ = three_steps()
    loop.batch(5, m.TrialFinished("t_00000", 1), m.SlotFreed("t_00000", 1))
    plan = msgspec.structs.replace(PLAN, folder=str(tmp_path), experiment_id="t")
    runner, _ = replayed(loop, None, plan)
    assert not runner.live
    path = tmp_path / "train_t_00000" / "result.json"
    path.write_text("no result\n", encoding="ascii")
    unrecorded = ResultRepair(runner, plan)
    unrecorded.finish()
    assert not unrecorded.notices
    unrecorded.follow(["t_00000"])  # the trial is about to resume
    assert str(path) in unrecorded.notices[0]
    path.write_text("no result\n", encoding="ascii")
    (tmp_path / "journal.damaged-20260101-000000").mkdir()
    unrecorded = ResultRepair(runner, plan)
    unrecorded.finish()
    assert str(path) in unrecorded.notices[0]
