"""F15: the clock of Redis's machine is set back by an hour, or forward.

Redis numbers a stream's entries by its clock, and never lower than the last one. So an entry from
one hour ahead puts a stream into the state after the clock was set back; and after a wipe all
numbers are an hour lower than before.
"""

from __future__ import annotations

import time

import pytest

from tests.support.farms.farm_service import Search, farm_service
from tests.support.farms.own_farm import ChainRun, OwnFarm, farm
from tests.support.waiting import eventually
from tunemq_scheduler.farm.common.scheduler_lease import keep_term, read_term
from tunemq_scheduler.storage.folders import OWN_FOLDER
from tunemq_shared.broker import redis_keys

__all__ = ["farm"]

pytestmark = [pytest.mark.faults, pytest.mark.integration]

GOES_ON_WITHIN_S = 60.0


def eventually_keys(own: OwnFarm, pattern: str) -> list[bytes]:
    eventually(lambda: own.server.client.keys(pattern), within=10)
    return own.server.client.keys(pattern)


@pytest.mark.parametrize("lock_step", [True, pytest.param(False, marks=pytest.mark.soak)])
def test_f15_a_clock_that_was_set_back_by_an_hour_changes_nothing(farm, tmp_path, lock_step):
    own = farm()
    run = ChainRun(own, tmp_path, steps=60, lock_step=lock_step)
    run.wait_for_step(3)
    own.set_clock_back()
    run.continues(time.monotonic(), within=GOES_ON_WITHIN_S)
    run.ends()
    run.leaves_no_key()


@pytest.mark.parametrize("how", ["wiped", pytest.param("killed", marks=pytest.mark.soak)])
def test_f15_clock_set_back_with_data_loss_loses_no_result(farm, tmp_path, how):
    own = farm()
    run = ChainRun(own, tmp_path, steps=150)
    run.wait_for_step(3)
    for _ in range(3):
        own.set_clock_back()
        run.continues(time.monotonic(), within=GOES_ON_WITHIN_S)
        if how == "killed":
            back = own.kill_redis(0.3)
        else:
            own.server.client.flushall()
            back = time.monotonic()
        run.continues(back, within=GOES_ON_WITHIN_S)
    run.ends()


@pytest.mark.soak
def test_f15_clock_that_jumps_forward_ends_leases_and_no_node_is_lost(farm, tmp_path):
    """Every key with an expiry vanishes at once."""
    own = farm()
    run = ChainRun(own, tmp_path, steps=100)
    run.wait_for_step(3)
    for _ in range(3):
        eventually_keys(own, redis_keys.lease("*"))
        keys = own.server.client.keys("*")
        own.server.client.delete(*(key for key in keys if own.server.client.ttl(key) > 0))
        run.continues(time.monotonic(), within=GOES_ON_WITHIN_S)
    run.ends()


def test_f15_farm_whose_clock_was_ahead_serves_after_a_restart_with_an_empty_redis(tmp_path):
    """Nodes obey only terms that are greater than all before."""
    with farm_service(tmp_path, starts=False) as own:
        ahead = int(time.time()) + 10_800
        keep_term(own.results / OWN_FOLDER / "term", ahead)  # the clock that gave it was wrong
        own.start_scheduler()
        own.add_worker("one")
        own.submit(Search(name="first", trials=1, steps=3))
        own.wait_for("first", "FINISHED")
        own.kill_scheduler()
        own.redis.client.flushall()
        own.start_scheduler()
        own.submit(Search(name="second", trials=1, steps=3))
        own.wait_for("second", "FINISHED")
        assert read_term(own.results / OWN_FOLDER / "term") == ahead + 2
