"""F06: Redis loses all or some of its data while the server keeps running."""

from __future__ import annotations

import random
import time

import pytest

from tests.support.farms.own_farm import ChainRun, farm
from tests.support.waiting import eventually
from tunemq_shared.broker import redis_keys

__all__ = ["farm"]

pytestmark = [pytest.mark.faults, pytest.mark.integration]

BACK_AT_LAST_S = 60.0


def test_f06_search_survives_a_redis_wiped_repeatedly(farm, tmp_path):
    chance = random.Random(6)
    own = farm()
    run = ChainRun(own, tmp_path, steps=150, gate=75)  # the gate keeps it from finishing early
    run.wait_for_step(3)
    took = []
    for _ in range(5):
        time.sleep(chance.uniform(0, 0.5))  # the wipe comes at a random moment
        own.server.client.flushall()
        run.open_gate(150)
        took.append(run.continues(time.monotonic(), within=BACK_AT_LAST_S))
    print(f"a command ran after {took}")
    run.ends()
    assert any("lost data" in line for line in run.told), run.told
    run.leaves_no_key()


def test_f06_unread_results_are_sent_again_after_a_wipe(farm, tmp_path):
    own = farm(proxies=True)
    # The trials wait for each other: else the first one would finish before the last one gets
    # there.
    run = ChainRun(own, tmp_path, steps=100, lock_step=False, gate=5)
    run.wait_for_step(5)
    for seen in (5, 30, 55):
        own.to_scheduler.hold()
        run.open_gate(seen + 15)
        run.wait_for_step(seen + 15)
        own.server.client.flushall()
        own.to_scheduler.heal()
        run.open_gate(seen + 25)
        run.wait_for_step(seen + 25)
    run.open_gate(100)
    run.ends()


def test_f06_wipe_is_found_at_the_next_check(farm, tmp_path):
    own = farm()
    run = ChainRun(own, tmp_path, steps=120, gate=60)  # a finished trial does not look
    run.wait_for_step(3)
    generation = own.server.client.get(redis_keys.GENERATION)
    own.server.client.flushall()
    eventually(lambda: own.server.client.get(redis_keys.GENERATION), within=BACK_AT_LAST_S)
    assert own.server.client.get(redis_keys.GENERATION) != generation
    run.open_gate(120)
    run.ends()


@pytest.mark.soak
@pytest.mark.parametrize(
    "what",
    [
        "events",
        "leases",
        *(pytest.param(one, marks=pytest.mark.soak) for one in ("nodes", "replies", "queues")),
    ],
)
def test_f06_key_that_vanishes_from_redis_is_restored(farm, tmp_path, what):
    """A key is deleted by hand, expires when the clock jumps forward, or is evicted."""
    own = farm()
    run = ChainRun(own, tmp_path, steps=150)
    run.wait_for_step(3)
    patterns = {
        "events": "tunemq:events:*",
        "nodes": redis_keys.NODES,
        "replies": redis_keys.reply("*"),
        "queues": redis_keys.queue("*"),
        "leases": redis_keys.lease("*"),
    }
    for _ in range(4):
        for key in own.server.client.keys(patterns[what]):
            own.server.client.delete(key)
        run.continues(time.monotonic(), within=BACK_AT_LAST_S)
    run.ends()
    run.leaves_no_key()


@pytest.mark.soak
def test_f06_trimmed_stream_is_filled_again(farm, tmp_path):
    own = farm(proxies=True)
    run = ChainRun(own, tmp_path, steps=150, lock_step=False)
    run.wait_for_step(5)
    (key,) = own.server.client.keys("tunemq:events:*")
    own.to_scheduler.hold()
    run.wait_for_step(max(run.done().values()) + 20)
    assert own.server.client.xtrim(key, maxlen=0) > 0
    own.to_scheduler.heal()
    run.ends()
