"""F07: Redis is out of memory, or evicts TuneMQ's keys to free memory."""

from __future__ import annotations

import time
from contextlib import closing, suppress
from pathlib import Path

import pytest
import redis

from tests.integration.farm_support import RedisServer
from tests.integration.node_fixtures import server
from tests.support.farms.farm_service import FarmService, farm_service
from tests.support.farms.own_farm import ChainRun, OwnFarm, farm
from tests.support.waiting import eventually
from tunemq_scheduler.base.experiment_plan import ExperimentPlan
from tunemq_scheduler.base.lease_holder import LeaseHolder
from tunemq_scheduler.farm.common.scheduler_lease import SchedulerLease
from tunemq_scheduler.security.redis_probes import refuse_dangers
from tunemq_scheduler.transport.celery_executor import CeleryTrialExecutor
from tunemq_scheduler.transport.node_transport import NodeTransport
from tunemq_shared.base.errors import ConfigError
from tunemq_shared.broker import redis_keys
from tunemq_shared.protocol import messages as m

__all__ = ["farm", "server"]

pytestmark = [pytest.mark.faults, pytest.mark.integration]

PLAN = ExperimentPlan(
    experiment="e",
    experiment_id="exp1",
    events_key=redis_keys.events("exp1"),
    folder="/results/e",
    trainable_name="train",
    code=m.BlobRef("0", 1, "/code"),
    environment=m.Environment("python", (), {}, ()),
)


def fill(own: OwnFarm) -> None:
    """Lower Redis's memory limit, so that it rejects every command that needs memory."""
    own.server.client.config_set("maxmemory", "1mb")


def make_room(own: OwnFarm) -> float:
    """Lift Redis's memory limit; return the monotonic time at which it accepts writes again."""
    own.server.client.config_set("maxmemory", "0")
    return time.monotonic()


def continues_beyond(run: ChainRun, gate: int) -> None:
    """Open the gate up to this step; wait until each trial has done two more steps."""
    before = run.done()  # read before the gate opens: a trial at the new gate has progressed, too
    run.open_gate(gate)
    eventually(
        lambda: all(run.done()[number] >= done + 2 for number, done in before.items()),
        message=run.state,
    )


@pytest.mark.parametrize("lock_step", [pytest.param(True, marks=pytest.mark.soak), False])
def test_f07_a_search_waits_while_redis_is_full_says_so_and_continues(farm, tmp_path, lock_step):
    own = farm()
    run = ChainRun(own, tmp_path, steps=250, lock_step=lock_step, gate=120)
    for step, gate in ((3, 200), (30, 250)):
        run.wait_for_step(step)
        run.told.clear()
        fill(own)
        eventually(lambda: any("Redis has been full" in line for line in run.told))
        time.sleep(1.0)  # Redis rejects leases meanwhile
        make_room(own)
        # Wait before the gate lets trials finish: a finished trial does not look.
        eventually(lambda: any("Redis has room again" in line for line in run.told))
        continues_beyond(run, gate)
    run.ends()
    run.leaves_no_key()


@pytest.mark.soak
@pytest.mark.slow
def test_f07_no_node_is_lost_while_redis_takes_no_leases(farm, tmp_path):
    own = farm(nodes=1)
    run = ChainRun(own, tmp_path, trials=1, steps=60)
    run.wait_for_step(3)
    fill(own)
    time.sleep(redis_keys.LEASE_TTL_S + 3)  # longer than a lease lasts
    run.continues(make_room(own))
    run.ends()


def test_f07_node_that_starts_while_redis_is_full_joins_later(farm, tmp_path):
    own = farm(nodes=1)
    run = ChainRun(own, tmp_path, steps=120)
    run.wait_for_step(3, trials=1)
    fill(own)
    newcomer = own.add_node()
    eventually(lambda: "consumer.started" in newcomer.log())
    time.sleep(3.0)  # it tries to register meanwhile
    make_room(own)
    run.wait_for_step(1)
    run.ends()


@pytest.mark.parametrize("policy", ["allkeys-lru", "allkeys-random", "volatile-ttl"])
def test_f07_a_redis_that_evicts_keys_is_refused_with_what_to_do(server: RedisServer, policy: str):
    server.client.config_set("maxmemory", "100mb")
    server.client.config_set("maxmemory-policy", policy)
    with pytest.raises(ConfigError, match=f"{policy}.*CONFIG SET maxmemory-policy noeviction"):
        refuse_dangers(server.url, is_insecure=False, tell=_ignore)
    told: list[str] = []
    refuse_dangers(server.url, is_insecure=True, tell=told.append)
    assert any(policy in line for line in told)


def test_f07_redis_with_a_risky_eviction_policy_is_a_notice(server: RedisServer):
    server.client.config_set("maxmemory-policy", "volatile-ttl")
    told: list[str] = []
    refuse_dangers(server.url, is_insecure=False, tell=told.append)
    assert any("volatile-ttl" in line for line in told)


def test_f07_user_who_may_not_read_the_eviction_policy_gets_a_notice(server: RedisServer):
    server.client.execute_command(
        "ACL", "SETUSER", "someone", "on", ">secret", "~*", "&*", "+@all", "-info"
    )
    url = server.url.replace("unix://", "unix://someone:secret@")
    told: list[str] = []
    refuse_dangers(url, is_insecure=False, tell=told.append)
    assert any("'someone' may not ask" in line for line in told)
    executor = CeleryTrialExecutor(url, term=1)
    executor.open(PLAN)
    executor.close()


def test_f07_scheduler_starts_on_a_redis_filled_with_entries_of_no_node(tmp_path: Path):
    with farm_service(tmp_path, starts=False) as farm, closing(client_of(farm)) as client:
        client.config_set("maxmemory", "20mb")
        with suppress(redis.OutOfMemoryError):
            while True:
                client.xadd(redis_keys.NODES, {"e": b"x" * 20_000})
        farm.start_scheduler()
        farm.add_worker("one")
        farm.has_nodes("one")


def test_f07_scheduler_that_starts_on_a_full_redis_waits_for_room_and_comes_up(tmp_path: Path):
    with farm_service(tmp_path, starts=False) as farm, closing(client_of(farm)) as client:
        client.set("ballast", b"x" * 2**22)
        client.config_set("maxmemory", "3mb")
        scheduler = farm.start_scheduler()
        log = tmp_path / "head" / "scheduler.log"
        eventually(lambda: log.exists() and "Waiting for room" in log.read_text())
        time.sleep(3)
        assert scheduler.poll() is None, log.read_text()
        client.config_set("maxmemory", "0")
        farm.add_worker("one")
        farm.has_nodes("one")


def test_f07_wire_of_a_farm_opened_on_a_full_redis_is_away_until_there_is_room(server: RedisServer):
    lease = SchedulerLease(server.url, LeaseHolder.this_process())
    lease.claim(1, _ignore)
    with (
        closing(lease),
        closing(NodeTransport(server.url, term=lease.term, guard=lease)) as node_wire,
    ):
        server.client.config_set("maxmemory", "100kb")
        node_wire.open()
        assert any("full" in line for line in node_wire.notes())
        node_wire.poll(0.5)
        server.client.config_set("maxmemory", "0")
        eventually(lambda: (node_wire.poll(0.1), not node_wire.is_away)[1])
        eventually(lambda: (node_wire.poll(0.1), not node_wire.notes())[1])


def client_of(farm: FarmService) -> redis.Redis:
    return redis.Redis.from_url(farm.url)


def _ignore(line: str) -> None:
    pytest.fail(f"told, and not refused: {line}")
