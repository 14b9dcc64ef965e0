"""How a restart repairs result files into which a trial's own code has written."""

from __future__ import annotations

import itertools
import json
import os
from pathlib import Path

import msgspec
import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from tests.support.searches.plans import PLAN
from tests.unit.scheduler.output.test_unrecorded_rows import steps_in
from tests.unit.scheduler.scripted_loop import NODE, Loop, result, started
from tunemq_scheduler.base.experiment_plan import ExperimentPlan
from tunemq_scheduler.core.runner_snapshot import dump
from tunemq_scheduler.core.trial_runner import TrialRunner
from tunemq_scheduler.experiment.algorithm_driver import AlgorithmDriver
from tunemq_scheduler.experiment.event_driver import EventDriver
from tunemq_scheduler.output.result_file_reader import ends_with, read_rows
from tunemq_scheduler.output.result_repair import ResultRepair
from tunemq_scheduler.schedulers import FIFOScheduler, TrialScheduler
from tunemq_scheduler.search import BasicVariantGenerator, SearchGenerator
from tunemq_shared.protocol import messages as m

TRIAL = "t_00000"
RESULT_FILES = ("result.json", "progress.csv")
FAILED = m.TrialFailed(TRIAL, 1, "user", "ValueError: no", "Traceback", 1.0)


class Search:
    """A search of one trial, whose journal has three results and a failure."""

    def __init__(self, folder: Path, scheduler: TrialScheduler | None = None) -> None:
        self.loop = Loop(trials=1, scheduler=scheduler)
        self.loop.runner.settings = msgspec.structs.replace(
            self.loop.runner.settings, max_failures=5
        )
        self.plan: ExperimentPlan = msgspec.structs.replace(
            PLAN, folder=str(folder), experiment_id="t"
        )
        self.folder = folder / "train_t_00000"
        self.loop.turn(NODE)
        self.loop.batch(1, started(), result(1))
        self.loop.batch(3, result(2))
        #: The number of turns that a snapshot replaces, and its state.
        self.snapshot: tuple[int, bytes] | None = None

    def take_snapshot(self) -> None:
        """Replace the turns so far with a snapshot."""
        self.snapshot = self._turns(), dump(self.loop.runner)

    def report(self, first: int, *steps: int) -> None:
        """Report results; ``first`` is the number of the first event."""
        self.loop.batch(first, *map(result, steps))

    def restart(self) -> list[str]:
        """Restart, repair the files to the end of the journal and return the notices."""
        search = SearchGenerator(BasicVariantGenerator(), {"x": 1}, 1)
        algorithms = AlgorithmDriver(search=search, scheduler=FIFOScheduler())
        known, state = self.snapshot or (0, b"")
        before = self.loop.runner.settings
        runner = TrialRunner.load(before, state, {}) if state else TrialRunner(before)
        repair = ResultRepair(runner, self.plan)
        journal_records = iter(self.loop.journal.journal_records)
        lengths = [said[1] for said in self.loop.log if said[0] == "journal"]
        turns = [list(itertools.islice(journal_records, length)) for length in lengths]
        EventDriver(runner, algorithms, self.plan).replay(turns[known:], repair.note)
        repair.finish()
        return repair.notices

    def rows(self) -> tuple[list[int], list[int]]:
        """Return the steps in both files."""
        return steps_in(self.folder / "result.json"), steps_in(self.folder / "progress.csv")

    def _turns(self) -> int:
        return sum(said[0] == "journal" for said in self.loop.log)


@pytest.mark.parametrize(
    "name", [*RESULT_FILES, "params.json", "params.pkl", "error.txt", "result.0.json"]
)
@given(content=st.binary(max_size=200), puts=st.sampled_from(["instead", "behind", "before"]))
@example(content=b"fps,reward\n1,2\n", puts="instead")
@example(content=b"", puts="instead")
@example(content=b"\n", puts="behind")
@example(content=b'{"loss": 1}', puts="instead")
@example(content=b'{"training_iteration": 99999}\n', puts="behind")
@example(content=b'{"training_iteration": 1e400, "trial_id": "t_00000"}\n', puts="instead")
@example(content=b"training_iteration,trial_id\n1,t_00001\n", puts="instead")
@example(content=b'"' * 200_000, puts="instead")
@settings(max_examples=25, deadline=None)
def test_restart_with_any_bytes_in_a_file_of_a_trial_has_each_row_once(
    tmp_path_factory: pytest.TempPathFactory, name: str, content: bytes, puts: str
) -> None:
    search = Search(tmp_path_factory.mktemp("search"))
    search.report(4, 3)
    search.loop.batch(5, FAILED, m.SlotFreed(TRIAL, 1))
    assert search.restart() == []
    path = search.folder / name
    before = path.read_bytes() if path.exists() else b""
    new = {"instead": content, "behind": before + content, "before": content + b"\n" + before}
    path.write_bytes(new[puts])

    search.restart()

    assert search.rows() == ([1, 2, 3], [1, 2, 3])
    assert (search.folder / "error.txt").read_text(errors="replace").count("Failure # 1 (") == 1
    if name in RESULT_FILES:
        assert json.loads((search.folder / "params.json").read_bytes()) == {"x": 1}
    if name == "result.0.json":
        assert path.read_bytes() == new[puts]
    assert search.restart() == []


