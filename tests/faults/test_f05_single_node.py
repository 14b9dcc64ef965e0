"""F05 with a single node: its silence is not mistaken for a network failure of all nodes."""

from __future__ import annotations

import time

import pytest

from tests.support.farms.own_farm import ChainRun, farm
from tests.support.waiting import eventually
from tunemq_shared.broker import redis_keys

__all__ = ["farm"]

pytestmark = [pytest.mark.faults, pytest.mark.integration]


def test_f05_time_without_redis_does_not_count_as_silence_of_a_node(farm, tmp_path):
    own = farm(nodes=1, cpus=2, proxies=True)
    run = ChainRun(own, tmp_path, steps=40)
    run.wait_for_step(5)
    own.to_nodes.cut(stay=True)
    back = own.kill_redis(away_s=redis_keys.LEASE_TTL_S + 1.5)
    # The scheduler has Redis back, and watches the lease of a node that has not.
    eventually(lambda: own.server.client.get(redis_keys.GENERATION))
    eventually(lambda: time.monotonic() > back + 1.0)
    own.to_nodes.heal()
    run.ends()  # checks that no node was lost and no step repeated
