"""The metrics of a running farm: a real scheduler, a real worker, a real scrape."""

from __future__ import annotations

import re
import socket
import time
import urllib.error
import urllib.request
from collections.abc import Iterator
from contextlib import closing
from pathlib import Path

import msgspec
import pytest
from prometheus_client.parser import text_string_to_metric_families

from tests.integration.gpu_fixtures import uuids
from tests.support.farms.farm_processes import TcpRedis
from tests.support.farms.farm_service import FarmService, Search
from tests.support.waiting import eventually
from tunemq_scheduler.base.lease_holder import LeaseHolder
from tunemq_shared.broker import redis_keys

__all__ = ["uuids"]

pytestmark = pytest.mark.integration


@pytest.fixture
def redis(tmp_path: Path) -> Iterator[TcpRedis]:
    redis = TcpRedis(tmp_path)
    yield redis
    redis.end()


@pytest.fixture
def farm(tmp_path: Path, redis: TcpRedis) -> Iterator[FarmService]:
    farm = FarmService(tmp_path, redis.url)
    try:
        farm.start_scheduler("--metrics", "127.0.0.1:0")
        yield farm
    finally:
        farm.close()


def test_scheduler_whose_port_for_metrics_is_taken_serves_the_farm_and_tries_again(
    tmp_path: Path, redis: TcpRedis, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A trial of its machine may hold the port while the scheduler restarts."""
    farm = FarmService(tmp_path, redis.url)
    with socket.create_server(("127.0.0.1", 0)) as held:
        port = held.getsockname()[1]
        try:
            farm.start_scheduler("--metrics", f"127.0.0.1:{port}")
            farm.await_scheduler()
            assert (
                f"--metrics 127.0.0.1:{port} cannot be used: Address already in use" in farm.said()
            )
            assert "Without metrics until then" in farm.said()
            held.close()
            eventually(lambda: "tunemq_redis_away{}" in scrape(farm), within=60)
        finally:
            farm.close()


def scrape(farm: FarmService) -> dict[str, float]:
    """Return all samples, by name and labels; the HTTP status if the server refuses."""
    found = re.search(r"Metrics are at (http://127\.0\.0\.1:\d+/metrics)", farm.said())
    if found is None:
        return {}
    try:
        with urllib.request.urlopen(found[1], timeout=60) as answer:
            families = text_string_to_metric_families(answer.read().decode())
    except urllib.error.HTTPError as problem:
        return {"status": problem.code}
    else:
        return {
            f"{one.name}{{{','.join(f'{k}={v}' for k, v in one.labels.items())}}}": one.value
            for family in families
            for one in family.samples
        }


def has(farm: FarmService, expected: dict[str, float]) -> None:
    """Wait until the metrics say this."""
    newest: dict[str, float] = {}

    def is_said() -> bool:
        newest.clear()
        newest.update(scrape(farm))
        return all(newest.get(key) == value for key, value in expected.items())

    def what_is_said() -> str:
        return f"{ {key: newest.get(key) for key in expected} }\n{sorted(newest)}{farm}"

    eventually(is_said, within=60, message=what_is_said)


def test_metrics_of_a_farm_follow_its_activity(farm, uuids):
    more = ("--gpus", ",".join(uuids), "--resources", '{"licence": 3}')
    worker = farm.add_worker("one", 4, *more)
    farm.has_nodes("one")
    farm.submit(
        Search(name="exp", trials=3, steps=6, resources={"cpu": 1, "gpu": 0.5}, has_gate=True)
    )
    farm.open_gate("exp", 2)
    farm.wait_for_steps("exp", 3, 2)
    has(
        farm,
        {
            "tunemq_experiments{state=RUNNING}": 1,
            "tunemq_queue_length{}": 0,
            "tunemq_trials{experiment=exp,state=RUNNING}": 3,
            "tunemq_results_total{}": 6,
            "tunemq_nodes{state=ready}": 1,
            "tunemq_node_cpus{node=one}": 4,
            "tunemq_node_cpus_used{node=one}": 3,
            "tunemq_node_gpus{node=one}": 2,
            "tunemq_node_gpus_used{node=one}": 1.5,
            "tunemq_node_resource{node=one,resource=licence}": 3,
            "tunemq_node_trials{node=one}": 3,
            "tunemq_node_trial_processes{node=one}": 3,
            "tunemq_redis_away{}": 0,
        },
    )
    samples = scrape(farm)
    held = [value for key, value in samples.items() if key.startswith("tunemq_gpu_held_ratio")]
    assert sorted(held) == [0.5, 1.0]
    assert 0 <= samples["tunemq_node_lease_age_seconds{node=one}"] < 60
    assert samples["tunemq_node_disk_free_bytes{node=one}"] > 0
    (owner,) = [value for key, value in samples.items() if key.startswith("tunemq_owner_gpus_held")]
    assert owner == 1.5
    turns = samples["tunemq_scheduler_turn_seconds_count{}"]
    eventually(lambda: scrape(farm)["tunemq_scheduler_turn_seconds_count{}"] > turns)
    assert farm.nodes()["one"].version

    farm.open_gate("exp", 6)
    farm.wait_for("exp", "FINISHED")
    has(
        farm,
        {
            "tunemq_experiments{state=FINISHED}": 1,
            "tunemq_results_total{}": 18,
            "tunemq_node_gpus_used{node=one}": 0,
        },
    )
    # Its process may still be ending.
    eventually(lambda: not any(key.startswith("tunemq_trials") for key in scrape(farm)))
    farm.tunemq("nodes", "retire", "one")
    assert worker.wait(60) == 0, farm
    eventually(lambda: not any(key.startswith("tunemq_node_cpus") for key in scrape(farm)))
    has(farm, {"tunemq_nodes{state=ready}": 0})


def test_metrics_of_a_farm_whose_redis_is_full_say_for_how_long(farm, redis):
    has(farm, {"tunemq_redis_full_seconds{}": 0, "tunemq_redis_away{}": 0})
    redis.client.config_set("maxmemory", "500000")
    eventually(lambda: scrape(farm)["tunemq_redis_full_seconds{}"] > 2, message=lambda: str(farm))
    assert scrape(farm)["tunemq_redis_away{}"] == 0
    redis.client.delete(redis_keys.SCHEDULER)  # the lease expires: it cannot be renewed
    done = farm.run("ls")
    assert (done.returncode, done.stdout) == (69, "")
    assert "is full" in done.stderr
    assert "CONFIG SET maxmemory" in done.stderr
    redis.client.config_set("maxmemory", "0")
    has(farm, {"tunemq_redis_full_seconds{}": 0})


def test_metrics_of_a_scheduler_that_starts_while_redis_is_full_say_for_how_long(tmp_path, redis):
    redis.client.config_set("maxmemory", "500000")
    farm = FarmService(tmp_path, redis.url)
    with closing(farm):
        farm.start_scheduler("--metrics", "127.0.0.1:0")
        eventually(
            lambda: scrape(farm).get("tunemq_redis_full_seconds{}", 0) > 2,
            message=lambda: f"{scrape(farm)}{farm}",
        )
        samples = scrape(farm)
        assert samples["tunemq_redis_away{}"] == 0
        assert time.time() - samples["tunemq_scheduler_said_timestamp_seconds{}"] < 30
        assert samples["tunemq_head_disk_size_bytes{disk=results}"] > 0
        assert not [key for key in samples if key.startswith(("tunemq_node", "tunemq_exp"))]
        redis.client.config_set("maxmemory", "0")
        has(farm, {"tunemq_redis_full_seconds{}": 0, "tunemq_nodes{state=ready}": 0})


def test_scheduler_that_waits_for_the_lease_of_another_serves_no_metrics(tmp_path, redis):
    another = msgspec.structs.replace(LeaseHolder.this_process(), host="elsewhere", place="there")
    lease = b"1:abcd:1:" + msgspec.json.encode(another)
    redis.client.set(redis_keys.SCHEDULER, lease, px=10_000)
    farm = FarmService(tmp_path, redis.url)
    with closing(farm):
        farm.start_scheduler("--metrics", "127.0.0.1:0")
        has(farm, {"status": 503})
        has(farm, {"tunemq_redis_full_seconds{}": 0, "tunemq_nodes{state=ready}": 0})
        assert "on elsewhere" in farm.said()
