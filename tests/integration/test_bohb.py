"""BOHB on real workers: after a kill it suggests and decides what it would have without one."""

from __future__ import annotations

import os
import signal
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.faults.scripts import bohb_search
from tests.support.journal_records import read_records
from tests.support.searches.killed_searches import RunningSearch
from tests.support.searches.plans import PLAN
from tests.support.waiting import eventually
from tunemq.testing.journal_replay import compare, outcome, replay_lock_step
from tunemq_scheduler.experiment.algorithm_driver import AlgorithmDriver
from tunemq_scheduler.journal.journal_files import FILE_NAME
from tunemq_scheduler.journal.journal_reader import recover
from tunemq_scheduler.search import SearchGenerator
from tunemq_scheduler.search.optuna.tune_bohb import TuneBOHB
from tunemq_shared.protocol import messages as m

pytestmark = [pytest.mark.integration, pytest.mark.faults]

TRIALS, SEED = 24, 4


@pytest.fixture
def begun() -> Iterator[list[RunningSearch]]:
    searches: list[RunningSearch] = []
    yield searches
    for search in searches:
        search.close()


def algorithms() -> AlgorithmDriver:
    """New ones, which no kill has met; they are asked about every result."""
    searcher = SearchGenerator(TuneBOHB(), bohb_search.SPACE, TRIALS, "loss", "min", SEED)
    scheduler = bohb_search.make_scheduler()
    scheduler.set_search_properties("loss", "min", seed=SEED)
    return AlgorithmDriver(
        search=searcher, scheduler=scheduler, metric="loss", mode="min", lock_step=True
    )


@pytest.mark.parity(173, 180)
def test_bohb_search_killed_twice_suggests_and_decides_as_an_undisturbed_one(
    begun: list[RunningSearch], tmp_path: Path
) -> None:
    def run() -> RunningSearch:
        options: dict[str, Any] = {"trials": TRIALS, "step_s": 0.05, "seed": SEED}
        script = Path(bohb_search.__file__)
        begun.append(RunningSearch(tmp_path, script=script, cpus=2, **options))
        return begun[-1]

    for suggested in (TRIALS // 3, 2 * TRIALS // 3):  # with a model and trials that are paused
        search = run()
        eventually(
            lambda: len(search.all_of(m.ConfigSuggested)) >= suggested,  # noqa: B023
            within=120,
            message=lambda: str(search),  # noqa: B023
        )
        os.kill(search.process.pid, signal.SIGKILL)
        search.process.wait()
        search.leaves_nothing()
    search = run()
    assert search.ends() == 0, str(search)

    path = tmp_path / "search" / FILE_NAME
    settings, entries = recover(path).header.settings, [*read_records(path)]
    assert sum(isinstance(entry.event, m.ExperimentResumed) for entry in entries) == 2
    found = outcome(settings, entries)
    compare(found, replay_lock_step(settings, PLAN, algorithms(), entries))
    assert len(found.suggestions) == len(found.ends) == TRIALS
    assert {status for _, status in found.ends} == {"TERMINATED"}
    assert {step for _, step, decision in found.decisions if decision == m.PAUSE} == {1, 3}
