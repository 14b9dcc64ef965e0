"""Whether nodes may still run trials of a lost scheduler's search, on a real Redis."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.support.farms.farm_processes import TcpRedis
from tunemq_scheduler.farm.service.take_over import LostSearch, is_running
from tunemq_shared.broker import redis_keys

pytestmark = pytest.mark.integration

LOST = LostSearch(
    name="lost",
    address="s3://b/lost",
    events_key=redis_keys.events("ab12c3f4.2"),
    term=7,
    has_ended=False,
)


@pytest.fixture
def redis(tmp_path: Path) -> Iterator[TcpRedis]:
    redis = TcpRedis(tmp_path)
    yield redis
    redis.end()


def test_the_id_of_a_lost_search_is_that_of_its_trials():
    assert LOST.id == "ab12c"


def test_lost_search_counts_as_running_until_it_deregisters_or_another_farm_comes(redis):
    client = redis.client
    assert is_running(redis.url, LOST), "Redis was wiped, and nodes were not"
    client.set(redis_keys.STREAMS, redis_keys.listed([redis_keys.events("farm"), LOST.events_key]))
    client.xadd(LOST.events_key, {"h": "x"})
    assert is_running(redis.url, LOST)
    client.expire(LOST.events_key, 60)
    assert not is_running(redis.url, LOST), "its scheduler deregistered"
    client.persist(LOST.events_key)
    client.set(redis_keys.STREAMS, redis_keys.listed([redis_keys.events("farm")]))
    assert not is_running(redis.url, LOST), "another scheduler had the farm"
