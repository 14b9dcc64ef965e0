"""The scheduler of a farm is killed, stopped, started twice: trials go on, and nothing is lost."""

from __future__ import annotations

import signal
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.farm_processes import Farm, farms
from tests.integration.farm_support import is_alive
from tests.support import eventually
from tunemq_shared import messages as m
from tunemq_shared import wire

pytestmark = [pytest.mark.faults, pytest.mark.slow]


@pytest.fixture
def farm(tmp_path: Path) -> Iterator[Farm]:
    yield from farms(tmp_path)


def committed(farm: Farm, trials: int) -> list[int]:
    """The step of each trial's newest checkpoint in the journal; 0 where there is none."""
    newest = dict.fromkeys(range(trials), 0)
    for event in farm.all_of(m.CheckpointCommitted):
        newest[int(event.trial.rpartition("_")[2])] = event.step
    return list(newest.values())


def no_step_was_repeated(farm: Farm, trials: int, steps: int) -> None:
    assert farm.steps() == {number: list(range(1, steps + 1)) for number in range(trials)}


def pause(seconds: float) -> None:
    """Let the time pass for which a scheduler is away: that is what is tested, not waited for."""
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
    farm.worker("one")
    farm.worker("two")
    # Half of the time they run while nobody schedules; then there is something left to schedule.
    steps = 40 + int(downtime_s / 0.05 * 0.7)
    first = farm.scheduler(trials=6, steps=steps, step_s=0.05)
    farm.wait_for_steps(4, 5, within=60)
    first.kill()
    before = farm.steps()
    pause(downtime_s)
    if downtime_s:
        under_way = [trial for trial, done in before.items() if len(done) < steps]
        # A machine that stood still for the whole pause proves nothing of them.
        eventually(
            lambda: all(len(farm.steps()[trial]) > len(before[trial]) for trial in under_way),
            message="trials stopped",
        )
    second = farm.scheduler()
    assert second.ends(120 + 3 * downtime_s) == 0, farm
    no_step_was_repeated(farm, 6, steps)
    farm.nothing_is_missing_or_doubled(6, steps)
    assert len(farm.all_of(m.TrialStarted)) == 6
    assert not farm.all_of(m.NodeLost)


@pytest.mark.soak
def test_f03_kill_of_the_scheduler_ten_times_in_a_row_costs_no_step(farm):
    farm.worker("one")
    farm.worker("two")
    farm.scheduler(trials=8, steps=100, step_s=0.05)
    for least in range(5, 55, 5):
        farm.wait_for_steps(4, least, within=60)
        farm.schedulers[-1].kill()
        farm.scheduler()
    assert farm.schedulers[-1].ends(120) == 0, farm
    no_step_was_repeated(farm, 8, 100)
    farm.nothing_is_missing_or_doubled(8, 100)


@pytest.mark.parametrize("where", ["journal.before_append", "journal.after_append"])
@pytest.mark.parametrize(
    "nth", [2, *(pytest.param(nth, marks=pytest.mark.soak) for nth in (1, 3, 5, 12))]
)
def test_f03_kill_of_the_scheduler_at_a_failpoint_costs_no_step(farm, where, nth):
    farm.worker("one")
    farm.worker("two")
    killing = {"TUNEMQ_FAILPOINTS": f"{where}=kill@{nth}"}
    first = farm.scheduler(trials=5, steps=20, step_s=0.05, variables=killing)
    assert first.ends(60) == -signal.SIGKILL, farm
    second = farm.scheduler(variables=killing)  # it has turns of its own to be killed at
    assert second.ends(60) in {-signal.SIGKILL, 0}, farm
    assert farm.scheduler().ends(90) == 0, farm
    no_step_was_repeated(farm, 5, 20)
    farm.nothing_is_missing_or_doubled(5, 20)


@pytest.mark.soak
def test_f03_a_worker_that_died_while_no_scheduler_was_there_is_noticed(farm):
    farm.worker("one")
    farm.worker("two")
    farm.scheduler(trials=4, steps=60, save_every=5, step_s=0.05)
    farm.wait_for_steps(4, 12, within=60)
    farm.schedulers[0].kill()
    farm.workers["one"].kill()
    assert farm.scheduler().ends(90) == 0, farm
    farm.nothing_is_missing_or_doubled(4, 60)
    assert len(farm.all_of(m.NodeLost)) == 1
    repeated = [len(done) - len(set(done)) for done in farm.steps().values()]
    # Two trials were on the worker that died; the others were not touched.
    assert sorted(repeated)[:2] == [0, 0]
    assert max(repeated) <= 2 * 5


def test_f03_a_second_scheduler_is_refused_while_the_first_one_lives(farm):
    farm.worker("one")
    first = farm.scheduler(trials=2, steps=30, step_s=0.05, gate=20)
    farm.wait_for_steps(2, 2, within=60)
    for more in ((), ("--take-over",), ("--name", "another")):
        second = farm.scheduler(*more)
        assert second.ends(60) == 75, farm
        assert f"process {first.process.pid} on " in second.said
        assert "with the search search" in second.said
    farm.open_gate(30)
    assert first.ends(90) == 0, farm
    no_step_was_repeated(farm, 2, 30)
    farm.nothing_is_missing_or_doubled(2, 30)


@pytest.mark.soak
def test_f03_a_scheduler_that_was_stopped_for_ten_seconds_goes_on_as_if_nothing_had_been(farm):
    farm.worker("one")
    first = farm.scheduler(trials=2, steps=200, step_s=0.1)
    farm.wait_for_steps(2, 5, within=60)
    first.send(signal.SIGSTOP)
    pause(11.0)
    first.send(signal.SIGCONT)
    assert first.ends(90) == 0, farm
    no_step_was_repeated(farm, 2, 200)
    farm.nothing_is_missing_or_doubled(2, 200)
    assert not farm.all_of(m.NodeLost)


