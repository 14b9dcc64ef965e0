"""Trials that fail in every possible way: each ends by its budget, with the right kind."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path

import pytest

from tests.support.searches.killed_searches import RunningSearch, searches
from tunemq_shared.protocol import messages as m

pytestmark = [pytest.mark.faults, pytest.mark.integration]

Start = Callable[..., RunningSearch]

SCRIPT = Path(__file__).parent / "scripts" / "failing_search.py"
STEPS = 8


@pytest.fixture
def start(tmp_path: Path) -> Iterator[Start]:
    for begin in searches(tmp_path):
        yield partial(begin, script=SCRIPT)


def results_of(search: RunningSearch) -> list[list[str]]:
    """Return status and error of each trial; the search has ended well, and left nothing behind."""
    assert search.ends() == 0, str(search)
    search.journal_gives_the_state()
    search.leaves_nothing()
    results: list[list[str]] = json.loads((search.folder / "results.json").read_text("utf-8"))
    return results


def failures_of(search: RunningSearch, number: int) -> str:
    (file,) = search.folder.glob(f"search/*_{number:05d}/error.txt")
    return file.read_text(encoding="utf-8")


def continued(search: RunningSearch, number: int) -> None:
    """Check that a healthy trial has all of its results, each once."""
    recorded = search.recorded(number)
    assert recorded == [(step, 1000 * number + step) for step in range(1, STEPS + 1)]


@pytest.mark.parity(70, 71, 94)
def test_f02_a_trial_that_always_dies_ends_by_its_budget_with_each_death_named(start):
    search = start(ways=["continues", "is_killed"], failures={"max_failures": 2})
    results = results_of(search)

    assert [status for status, _ in results] == ["TERMINATED", "ERROR"]
    written = failures_of(search, 1)
    assert written.count("killed by SIGKILL") == 3
    for number in (1, 2, 3):
        assert f"Failure # {number} (" in written
        assert f"(death of its process: failure {number} of at most 3" in written
    assert written.count("it is tried again") == 2
    assert "failure 3 of at most 3" in results[1][1]
    assert len(search.all_of(m.TrialProcessDied)) == 3
    continued(search, 0)


def test_f22_each_kind_of_failure_is_named_and_the_other_trials_finish(start):
    named = {
        "raises": ("user", "ValueError: the data are wrong"),
        "segfaults": ("died", "SIGSEGV"),
        "aborts": ("died", "SIGABRT"),
        "exits": ("died", "code 7"),
        "reports_text": ("metric", "large"),
        "needs_a_bigger_gpu": ("cuda_memory", "Tried to allocate 20.00 GiB"),
    }
    search = start(ways=["continues", *named, "continues"], failures={"max_failures": 1})
    results = results_of(search)

    assert [status for status, _ in results] == ["TERMINATED", *["ERROR"] * 6, "TERMINATED"]
    facts = [*search.all_of(m.TrialFailed), *search.all_of(m.TrialProcessDied)]
    for number, (kind, words) in enumerate(named.values(), 1):
        assert words in results[number][1]
        kinds = [
            fact.kind if isinstance(fact, m.TrialFailed) else "died"
            for fact in facts
            if fact.trial == search.trial(number)
        ]
        assert kinds == [kind] * (1 if kind == "cuda_memory" else 2)
    continued(search, 0)
    continued(search, 7)
    said = search.said.decode()
    assert "6 ERROR" in said
    assert "death of its process: " in said


@pytest.mark.parametrize("way", ["needs_a_bigger_gpu", "needs_a_bigger_gpu_in_old_words"])
def test_f23_cuda_out_of_memory_is_not_retried(start, way):
    search = start(ways=[way, "continues"], failures={"max_failures": 5})
    results = results_of(search)

    assert [status for status, _ in results] == ["ERROR", "TERMINATED"]
    (failed,) = search.all_of(m.TrialFailed)
    assert failed.kind == "cuda_memory"
    assert "out of GPU memory: not retried" in failures_of(search, 0)
    assert "FailureConfig(retry_cuda_memory=True)" in results[0][1]
    continued(search, 1)


def test_f23_cuda_out_of_memory_is_retried_when_asked_for(start):
    failures = {"max_failures": 1, "retry_cuda_memory": True}
    search = start(ways=["needs_a_bigger_gpu"], failures=failures)

    assert results_of(search)[0][0] == "ERROR"
    assert len(search.all_of(m.TrialFailed)) == 2
    assert "failure 2 of at most 2" in failures_of(search, 0)


def test_trials_beside_a_forkserver_killer_finish_with_no_failures_allowed(start):
    ways = ["continues", "kills_its_forkserver", "continues"]
    search = start(ways=ways, at_step=1, cpus=3, failures={"max_node_losses": 0})
    results = results_of(search)

    assert [status for status, _ in results] == ["TERMINATED", "ERROR", "TERMINATED"]
    assert "not counted, because other trials ran there" in failures_of(search, 1)
    assert "while they ran only this trial (" in results[1][1]
    for number in (0, 2):
        continued(search, number)


@pytest.mark.parametrize("at", [0, 3])
def test_f22_trial_that_keeps_killing_its_node_ends_as_poison_and_others_finish(start, at):
    ways = ["continues"] * 4
    ways[at] = "kills_its_node"
    search = start(ways=ways, at_step=1, cpus=4)
    results = results_of(search)

    expected = ["TERMINATED"] * 4
    expected[at] = "ERROR"
    assert [status for status, _ in results] == expected
    # Two failures beside other trials, which are no evidence, and three alone.
    assert 3 <= len(search.all_of(m.NodeLost)) <= 5
    assert (
        "poison: 3 nodes or forkservers lost in a row while they ran only this trial ("
        in failures_of(search, at)
    )
    assert "poison: " in results[at][1]
    for number in {0, 1, 2, 3} - {at}:
        continued(search, number)
    said = search.said.decode()
    assert "1 ERROR" in said
    assert "poison" in said


@pytest.mark.soak
@pytest.mark.parametrize(("losses", "poison"), [(0, 7), (2, 4)])
def test_f22_each_of_many_node_killers_on_an_embedded_farm_ends_by_its_budget(
    start, losses, poison
):
    # One slot: one after the other, more often in a row than a node may die for no reason.
    ways = [*["kills_its_node"] * poison, "continues"]
    search = start(ways=ways, at_step=1, cpus=1, failures={"max_node_losses": losses})
    results = results_of(search)

    assert [status for status, _ in results] == [*["ERROR"] * poison, "TERMINATED"]
    assert len(search.all_of(m.NodeLost)) == poison * (losses + 1) > 6
    assert all("poison: " in error for _, error in results[:-1])
    continued(search, poison)


def test_f22_node_on_which_every_trial_dies_is_set_aside_and_the_search_ends(start):
    search = start(ways=["segfaults"] * 12, at_step=1, cpus=4)
    results = results_of(search)

    assert [status for status, _ in results] == ["ERROR"] * 12
    said = search.said.decode()
    assert "is set aside for 1 s: 3 different trials in a row failed there" in said
    assert said.count("different trials in a row") == 1, "once is enough for the only one"
