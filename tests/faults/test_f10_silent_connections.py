"""F10: connections to Redis that fail silently, in one direction or both; a Redis that hangs."""

from __future__ import annotations

import time

import pytest

from tests.support.farms.own_farm import ChainRun, farm
from tests.support.proxies.tcp_proxy import DOWN, UP
from tunemq_shared.broker import redis_keys

__all__ = ["farm"]

pytestmark = [pytest.mark.faults, pytest.mark.integration]

#: A client that waits for an answer gives up after at most eight seconds and reconnects. The limits
#: here and below allow for a busy machine.
GIVES_UP_WITHIN_S = 60.0
#: A stalled run continues within this time.
GOES_ON_WITHIN_S = 20.0


@pytest.mark.parametrize(
    ("whose", "directions"),
    [
        ("to_nodes", (UP, DOWN)),
        pytest.param("to_nodes", (DOWN,), marks=pytest.mark.soak),
        ("to_scheduler", (UP, DOWN)),
        pytest.param("to_scheduler", (UP,), marks=pytest.mark.soak),
        pytest.param("to_nodes", (UP,), marks=pytest.mark.soak),
        pytest.param("to_scheduler", (DOWN,), marks=pytest.mark.soak),
    ],
)
def test_f10_silently_dead_connections_block_nothing_for_ever(farm, tmp_path, whose, directions):
    own = farm(proxies=True)
    run = ChainRun(own, tmp_path, steps=80)
    run.wait_for_step(3)
    proxy = getattr(own, whose)
    proxy.go_silent(*directions)
    run.wait_for_silence()
    proxy.heal()  # silent connections stay silent for ever
    took = run.continues(time.monotonic(), within=GIVES_UP_WITHIN_S)
    print(f"{whose} {directions}: {took:.1f} s")
    run.ends()


@pytest.mark.soak
def test_f10_consumer_that_receives_nothing_is_replaced(farm, tmp_path):
    own = farm(proxies=True)
    run = ChainRun(own, tmp_path, steps=80)
    run.wait_for_step(3)
    for _ in range(2):
        assert own.to_nodes.silence(b"BRPOP") == 2, "each node has a consumer"
        run.continues(time.monotonic(), within=GOES_ON_WITHIN_S)
    run.ends()
    assert "was announced and did not come" in own.logs()


@pytest.mark.slow
def test_f10_while_all_nodes_are_cut_off_for_longer_than_a_lease_none_is_lost(farm, tmp_path):
    own = farm(proxies=True)
    run = ChainRun(own, tmp_path, steps=60)
    run.wait_for_step(3)
    own.to_nodes.go_silent()
    time.sleep(redis_keys.LEASE_TTL_S + 3)  # the test is about the length of the outage
    own.to_nodes.heal()
    run.continues(time.monotonic(), within=GIVES_UP_WITHIN_S)
    run.ends()


@pytest.mark.soak
def test_f10_repeated_connection_resets_do_no_harm(farm, tmp_path):
    own = farm(proxies=True)
    run = ChainRun(own, tmp_path, steps=150)
    run.wait_for_step(3)
    for proxy in (own.to_nodes, own.to_scheduler) * 3:
        proxy.cut()
        run.continues(time.monotonic(), within=GOES_ON_WITHIN_S)
    own.to_nodes.cut(stay=True)
    time.sleep(1.0)  # no client connects during this second
    own.to_nodes.heal()
    run.continues(time.monotonic(), within=GOES_ON_WITHIN_S)
    run.ends()
    run.leaves_no_key()


@pytest.mark.slow
def test_f10_a_redis_that_hangs_for_five_seconds_costs_five_seconds(farm, tmp_path):
    own = farm()
    run = ChainRun(own, tmp_path, steps=80)
    run.wait_for_step(3)
    run.continues(own.stop_redis(5.0), within=GOES_ON_WITHIN_S)
    run.ends()
    run.leaves_no_key()


@pytest.mark.soak
@pytest.mark.parametrize("lock_step", [True, pytest.param(False, marks=pytest.mark.soak)])
def test_f10_slow_connection_to_redis_only_delays_the_search(farm, tmp_path, lock_step):
    own = farm(proxies=True)
    own.to_nodes.slow(delay_s=0.05, bytes_per_s=200_000)
    own.to_scheduler.slow(delay_s=0.05, bytes_per_s=200_000)
    run = ChainRun(own, tmp_path, steps=15, lock_step=lock_step)
    run.ends()
