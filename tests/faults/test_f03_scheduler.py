"""A farm's scheduler is killed, stopped or started twice: trials keep running, nothing is lost."""

from __future__ import annotations

import re
import signal
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.integration.farm_support import is_alive
from tests.support.farms.farm_service import SUPERSEDED, FarmService, Search, farm_service
from tests.support.waiting import eventually
from tunemq_scheduler.storage.last_run import read_record
from tunemq_shared.broker import redis_keys
from tunemq_shared.protocol import messages as m

pytestmark = [pytest.mark.faults, pytest.mark.slow]


@pytest.fixture
def farm(tmp_path: Path) -> Iterator[FarmService]:
    with farm_service(tmp_path) as farm:
        farm.add_worker("one")
        farm.add_worker("two")
        yield farm


def submit(farm: FarmService, up_to: int | None = None, **options: float) -> None:
    """Submit a search whose trials are not retried; they wait behind step ``up_to``."""
    given = {"save_every": 1000, "step_s": 0.05, **options}
    farm.submit(Search(name="search", failures=0, has_gate=up_to is not None, **given))
    if up_to is not None:
        farm.open_gate("search", up_to)


def ends_well(farm: FarmService, within: float = 120.0) -> None:
    """Wait for the end of the search; check its results."""
    farm.wait_for("search", "FINISHED", within)
    farm.check_results("search")


def committed(farm: FarmService, trials: int) -> list[int]:
    """Return the step of each trial's newest checkpoint in the journal; 0 where there is none."""
    newest = dict.fromkeys(range(trials), 0)
    for event in farm.events("search", m.CheckpointCommitted):
        newest[int(event.trial.rpartition("_")[2])] = event.step
    return list(newest.values())


def pause(seconds: float) -> None:
    """Sleep for as long as the scheduler is away: the test is about the length of the outage."""
    until = time.monotonic() + seconds
    eventually(lambda: time.monotonic() > until, within=seconds + 5)


@pytest.mark.parametrize(
    "downtime_s",
    [
        0.0,
        3.0,
        pytest.param(20.0, marks=pytest.mark.soak),
        pytest.param(60.0, marks=pytest.mark.soak),
    ],
)
def test_f03_kill_of_the_scheduler_while_four_trials_run_costs_no_step(farm, downtime_s):
    # Trials run half of the time without a scheduler, so that work remains for the next one.
    steps = 40 + int(downtime_s / 0.05 * 0.7)
    submit(farm, trials=6, steps=steps)
    farm.wait_for_steps("search", 4, 5)
    farm.kill_scheduler()
    before = farm.steps("search")
    pause(downtime_s)
    if downtime_s:
        under_way = [trial for trial, done in before.items() if len(done) < steps]
        # If the machine itself stood still for the whole pause, the test proves nothing.
        eventually(
            lambda: all(len(farm.steps("search")[one]) > len(before[one]) for one in under_way),
            message="trials stopped",
        )
    farm.start_scheduler()
    ends_well(farm, 120 + 3 * downtime_s)
    farm.check_steps("search")
    assert len(farm.events("search", m.TrialStarted)) == 6
    assert not farm.events("search", m.NodeLost)


@pytest.mark.soak
def test_f03_kill_of_the_scheduler_ten_times_in_a_row_costs_no_step(farm):
    submit(farm, trials=8, steps=100)
    for least in range(5, 55, 5):
        farm.wait_for_steps("search", 4, least)
        farm.kill_scheduler()
        farm.start_scheduler()
    ends_well(farm)
    farm.check_steps("search")


@pytest.mark.parametrize("where", ["journal.before_append", "journal.after_append"])
@pytest.mark.parametrize(
    "nth", [12, *(pytest.param(nth, marks=pytest.mark.soak) for nth in (5, 6, 20))]
)
def test_f03_kill_of_a_searchs_process_at_a_failpoint_costs_no_step(farm, where, nth):
    farm.kill_scheduler()
    farm.start_scheduler(variables={"TUNEMQ_FAILPOINTS": f"{where}=kill@{nth}"})
    submit(farm, trials=5, steps=20)
    eventually(lambda: "SIGKILL" in farm.said(), within=60, message=lambda: str(farm))
    farm.kill_scheduler()
    farm.start_scheduler()
    ends_well(farm)
    farm.check_steps("search")


