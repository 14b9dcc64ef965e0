"""Check the journal of every search that a test runs in its own process.

Replayed, the journal must give the state that the live runner had; and the same results, handed in
the same order to fresh algorithms that are asked about each, must come to the same decisions,
records and kept checkpoints.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import NamedTuple

import msgspec
import pytest

from tests.support.journal_records import read_records
from tunemq.testing.comparable_state import comparable
from tunemq.testing.journal_replay import compare, outcome, replay, replay_lock_step
from tunemq_scheduler.base.experiment_plan import ExperimentPlan
from tunemq_scheduler.core.trial_runner import TrialRunner
from tunemq_scheduler.experiment.algorithm_driver import AlgorithmDriver
from tunemq_scheduler.experiment.experiment_loop import ExperimentLoop
from tunemq_scheduler.experiment.run_experiment import Experiment
from tunemq_scheduler.experiment.start_checks import PreparedSearch
from tunemq_scheduler.journal.journal_files import FILE_NAME
from tunemq_scheduler.journal.journal_reader import recover
from tunemq_scheduler.journal.journal_replay import replay_recovered
from tunemq_scheduler.schedulers import ASHAScheduler, FIFOScheduler, HyperBandScheduler
from tunemq_scheduler.search import BasicVariantGenerator
from tunemq_shared.protocol.messages import JournalRecord

MakeAlgorithms = Callable[[], AlgorithmDriver]


class Ended(NamedTuple):
    """A search that has ended."""

    experiment: Experiment
    loop: ExperimentLoop
    #: Makes new algorithms like those of the run; None where an exact copy is impossible.
    make_algorithms: MakeAlgorithms | None


def check_journal(
    folder: Path,
    live: TrialRunner,
    *,
    unwritten: list[JournalRecord] | None = None,
    plan: ExperimentPlan | None = None,
    make_algorithms: MakeAlgorithms | None = None,
) -> None:
    """Check the journal of the experiment in ``folder`` against the runner that wrote it.

    Args:
        unwritten: records of the last turn, which an exception of a plug-in cut short.
        plan: of the experiment, for the replay in lock-step.
        make_algorithms: makes new ones that decide about every result; None skips lock-step.
    """
    path = folder / FILE_NAME
    found = recover(path)
    if found.snapshot is not None:  # the journal begins with the snapshot
        assert comparable(replay_recovered(found)) == comparable(live)
        return
    settings = found.header.settings
    entries = list(read_records(path))
    events_handled = (
        entries if _ends_with(entries, unwritten or []) else entries + (unwritten or [])
    )
    assert comparable(replay(settings, events_handled)) == comparable(live)
    if plan is not None and make_algorithms is not None:
        again = replay_lock_step(settings, plan, make_algorithms(), entries)
        compare(outcome(settings, entries), again)


@pytest.fixture(autouse=True)
def ended_searches(monkeypatch: pytest.MonkeyPatch) -> Iterator[list[Ended]]:
    """Check the journal of each search that the test ran in this process."""
    ended: list[Ended] = []
    make_search = Experiment._search

    def watched(self, *args, **kwargs):
        # Algorithms that replayed an earlier run are not new.
        make_algorithms = None if self.is_resumed else _fresh_algorithms(self.prepared)
        search = make_search(self, *args, **kwargs)
        ended.append(Ended(self, search.loop, make_algorithms))
        return search

    monkeypatch.setattr(Experiment, "_search", watched)
    yield ended
    # A journal belongs to the last search that resumed it.
    for search in {one.experiment.folder: one for one in ended}.values():
        check_journal(
            Path(search.experiment.folder),
            search.loop.runner,
            unwritten=search.loop.driver.journal_records,
            plan=search.loop.plan,
            make_algorithms=search.make_algorithms,
        )


def _fresh_algorithms(prepared: PreparedSearch) -> MakeAlgorithms | None:
    """Make copies of `PreparedSearch.algorithms` from before the run.

    Stoppers and callbacks of users may depend on anything, so lock-step is for searches whose
    answers depend on results alone.
    """
    exact = (
        isinstance(prepared.search.searcher, BasicVariantGenerator)
        and type(prepared.scheduler) in {FIFOScheduler, ASHAScheduler, HyperBandScheduler}
        and prepared.stopper is None
    )
    if not exact:
        return None
    kept = copy.deepcopy((prepared.search, prepared.scheduler))

    def make() -> AlgorithmDriver:
        search, scheduler = copy.deepcopy(kept)
        algorithms = msgspec.structs.replace(
            prepared, search=search, scheduler=scheduler
        ).algorithms()
        algorithms.lock_step = True
        return algorithms

    return make


def _ends_with(entries: list[JournalRecord], tail: list[JournalRecord]) -> bool:
    return not tail or entries[-len(tail) :] == tail
