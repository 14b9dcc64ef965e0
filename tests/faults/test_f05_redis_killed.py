"""F05: Redis is killed and comes back with all of its data, a part of it, or none."""

from __future__ import annotations

import os
import random
import time
from pathlib import Path

import pytest

from tests.support.farms.own_farm import ChainRun, OwnFarm, farm
from tests.support.waiting import eventually

__all__ = ["farm"]

pytestmark = [pytest.mark.faults, pytest.mark.integration]

#: A new command runs on every node this soon after Redis is back, however long it was away: the
#: soak tests check each outage against it. The second limit is for a busy machine.
BACK_WITHIN_S, BACK_AT_LAST_S = 2.0, 60.0
AOF = ("--appendonly", "yes", "--appendfsync", "everysec")


def a_moment(chance: random.Random) -> None:
    """Sleep for a random part of a second, so that the fault comes at a random moment."""
    time.sleep(chance.uniform(0, 0.5))


@pytest.mark.parametrize(
    "options",
    [(), pytest.param(AOF, marks=pytest.mark.soak)],
    ids=["data lost", "data kept"],
)
def test_f05_search_survives_a_redis_killed_repeatedly(farm, tmp_path, options):
    chance = random.Random(5)
    own = farm(redis=options)
    run = ChainRun(own, tmp_path, steps=150)
    run.wait_for_step(3)
    took = []
    for away_s in (0.0, 1.0, 0.2):
        a_moment(chance)
        took.append(run.continues(own.kill_redis(away_s), within=BACK_AT_LAST_S))
    print(f"a command ran after {took}")
    run.ends()
    run.leaves_no_key()


def test_f05_a_redis_that_lost_its_last_second_in_a_power_cut_is_noticed(farm, tmp_path):
    own = farm(redis=AOF)
    run = ChainRun(own, tmp_path, steps=100, lock_step=False, gate=60)  # it waits at the gate
    run.wait_for_step(20)
    own.server.kill()
    kept = Path(own.folder, "appendonly.aof")
    os.truncate(kept, kept.stat().st_size - 5000)
    own.server.start()
    run.open_gate(100)
    run.ends()
    assert any("lost data" in line for line in run.told), run.told


def test_f05_a_redis_that_is_still_loading_its_data_is_waited_for(farm, tmp_path):
    own = farm(redis=AOF)
    run = ChainRun(own, tmp_path, steps=120)
    run.wait_for_step(3)
    with own.server.client.pipeline(transaction=False) as pipeline:
        for n in range(3000):
            pipeline.set(f"another:{n}", "x", ex=3600)
        pipeline.execute()
    own.server.add_options("--key-load-delay", "500")
    back = own.kill_redis(0.0)
    run.continues(back, within=BACK_AT_LAST_S)
    run.ends()


@pytest.mark.soak
def test_f05_a_redis_that_becomes_a_read_only_replica_is_waited_for(farm, tmp_path):
    own = farm()
    run = ChainRun(own, tmp_path, steps=100)
    run.wait_for_step(3)
    own.server.client.replicaof("127.0.0.1", 1)  # no server listens there
    run.wait_for_silence()
    own.server.client.replicaof("NO", "ONE")
    run.continues(time.monotonic(), within=BACK_AT_LAST_S)
    run.ends()
    run.leaves_no_key()


@pytest.mark.soak
def test_f05_search_without_lock_step_survives_redis_outages_of_seconds(farm, tmp_path):
    own = farm()
    run = ChainRun(own, tmp_path, steps=200, lock_step=False)
    run.wait_for_step(20)
    own.kill_redis(3.0)
    run.ends()
    run.leaves_no_key()


@pytest.mark.soak
@pytest.mark.timeout(1200)
@pytest.mark.parametrize(
    ("away_s", "clock"), [(1.0, "right"), (5.0, "right"), (33.0, "right"), (1.0, "set back")]
)
@pytest.mark.parametrize("how", ["data lost", "data kept", "wiped"])
def test_f05_ten_outages_at_random_moments_lose_nothing(farm, tmp_path, how, away_s, clock):
    chance = random.Random(f"{how} {away_s}")
    own = farm(redis=AOF if how == "data kept" else (), nodes=3)
    run = ChainRun(own, tmp_path, trials=3, steps=500, step_s=0.05)
    run.wait_for_step(3)
    took = []
    for _ in range(10):
        a_moment(chance)
        if clock == "set back":
            own.set_clock_back()
        took.append(run.continues(_outage(own, how, away_s), BACK_AT_LAST_S))
    print(f"{how}, away for {away_s} s, clock {clock}: a command ran after {sorted(took)}")
    run.ends(within=300)
    assert max(took) < BACK_WITHIN_S, sorted(took)
    run.leaves_no_key()


def _outage(own: OwnFarm, how: str, away_s: float) -> float:
    if how != "wiped":
        return own.kill_redis(away_s)
    own.server.client.flushall()
    own.stop_redis(away_s)
    own.server.client.flushall()
    eventually(own.server.answers)
    return time.monotonic()
