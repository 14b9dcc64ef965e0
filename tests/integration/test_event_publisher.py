"""The batches that a node's event publisher appends for an order: all of them, or none."""

from __future__ import annotations

import time

import pytest

from tests.integration.farm_support import RedisServer
from tests.integration.node_fixtures import server
from tunemq_shared.base.errors import RedisUnavailable
from tunemq_shared.broker import redis_keys
from tunemq_shared.broker.redis_address import parse_address
from tunemq_workers.broker import event_publisher as publisher_module
from tunemq_workers.broker.event_publisher import EventPublisher
from tunemq_workers.broker.publisher_messages import (
    AppendBatches,
    AppendFailed,
    BatchesAppended,
    RenewLeaseNow,
)

__all__ = ["server"]

pytestmark = pytest.mark.integration

KEY = redis_keys.events("one")
BATCHES = ((b"first", b"1"), (b"second", b"2"))


class Pumping:
    """An event publisher without its thread."""

    def __init__(self, server: RedisServer, url: str) -> None:
        self.client = server.client
        self.client.set(redis_keys.GENERATION, "g1")
        self.client.xadd(KEY, {"h": "", "e": ""})
        self.reports = []
        self.publisher = EventPublisher(parse_address(url), "inc1", self.reports.append)
        self.publisher.is_hurried = False

    def append(self, generation=b"g1", key=KEY, batches=BATCHES):
        """Return the publisher's reports about an order to append, without answers to looks."""
        self.publisher._turn(AppendBatches(key, generation, batches))
        told = [
            report for report in self.reports if isinstance(report, BatchesAppended | AppendFailed)
        ]
        self.reports.clear()
        return told

    @property
    def length(self):
        return self.client.xlen(KEY) - 1

    def close(self):
        if self.publisher._client is not None:
            self.publisher._client.close()


@pytest.fixture
def pumping(server):
    pumping = Pumping(server, server.url)
    yield pumping
    pumping.close()


def test_pump_appends_all_batches_in_their_order(pumping):
    for _ in range(3):
        assert pumping.append() == [BatchesAppended(KEY)]
    entries = [fields for _, fields in pumping.client.xrange(KEY)]
    assert [entry[b"e"] for entry in entries] == [b"", *[b"1", b"2"] * 3]


def test_pump_asked_for_another_generation_appends_nothing(pumping):
    assert pumping.append(b"g0") == [AppendFailed(KEY, "Redis was reset")]
    assert pumping.append() == [BatchesAppended(KEY)]
    assert pumping.length == len(BATCHES)


@pytest.mark.parametrize("value", ["g2", "g1", None])
def test_generation_written_since_the_last_append_stops_the_next_one(pumping, value):
    assert pumping.append() == [BatchesAppended(KEY)]
    pumping.client.delete(redis_keys.GENERATION)
    if value is not None:
        pumping.client.set(redis_keys.GENERATION, value)
    assert pumping.append() == [AppendFailed(KEY, "Redis was reset")]
    assert pumping.length == len(BATCHES)
    pumping.client.set(redis_keys.GENERATION, "g3")
    pumping.append(b"g3")
    assert pumping.append(b"g3") == [BatchesAppended(KEY)]


def test_pump_appends_nothing_to_a_missing_stream(pumping):
    pumping.client.delete(KEY)
    assert pumping.append() == [AppendFailed(KEY, "the stream is missing")]
    assert not pumping.client.exists(KEY)


def test_pump_appends_nothing_where_redis_is_full(pumping):
    pumping.append()
    pumping.client.config_set("maxmemory", 1)
    (told,) = pumping.append()
    assert isinstance(told, AppendFailed)
    assert "OOM" in told.reason or "EXECABORT" in told.reason
    pumping.client.config_set("maxmemory", 0)
    assert pumping.length == len(BATCHES)
    assert pumping.append() == [BatchesAppended(KEY)]


@pytest.mark.parametrize("missing", ["-multi", "-exec", "-watch"])
def test_pump_without_the_right_to_transactions_appends_nothing_and_says_so(server, missing):
    server.client.execute_command(
        *("ACL", "SETUSER", "old", "on", ">secret", "~tunemq*", "+@all", missing)
    )
    old = Pumping(server, server.url.replace("unix://", "unix://old:secret@"))
    with pytest.raises(RedisUnavailable, match=r"refuses events: .*NOPERM"):
        old.append()
    old.close()
    assert old.length == 0


def test_pump_whose_loop_takes_no_facts_for_long_lets_the_lease_expire(pumping, monkeypatch):
    monkeypatch.setattr(publisher_module, "LOOP_HANGS_S", 0.2)
    pumping.publisher.is_hurried = True
    pumping.publisher._turn(None)
    lease = redis_keys.lease("inc1")
    assert pumping.client.exists(lease)
    pumping.client.delete(lease)
    time.sleep(0.3)

    pumping.publisher._turn(None)
    assert not pumping.client.exists(lease)

    pumping.publisher.reports_handled()
    pumping.publisher._turn(RenewLeaseNow())
    assert pumping.client.exists(lease)