@pytest.mark.parametrize("name", RESULT_FILES)
def test_restart_moves_a_file_written_by_the_trial_aside_and_names_it(
    tmp_path: Path, name: str
) -> None:
    search = Search(tmp_path)
    search.restart()
    path = search.folder / name
    with path.open("w") as file:  # as a library's logger does, which keeps the file open
        file.write("fps,reward\n")
        file.flush()
        (text,) = search.restart()
        file.write("1,2\n")
    base, _, extension = name.partition(".")
    aside = search.folder / f"{base}.foreign.{extension}"
    assert aside.read_text() == "fps,reward\n1,2\n"
    assert str(path) in text
    assert "*.foreign.*" in text
    assert search.rows() == ([1, 2], [1, 2])
    path.write_text("again\n")
    search.restart()
    assert (search.folder / f"{base}.foreign-2.{extension}").read_text() == "again\n"


@pytest.mark.parametrize("name", RESULT_FILES)
def test_restart_fills_a_hole_in_a_file(tmp_path: Path, name: str) -> None:
    search = Search(tmp_path)
    search.report(4, 3, 4)
    search.restart()
    path = search.folder / name
    lines = path.read_bytes().splitlines(keepends=True)
    head = lines[:1] if name == "progress.csv" else []
    path.write_bytes(b"".join([*head, *lines[-2:]]))
    search.restart()
    assert search.rows() == ([1, 2, 3, 4], [1, 2, 3, 4])


def test_restart_names_rows_that_only_the_file_had(tmp_path: Path) -> None:
    search = Search(tmp_path)
    search.restart()
    search.take_snapshot()
    search.report(4, 3)
    (search.folder / "result.json").write_text("")
    notices = search.restart()
    assert f"{search.folder}/result.json (step 1 to 2)" in notices[-1]
    assert search.rows() == ([3], [1, 2, 3])


def test_restart_rebuilds_the_table_of_results_no_longer_in_the_journal(tmp_path: Path) -> None:
    search = Search(tmp_path)
    search.restart()
    before = (search.folder / "progress.csv").read_bytes()
    search.take_snapshot()
    search.report(4, 3)
    (search.folder / "progress.csv").write_text("a,b\n1,2\n")
    search.restart()
    assert search.rows() == ([1, 2, 3], [1, 2, 3])
    assert (search.folder / "progress.csv").read_bytes().startswith(before)


def test_restart_with_an_unreadable_file_continues(tmp_path: Path) -> None:
    search = Search(tmp_path)
    search.restart()
    for name in (*RESULT_FILES, "error.txt"):
        (search.folder / name).touch()
        (search.folder / name).chmod(0)
    search.restart()
    assert search.rows() == ([1, 2], [1, 2])


def test_restart_with_a_table_of_long_cells_keeps_it(tmp_path: Path) -> None:
    search = Search(tmp_path)
    wide = msgspec.structs.replace(result(3), metrics={"text": 'a"b,' * 100_000})
    search.loop.batch(4, wide)
    search.restart()
    before = (search.folder / "progress.csv").read_bytes()
    assert search.restart() == []
    assert (search.folder / "progress.csv").read_bytes() == before


def test_rows_of_a_sparse_file_are_not_all_read(tmp_path: Path) -> None:
    path = tmp_path / "result.json"
    with path.open("wb") as file:
        os.truncate(file.fileno(), 2**36)
    assert not ends_with(str(path), TRIAL, (0, 3))
    found = read_rows(str(path), TRIAL)
    assert not found.is_own
    assert not found.rows
