"""kill -9 of the node, of its consumer and of the private Redis in the middle of a search."""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from tests.support.searches.killed_searches import (
    CONSUMER,
    GONE_WITHIN_S,
    NODE,
    REDIS,
    WATCHDOG,
    RunningSearch,
    is_alive,
    searches,
)
from tests.support.waiting import eventually
from tunemq_shared.protocol import messages as m

pytestmark = [pytest.mark.faults, pytest.mark.integration]

Start = Callable[..., RunningSearch]

#: How many services of each kind the tests kill.
CONSUMERS, REDISES = 10, 3
#: The median time until a command takes effect when the consumer was killed just before; it is
#: below a second on an idle machine.
HEARS_AGAIN_WITHIN_S = 5.0


@pytest.fixture
def start(tmp_path: Path) -> Iterator[Start]:
    yield from searches(tmp_path)


def all_is_recorded(search: RunningSearch, trials: int, steps: int) -> None:
    for number in range(trials):
        expected = [(step, 1000 * number + step) for step in range(1, steps + 1)]
        assert search.recorded(number) == expected
    assert f"{trials} TERMINATED in" in search.said.decode()
    search.journal_gives_the_state()


@pytest.mark.parametrize("kind", ["plain", "process_tree"])
def test_killed_node_leaves_no_process_and_the_search_continues_with_a_new_one(start, kind):
    search = start(kind=kind, trials=3, steps=15, save_every=2, cpus=2, gate=6)
    for number in range(2):
        search.wait_for_step(number, step=7)
        # A busy disk may delay the next checkpoint.
        search.wait_for(m.CheckpointCommitted, trial=search.trial(number), step=4)
    node = search.one(NODE)
    its_own = {child.pid for child in node.children(recursive=True)} | search.process_trees()
    assert len(its_own) >= 2 + 2 * (4 if kind == "process_tree" else 1), (
        "consumer, forkserver, trial processes"
    )
    node.kill()
    killed_at = time.monotonic()
    eventually(lambda: not any(map(is_alive, its_own)), within=GONE_WITHIN_S)
    gone_s = time.monotonic() - killed_at
    search.open_gate(15)
    lost = search.wait_for(m.NodeLost)
    again = search.wait_for(m.TrialStarted, attempt=2)
    print(f"gone {gone_s:.3f} lost {lost.at - killed_at:.3f} back {again.at - killed_at:.3f}")
    assert search.ends() == 0, str(search)

    all_is_recorded(search, trials=3, steps=15)
    for number in range(2):  # the last committed checkpoint may be that of step 4
        steps = [step for step, _ in search.steps(number)]
        assert len(steps) - 15 <= 3, steps
    assert [step for step, _ in search.steps(2)] == list(range(1, 16))
    assert not search.all_of(m.TrialProcessDied)
    search.leaves_nothing()


def test_consumer_killed_ten_times_disturbs_no_trial_and_commands_arrive_soon(start):
    search = start(trials=2, steps=60, step_s=0.02, lock_step=True, gate=2)
    trial = search.trial(0)
    heard_after = []
    for n in range(CONSUMERS):
        search.wait_for(m.ResultReported, trial=trial, step=2 + 4 * n)
        consumer = search.one(CONSUMER)
        consumer.kill()
        killed_at = time.monotonic()
        eventually(lambda consumer=consumer: not is_alive(consumer.pid))
        before = len(search.journal.read())
        search.open_gate(6 + 4 * n)
        # The scheduler answers each later result with a command; without it no other result comes.
        answered = search.wait_for(m.ResultReported, after=before, trial=trial).event
        heard = search.wait_for(m.ResultReported, trial=trial, step=answered.step + 1)
        heard_after.append(heard.at - killed_at)
    search.open_gate(60)
    assert search.ends() == 0, str(search)

    print(f"heard {sorted(heard_after)}")
    assert statistics.median(heard_after) < HEARS_AGAIN_WITHIN_S, sorted(heard_after)
    for number in range(2):
        assert [step for step, _ in search.steps(number)] == list(range(1, 61))
    assert not [*search.all_of(m.TrialProcessDied), *search.all_of(m.TrialFailed)]
    all_is_recorded(search, trials=2, steps=60)
    search.leaves_nothing()


@pytest.mark.parametrize("lock_step", [False, True])
def test_search_survives_a_killed_redis_and_loses_no_result(start, lock_step):
    search = start(trials=3, steps=30, step_s=0.04, lock_step=lock_step, cpus=2, gate=5)
    for n in range(REDISES):
        search.wait_for_step(1, step=4 + 8 * n)
        search.one(REDIS).kill()
        search.open_gate(13 + 8 * n)
    search.open_gate(30)
    assert search.ends() == 0, str(search)

    for number in range(3):
        assert [step for step, _ in search.steps(number)] == list(range(1, 31)), (
            "no trial was disturbed"
        )
    assert not [*search.all_of(m.TrialProcessDied), *search.all_of(m.NodeLost)]
    all_is_recorded(search, trials=3, steps=30)
    search.leaves_nothing()


@pytest.mark.parametrize("kind", ["plain", "process_tree"])
def test_search_without_its_watchdog_ends_with_an_error_and_leaves_nothing(start, kind):
    search = start(kind=kind, trials=2, steps=600, cpus=2)
    for number in (0, 1):  # unread output is lost when Redis ends with the watchdog
        search.wait_for(m.ResultReported, trial=search.trial(number), step=2)
    search.one(WATCHDOG).kill()
    assert search.ends() == 1, str(search)

    assert "its watchdog process ended (-9)" in search.said.decode()
    assert search.recorded(0)[:2] == [(1, 1), (2, 2)]
    search.journal_gives_the_state()
    search.leaves_nothing(search.process_trees())