@pytest.mark.soak
def test_f03_worker_that_died_without_a_scheduler_is_noticed(farm):
    submit(farm, trials=4, steps=60, save_every=5)
    farm.wait_for_steps("search", 4, 12)
    farm.kill_scheduler()
    farm.workers["one"].kill()
    farm.start_scheduler()
    ends_well(farm)
    assert len(farm.events("search", m.NodeLost)) == 1
    repeated = [len(done) - len(set(done)) for done in farm.steps("search").values()]
    # Two trials were on the killed worker; the others were not affected.
    assert sorted(repeated)[:2] == [0, 0]
    assert max(repeated) <= 2 * 5


def test_f03_a_second_scheduler_is_refused_while_the_first_one_lives(farm):
    submit(farm, 20, trials=2, steps=30)
    farm.wait_for_steps("search", 2, 2)
    first = farm.scheduler
    for folder in ((), ("--results", str(farm.folder / "never used"))):
        second = farm.start_scheduler(*folder)
        assert second.wait(60) == 75, farm
        assert f"process {first.pid} on " in farm.said()
    farm.scheduler = first
    farm.open_gate("search", 30)
    ends_well(farm)
    farm.check_steps("search")


@pytest.mark.soak
@pytest.mark.parametrize("seconds", [4.0, 11.0])
def test_f03_scheduler_stopped_for_a_while_continues_without_loss(farm, seconds):
    submit(farm, trials=2, steps=200, step_s=0.1)
    farm.wait_for_steps("search", 2, 5)
    farm.scheduler.send_signal(signal.SIGSTOP)
    pause(seconds)
    farm.scheduler.send_signal(signal.SIGCONT)
    ends_well(farm)
    farm.check_steps("search")
    assert not farm.events("search", m.NodeLost)


def test_f03_an_idle_scheduler_that_was_replaced_ends(farm):
    eventually(lambda: farm.redis.client.get(redis_keys.TERM))
    # What a successor does that found the lease run out.
    farm.redis.client.incrby(redis_keys.TERM, 10)
    assert farm.scheduler.wait(60) == 75, farm
    assert re.search(SUPERSEDED, farm.said()), farm


def test_f03_search_that_ended_before_its_deregistration_deregisters_later(farm):
    submit(farm, 20, trials=1, steps=30, step_s=0.01)
    farm.wait_for_steps("search", 1, 1)
    # The process cannot record its deregistration here: it sends none, and ends as if killed.
    in_the_way = farm.results / "search" / "journal" / "scheduler.part"
    in_the_way.mkdir()
    farm.open_gate("search", 30)
    eventually(lambda: "it is restarted in" in farm.said(), within=60, message=lambda: str(farm))
    stream = read_record(str(farm.results / "search")).events_key
    assert farm.redis.client.ttl(stream) == -1
    in_the_way.rmdir()
    ends_well(farm)
    eventually(lambda: farm.redis.client.ttl(stream) != -1)


def test_f03_a_redis_that_was_wiped_with_the_scheduler_away_loses_nothing(farm):
    submit(farm, trials=3, steps=60)
    farm.wait_for_steps("search", 2, 5)
    farm.kill_scheduler()
    term = int(farm.redis.client.get(redis_keys.TERM))
    farm.redis.client.flushall()
    pause(1.0)
    farm.start_scheduler()
    ends_well(farm)
    assert int(farm.redis.client.get(redis_keys.TERM)) > term
    farm.check_steps("search")


@pytest.mark.parametrize("kills_redis", [pytest.param(False, marks=pytest.mark.soak), True])
def test_f04_a_power_cut_repeats_at_most_one_interval_a_trial(farm, kills_redis):
    """The scheduler and the workers die at once; then Redis dies with all its data."""
    submit(farm, 14, trials=4, steps=40, save_every=5)
    farm.wait_for_steps("search", 4, 14)
    # Else the test would measure how long a checkpoint takes to reach the journal.
    eventually(
        lambda: all(newest >= 10 for newest in committed(farm, 4)), message=lambda: str(farm)
    )
    trial_pids = [event.pid for event in farm.events("search", m.TrialStarted)]
    assert len(trial_pids) == 4
    farm.kill_scheduler()
    for worker in farm.workers.values():
        worker.kill()
    if kills_redis:
        farm.redis.client.flushall()
    # A worker's trial processes end shortly after it; no step may run until they have ended.
    eventually(lambda: not any(map(is_alive, trial_pids)), within=60, message=lambda: str(farm))
    before = farm.steps("search")
    farm.open_gate("search", 40)
    farm.add_worker("one")
    farm.add_worker("two")
    farm.start_scheduler()
    ends_well(farm)
    for number, done in farm.steps("search").items():
        assert sorted(set(done)) == list(range(1, 41))
        assert len(done) - 40 <= 5, (number, before[number], done)
