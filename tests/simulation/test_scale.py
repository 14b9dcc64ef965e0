"""Ten thousand trials on a thousand nodes: everything is counted once, and nothing grows with them.

Nothing here looks at a clock: `benchmarks` times the same searches.
"""

from __future__ import annotations

import gc
import sys
import tracemalloc
from collections.abc import Iterator
from contextlib import contextmanager

import pytest

from tests.simulation.farm import CountingJournal, Search
from tests.support.waiting import without_collections
from tunemq.testing.simulated_executor import SimulationSettings
from tunemq_scheduler.core import commands as c
from tunemq_scheduler.schedulers import ASHAScheduler, TrialScheduler

#: With these, ASHA lets a trial report 23 results on average.
MAX_T, GRACE_PERIOD = 100, 10


def asha() -> TrialScheduler:
    return ASHAScheduler(max_t=MAX_T, grace_period=GRACE_PERIOD, reduction_factor=3)


def search(trials: int, nodes: int, deaths: float = 0.01, **limits: int) -> Search:
    simulation = SimulationSettings(
        nodes=nodes, latency_s=0.1, deaths=deaths, death_window_s=60.0, seed=1
    )
    return Search(
        asha,
        simulation=simulation,
        trials=trials,
        max_t=MAX_T,
        journal=CountingJournal(),
        **limits,
    )


def turn_until_finished(run: Search, trials: int) -> None:
    while len(run.runner.finished) < trials:
        run.loop.step()


@pytest.mark.soak
def test_f25_ten_thousand_trials_on_a_thousand_nodes_are_each_counted_once() -> None:
    run = search(trials=10_000, nodes=1_000).run()

    counts, runner = run.dispatcher.counts, run.runner
    steps = [runner.summary(trial).last_result.step for trial in runner.finished]
    assert runner.counts["TERMINATED"] == len(runner.finished) == 10_000
    assert counts[c.NotifyTrialAdded] == counts[c.NotifyTrialEnd] == 10_000
    assert counts[c.NotifyResult] == sum(steps)
    assert 15 < sum(steps) / 10_000 < 30
    # Trials of the nodes that died were started again.
    assert counts[c.NotifyTrialStart] > 10_000
    assert len(runner.nodes) == 1_000
    assert any(node.endswith(".2") for node in runner.nodes)
    assert not run.loop.trials
    assert runner.placement.free == runner.placement.total


class Unwalked(dict):
    """A dict that may be looked into and added to, and not walked through."""

    def __iter__(self):
        raise AssertionError("the runner iterates over all finished trials")

    keys = values = items = copy = __iter__


@pytest.mark.parametrize("limits", [{}, {"in_experiment": 100, "max_bytes": 90}])
def test_no_event_iterates_over_the_finished_trials(limits: dict[str, int]) -> None:
    run = search(trials=400, nodes=20, deaths=0.2, **limits)
    run.runner.finished = Unwalked()
    most = 0
    while not run.runner.is_finished:
        run.loop.step()
        # A loop over these two visits running and waiting trials only.
        most = max(most, len(run.loop.trials), len(run.runner.live))
    assert len(run.runner.finished) == 400
    assert most <= 2 * 20


@contextmanager
def counted_calls() -> Iterator[list[int]]:
    """Counts calls of functions, Python's and C's, in this thread."""
    calls = [0]
    before = sys.getprofile()

    def count(_frame: object, event: str, _argument: object) -> None:
        calls[0] += event in {"call", "c_call"}

    with without_collections():
        sys.setprofile(count)
        try:
            yield calls
        finally:
            sys.setprofile(before)


@pytest.mark.parametrize("limits", [{}, {"in_experiment": 100, "max_bytes": 120}])
def test_late_event_takes_no_more_calls_than_an_early_one(
    limits: dict[str, int],
) -> None:
    run = search(trials=3_000, nodes=20, deaths=0.0, **limits)

    def calls_per_entry() -> float:
        before = run.journal.journal_records
        with counted_calls() as calls:
            turn_until_finished(run, len(run.runner.finished) + 100)
        return calls[0] / (run.journal.journal_records - before)

    turn_until_finished(run, 200)
    early = calls_per_entry()
    turn_until_finished(run, 2_800)
    assert calls_per_entry() < 1.1 * early


def test_a_finished_trial_takes_less_than_five_quarters_of_a_kibibyte() -> None:
    # With the decision that ended it, of about 150 bytes (decision 0042).
    run = search(trials=1_500, nodes=50, deaths=0.0)
    tracemalloc.start()
    try:
        turn_until_finished(run, 300)
        gc.collect()
        before, finished = tracemalloc.get_traced_memory()[0], len(run.runner.finished)
        turn_until_finished(run, 1_300)
        gc.collect()
        grown = tracemalloc.get_traced_memory()[0] - before
    finally:
        tracemalloc.stop()
    assert grown / (len(run.runner.finished) - finished) < 1280
