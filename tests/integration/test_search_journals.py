"""The journal check at the end of every search here can fail."""

from __future__ import annotations

from pathlib import Path

import pytest

import tunemq as tune
from tests.support.journal_records import read_turns
from tests.support.searches.journals import check_journal, ended_searches
from tests.support.searches.searches import fit
from tunemq.schedulers import ASHAScheduler
from tunemq_scheduler.journal.journal_files import FILE_NAME
from tunemq_scheduler.schedulers import FIFOScheduler
from tunemq_shared.base.errors import InvariantBroken

__all__ = ["ended_searches"]

pytestmark = pytest.mark.integration


def climbs(config):
    for step in range(1, 10):
        tune.report({"score": config["slope"] * step})


@pytest.fixture
def search(ended_searches):
    fit(
        climbs,
        {"slope": tune.grid_search([4.0, 3.0, 2.0, 1.0])},
        metric="score",
        mode="max",
        scheduler=ASHAScheduler(max_t=9, grace_period=1, reduction_factor=3),
        max_concurrent_trials=1,
    )
    return ended_searches[0]


def test_a_journal_gives_the_state_of_the_runner_and_the_same_in_lock_step(search):
    folder = Path(search.experiment.folder)

    check_journal(
        folder,
        search.loop.runner,
        plan=search.loop.plan,
        make_algorithms=search.make_algorithms,
    )
    assert len(list(read_turns(folder / FILE_NAME))) > 4


def test_runner_with_state_missing_in_its_journal_is_noticed(search):
    search.loop.runner.repeated += 1
    with pytest.raises(AssertionError):
        check_journal(Path(search.experiment.folder), search.loop.runner)
    search.loop.runner.repeated -= 1


def test_other_decisions_in_lock_step_are_noticed(search):
    def never_stops():
        algorithms = search.make_algorithms()
        algorithms.scheduler = FIFOScheduler()
        return algorithms

    with pytest.raises(InvariantBroken, match="lock-step"):
        check_journal(
            Path(search.experiment.folder),
            search.loop.runner,
            plan=search.loop.plan,
            make_algorithms=never_stops,
        )