@pytest.mark.soak
def test_f03_a_stopped_scheduler_of_this_machine_is_killed_by_its_successor_if_that_may(farm):
    farm.worker("one")
    first = farm.scheduler(trials=3, steps=150, step_s=0.1)
    farm.wait_for_steps(2, 5, within=60)
    first.send(signal.SIGSTOP)
    refused = farm.scheduler()
    assert refused.ends(40) == 75, farm
    assert f"process {first.process.pid}" in refused.said
    assert "--take-over" in refused.said
    assert first.process.poll() is None
    second = farm.scheduler("--take-over")
    assert first.ends(40) == -signal.SIGKILL
    assert second.ends(120) == 0, farm
    no_step_was_repeated(farm, 3, 150)
    farm.nothing_is_missing_or_doubled(3, 150)


@pytest.mark.parametrize(
    "number", [pytest.param(signal.SIGINT, marks=pytest.mark.soak), signal.SIGTERM]
)
def test_f03_a_scheduler_that_is_told_to_stop_saves_and_the_same_command_goes_on(farm, number):
    farm.worker("one")
    first = farm.scheduler(trials=3, steps=40, save_every=4, step_s=0.05, gate=30)
    farm.wait_for_steps(2, 10, within=60)
    first.send(number)
    eventually(lambda: farm.all_of(m.Interrupted), within=60, message=lambda: str(farm))
    farm.open_gate(40)
    assert first.ends(60) == (130 if number is signal.SIGINT else -number), farm
    at_the_end = farm.steps()
    pause(0.5)
    assert farm.steps() == at_the_end, "trials went on without a scheduler that said goodbye"
    assert farm.redis.client.get(wire.SCHEDULER) is None
    assert farm.scheduler().ends(90) == 0, farm
    farm.nothing_is_missing_or_doubled(3, 40)
    repeated = [len(done) - len(set(done)) for done in farm.steps().values()]
    assert max(repeated) <= 4


def test_f03_the_same_command_for_a_search_that_is_over_shows_its_results(farm):
    farm.worker("one")
    assert farm.scheduler(trials=2, steps=3, step_s=0.01).ends(60) == 0, farm
    again = farm.scheduler()
    assert again.ends(60) == 0, farm
    no_step_was_repeated(farm, 2, 3)
    farm.nothing_is_missing_or_doubled(2, 3)


def test_f03_a_redis_that_was_wiped_with_the_scheduler_away_loses_nothing(farm):
    farm.worker("one")
    farm.scheduler(trials=3, steps=60, step_s=0.05)
    farm.wait_for_steps(2, 5, within=60)
    farm.schedulers[0].kill()
    term = int(farm.redis.client.get(wire.TERM))
    farm.redis.client.flushall()
    pause(1.0)
    second = farm.scheduler()
    assert second.ends(90) == 0, farm
    assert int(farm.redis.client.get(wire.TERM)) > term
    no_step_was_repeated(farm, 3, 60)
    farm.nothing_is_missing_or_doubled(3, 60)


@pytest.mark.parametrize("kills_redis", [pytest.param(False, marks=pytest.mark.soak), True])
def test_f04_a_power_cut_repeats_at_most_one_interval_a_trial(farm, kills_redis):
    """All at once: the scheduler, the workers, and then Redis with all that it knew."""
    farm.worker("one")
    farm.worker("two")
    farm.scheduler(trials=4, steps=40, save_every=5, step_s=0.05, gate=14)
    farm.wait_for_steps(4, 14, within=60)
    # Else this would be about how long a checkpoint is on its way to the journal.
    eventually(
        lambda: all(newest >= 10 for newest in committed(farm, 4)), message=lambda: str(farm)
    )
    for one in (farm.schedulers[0], *farm.workers.values()):
        one.kill()
    if kills_redis:
        farm.redis.client.flushall()
    # A worker's hosts end a moment after it; until then nobody's step may go on.
    hosts = [event.pid for event in farm.all_of(m.TrialStarted)]
    assert len(hosts) == 4
    eventually(lambda: not any(map(is_alive, hosts)), within=60, message=lambda: str(farm))
    before = farm.steps()
    farm.open_gate(40)
    farm.worker("one")
    farm.worker("two")
    assert farm.scheduler().ends(120) == 0, farm
    farm.nothing_is_missing_or_doubled(4, 40)
    for number, done in farm.steps().items():
        assert sorted(set(done)) == list(range(1, 41))
        assert len(done) - 40 <= 5, (number, before[number], done)


def test_a_scheduler_without_workers_says_so_and_waits_for_one(farm):
    first = farm.scheduler(trials=1, steps=3, step_s=0.01)
    first.says("There is no worker")
    assert f"tunemq worker --redis {farm.redis.url}" in first.said
    farm.worker("one")
    assert first.ends(60) == 0, farm
    farm.nothing_is_missing_or_doubled(1, 3)


@pytest.mark.soak
def test_a_trial_that_no_worker_can_hold_waits_for_a_bigger_one_and_says_so(farm):
    farm.worker("small", 1)
    first = farm.scheduler(trials=1, steps=3, step_s=0.01, cpus=3)
    first.says("waits for a bigger worker: a trial asks for cpu=3, the most that any node has is 1")
    assert not farm.all_of(m.TrialStarted)
    farm.worker("big", 4)
    assert first.ends(60) == 0, farm
    farm.nothing_is_missing_or_doubled(1, 3)
