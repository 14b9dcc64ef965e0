"""kill -9 of a trial process in the middle of a search."""

from __future__ import annotations

import os
import signal
import statistics
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from tests.support.searches.killed_searches import RunningSearch, is_alive, searches
from tests.support.waiting import eventually
from tunemq_shared.protocol import messages as m
from tunemq_shared.system.processes import parent_of

pytestmark = [pytest.mark.faults, pytest.mark.integration]

Start = Callable[..., RunningSearch]

KILLS = 20
#: Medians of `KILLS`: from the kill to its record, and to the trial's next result. An idle machine
#: needs a tenth and half a second.
KNOWN_WITHIN_S, BACK_WITHIN_S = 4.0, 10.0
TREE_GONE_WITHIN_S = 40.0


@pytest.fixture
def start(tmp_path: Path) -> Iterator[Start]:
    yield from searches(tmp_path)


def once_each(steps: int) -> list[int]:
    return list(range(1, steps + 1))


@pytest.mark.parity(70, 71)
@pytest.mark.parametrize("kind", ["plain", "process_tree"])
def test_f02_killed_trial_continues_from_its_last_checkpoint_alone(start, kind):
    search = start(kind=kind, trials=3, steps=12, save_every=3, max_failures=1, gate=7)
    killed = search.wait_for_step(1, step=8)
    search.wait_for(m.ResultReported, trial=search.trial(1), step=7)
    relatives = process_tree_of(search, 1, killed)
    os.kill(killed, signal.SIGKILL)
    gone_after = seconds_until_dead([killed, *relatives])
    search.open_gate(12)
    assert search.ends() == 0, str(search)

    steps = [step for step, _ in search.steps(1)]
    again = steps[steps.index(8) + 1 :]
    assert steps[:8] == once_each(8)
    assert again == list(range(7, 13)), "from the checkpoint of step 6"
    assert gone_after < TREE_GONE_WITHIN_S
    (died,) = search.all_of(m.TrialProcessDied)
    assert (died.pid, died.signal, died.trial) == (killed, signal.SIGKILL, search.trial(1))
    for number in (0, 2):
        assert [step for step, _ in search.steps(number)] == once_each(12)
    for number in range(3):
        assert search.recorded(number) == [(n, 1000 * number + n) for n in once_each(12)]
    search.journal_gives_the_state()
    search.leaves_nothing()


@pytest.mark.parametrize("kind", ["plain", "process_tree"])
def test_without_further_attempts_a_killed_trial_ends_in_error_that_names_the_signal(start, kind):
    search = start(kind=kind, trials=3, steps=8, max_failures=0, gate=3)
    killed = search.wait_for_step(1, step=4)
    relatives = process_tree_of(search, 1, killed)
    os.kill(killed, signal.SIGKILL)
    gone_after = seconds_until_dead([killed, *relatives])
    search.open_gate(8)
    assert search.ends() == 0, str(search)

    assert gone_after < TREE_GONE_WITHIN_S
    (error,) = search.folder.glob("search/*_00001/error.txt")
    assert "SIGKILL" in error.read_text(encoding="utf-8")
    said = search.said.decode()
    assert "SIGKILL" in said
    assert "1 ERROR" in said
    assert "2 TERMINATED" in said
    for number in (0, 2):
        assert [step for step, _ in search.steps(number)] == once_each(8)
        assert [step for step, _ in search.recorded(number)] == once_each(8)
    search.journal_gives_the_state()
    search.leaves_nothing()


def test_trial_whose_forkserver_is_killed_continues_although_no_failure_is_allowed(start):
    search = start(trials=2, steps=12, save_every=3, max_failures=0, gate=7)
    for number in range(2):
        search.wait_for_step(number, step=8)
        search.wait_for(m.ResultReported, trial=search.trial(number), step=7)
    forkserver = parent_of(search.wait_for_step(1, step=8))
    assert forkserver is not None
    os.kill(forkserver, signal.SIGKILL)
    search.open_gate(12)
    assert search.ends() == 0, str(search)

    for number in range(2):
        assert search.recorded(number) == [(n, 1000 * number + n) for n in once_each(12)]
        (error,) = search.folder.glob(f"search/*_{number:05d}/error.txt")
        told = error.read_text(encoding="utf-8")
        assert f"the forkserver {forkserver} was killed by SIGKILL" in told
        assert "not counted, because other trials ran there" in told
    assert "2 TERMINATED" in search.said.decode()
    assert not search.all_of(m.TrialProcessDied)
    search.journal_gives_the_state()
    search.leaves_nothing()


def test_twenty_deaths_are_journalled_and_recovered_from_soon(start, record_property):
    # Neither trial can finish, however long this takes.
    search = start(trials=2, steps=10_000, step_s=0.03, save_every=1, max_failures=-1, cpus=2)
    trial = search.trial(0)
    known, back = [], []
    for attempt in range(1, KILLS + 1):
        pid = search.wait_for(m.TrialStarted, trial=trial, attempt=attempt).event.pid
        search.wait_for(m.CheckpointCommitted, trial=trial, attempt=attempt)
        before = len(search.journal.seen)
        killed_at = time.monotonic()
        os.kill(pid, signal.SIGKILL)
        died = search.wait_for(m.TrialProcessDied, after=before, trial=trial, attempt=attempt)
        known.append(died.at - killed_at)
        result = search.wait_for(m.ResultReported, after=before, trial=trial, attempt=attempt + 1)
        back.append(result.at - killed_at)

    record_property("known_s", statistics.median(known))
    record_property("back_s", statistics.median(back))
    print(f"known {sorted(known)}\nback {sorted(back)}")
    assert statistics.median(known) < KNOWN_WITHIN_S, sorted(known)
    assert statistics.median(back) < BACK_WITHIN_S, sorted(back)
    steps = [step for step, _ in search.steps(0)]
    assert len(steps) - len(set(steps)) <= KILLS, "at most one step is repeated for each kill"
    other = [step for step, _ in search.steps(1)]
    assert other == once_each(len(other))


def process_tree_of(search: RunningSearch, number: int, pid: int) -> list[int]:
    """Return the running members of the process tree of a trial, if it has a process."""
    members = search.folder / "families" / f"{number}_{pid}"
    if not members.exists():
        return []
    pids = [int(pid) for pid in members.read_text(encoding="ascii").split()]
    assert len(pids) == 3
    assert all(map(is_alive, pids))
    return pids


def seconds_until_dead(pids: list[int]) -> float:
    started = time.monotonic()
    eventually(lambda: not any(map(is_alive, pids)), message="they live on")
    return time.monotonic() - started
