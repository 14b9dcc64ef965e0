"""A step that holds the GIL: its node stays alive, and its trials can be stopped."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from tests.support.searches.killed_searches import RunningSearch, is_alive, searches
from tests.support.waiting import eventually
from tunemq_shared.broker import redis_keys
from tunemq_shared.protocol import messages as m

pytestmark = [pytest.mark.faults, pytest.mark.integration]

Start = Callable[..., RunningSearch]

#: A process that stops by itself does so within this time, on a busy machine, too.
GRACE_S = 10.0
#: How long a stop may take beyond that on a busy machine; a step holds the GIL for longer.
STOPPED_WITHIN_S = 20.0


@pytest.fixture
def start(tmp_path: Path) -> Iterator[Start]:
    yield from searches(tmp_path)


def seconds_to_stop(search: RunningSearch, number: int, pid: int) -> float:
    """Stop a trial; return the seconds until its process is gone and its slot is free."""
    asked = time.monotonic()
    search.stop(number)
    freed = search.wait_for(m.SlotFreed, trial=search.trial(number))
    assert not is_alive(pid)
    return freed.at - asked


@pytest.mark.parity(74)
def test_step_that_holds_the_gil_delays_neither_its_node_nor_stopping(start):
    search = start(kind="first_holds_the_gil", trials=3, steps=10_000, stop_grace_s=GRACE_S, cpus=3)
    holder = search.wait_for_step(0, step=3)
    began = time.monotonic()
    others = [search.wait_for_step(number, step=2) for number in (1, 2)]

    other_s = seconds_to_stop(search, 1, others[0])
    assert other_s < GRACE_S
    # If the step kept the node from renewing its lease, the lease would have expired by now.
    silent = 1.2 * redis_keys.LEASE_TTL_S
    eventually(lambda: time.monotonic() > began + silent, within=2 * silent)
    steps_before = len(search.recorded(2))
    eventually(lambda: len(search.recorded(2)) > steps_before)
    holder_s = seconds_to_stop(search, 0, holder)
    assert GRACE_S <= holder_s < GRACE_S + STOPPED_WITHIN_S
    print(f"other {other_s:.3f} holder {holder_s:.3f}")
    search.stop(2)

    assert search.ends() == 0, str(search)
    assert not [*search.all_of(m.NodeLost), *search.all_of(m.TrialProcessDied)]
    assert [step for step, _ in search.recorded(0)] == [1, 2]
    search.journal_gives_the_state()
    search.leaves_nothing()


def test_trial_that_ignores_every_request_is_killed_after_its_grace_period(start):
    search = start(kind="stubborn", trials=2, steps=10_000, stop_grace_s=0.3, cpus=2)
    pids = [search.wait_for_step(number, step=2) for number in (0, 1)]

    stopped_s = seconds_to_stop(search, 0, pids[0])
    assert is_alive(pids[1])
    print(f"stubborn {stopped_s:.3f}")
    # After the grace period the node sends SIGTERM, which the process ignores; a second later
    # SIGKILL.
    assert stopped_s < 0.3 + 1.0 + STOPPED_WITHIN_S
    search.stop(1)

    assert search.ends() == 0, str(search)
    search.leaves_nothing()
