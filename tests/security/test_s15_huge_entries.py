"""S15: huge entries by an attacker with a worker's password cost the scheduler little."""

from __future__ import annotations

import tracemalloc
from collections.abc import Callable, Iterator
from contextlib import closing, contextmanager
from pathlib import Path

import pytest

from tests.integration.farm_support import Node, RedisServer, Scheduler
from tests.integration.node_fixtures import server
from tests.support.farms.farm_api_server import served
from tests.support.waiting import eventually
from tunemq_scheduler.api.farm_client import FarmClient
from tunemq_scheduler.base.lease_holder import LeaseHolder
from tunemq_scheduler.farm.common.scheduler_lease import SchedulerLease
from tunemq_scheduler.farm.output.trial_output_collector import OutputReader
from tunemq_scheduler.security.signing_downgrade import refuse_unsigned
from tunemq_scheduler.transport.node_transport import NodeTransport
from tunemq_scheduler.transport.redis.bounded_replies import REPLY_BYTES, STRING_BYTES
from tunemq_scheduler.transport.redis.redis_connection import RedisConnection
from tunemq_scheduler.transport.redis.stream_reader import StreamReader
from tunemq_scheduler.transport.scheduler_signing import SchedulerSigning
from tunemq_shared.base.errors import SchedulerSuperseded
from tunemq_shared.broker import redis_keys as names
from tunemq_shared.protocol.messages import NodeJoined
from tunemq_shared.protocol.output_chunks import OutputChunk, encode
from tunemq_shared.signing.live_keys import LiveKeys

__all__ = ["server"]

pytestmark = [pytest.mark.integration, pytest.mark.security]

HUGE = b"x" * (60 * 2**20)
EVENTS = names.events("one")


@contextmanager
def costs_little(most: int = 3 * REPLY_BYTES) -> Iterator[None]:
    tracemalloc.start()
    try:
        yield
        _, peak = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()
    assert peak < most, f"{peak / 2**20:.0f} MiB"


def read(reader: StreamReader, is_enough: Callable[[list[bytes]], bool]) -> list[bytes]:
    """Read until the condition holds; return the values of the entries' fields."""
    values: list[bytes] = []

    def look() -> bool:
        reader.ask()
        if reader.wait(0.1, ())[0]:
            for entries in reader.take().values():
                values.extend(value for _, fields in entries for value in fields.values())
        return is_enough(values)

    eventually(look, every=0)
    return values


@pytest.fixture
def reader(server: RedisServer) -> Iterator[StreamReader]:
    reader = StreamReader(RedisConnection(server.url))
    for key in (names.NODES, EVENTS):
        reader.watch(key)
    yield reader
    reader.reset()


def test_huge_entries_are_removed_unread_and_those_between_them_are_read(server, reader):
    client = server.client
    for number in range(6):
        client.xadd(names.NODES, {"hello": HUGE})
        client.xadd(names.NODES, {"hello": b"%d" % number})
    client.xadd(EVENTS, {"h": "x", "e": HUGE})
    client.xadd(EVENTS, {"h": "last"})
    with costs_little():
        values = read(reader, lambda values: len(values) == 7)
    assert sorted(values) == sorted([*(b"%d" % number for number in range(6)), b"last"])
    assert reader.removed.count(names.NODES) == 6
    assert reader.removed.count(EVENTS) == 1
    assert client.xlen(names.NODES) == 6


def test_entries_that_are_long_but_allowed_are_all_read_in_order(server, reader):
    long = 39 * 2**20
    for number in range(5):
        for key in (EVENTS, names.events("two")):
            server.client.xadd(key, {"e": b"%d" % number * long})
    reader.watch(names.events("two"))
    seen: list[int] = []

    def is_enough(values: list[bytes]) -> bool:
        seen.extend(int(value[:1]) for value in values)
        assert {len(value) for value in values} <= {long}
        values.clear()
        return len(seen) == 10

    with costs_little():
        read(reader, is_enough)
    assert sorted(seen) == sorted([*range(5), *range(5)])
    assert reader.removed == []


def test_many_fields_count_as_much_as_long_fields(server, reader):
    for _ in range(4):
        server.client.xadd(names.NODES, dict.fromkeys(range(200_000), b""))
    server.client.xadd(names.NODES, {"hello": "last"})
    with costs_little():
        assert read(reader, lambda values: b"last" in values)[-1] == b"last"
    assert reader.removed


def test_wire_with_huge_entries_and_leases_finds_its_node_and_counts_them(server, tmp_path):
    client = server.client
    for _ in range(3):
        client.xadd(names.NODES, {"hello": HUGE})
    with closing(NodeTransport(server.url, term=1)) as transport:
        transport.open()
        eventually(lambda: (transport.poll(0.05), client.xlen(names.NODES) == 0)[1])
        experiment = transport.add(EVENTS)
        node = Node(server, Scheduler(server, tmp_path, "one"), tmp_path / "node")
        facts: list[object] = []

        def is_joined() -> bool:
            transport.poll(0.05)
            facts.extend(experiment.take())
            return any(isinstance(fact, NodeJoined) for fact in facts)

        def is_dropped() -> bool:
            transport.poll(0.05)
            return client.strlen(key) < len(HUGE)

        try:
            eventually(is_joined, message=node.log)
            for kind in (names.node_metrics, names.lease):
                key = kind(node.instance_id)
                client.set(key, HUGE)
                eventually(is_dropped)
            for key in (names.GENERATION, names.SIGNS):
                client.set(key, HUGE)
                client.client_kill_filter(_type="normal", skipme=True)
                eventually(is_dropped)
        finally:
            node.end()
        assert ("registration", "oversized", 3) in transport.rejections.counts()


def test_lease_and_start_read_no_huge_strings(server):
    server.client.set(names.SIGNS, HUGE)
    with costs_little(2**20):
        refuse_unsigned(server.url, LiveKeys.none(), is_insecure=False, tell=print)
    server.client.set(names.SCHEDULER, HUGE, px=100)
    lease = SchedulerLease(server.url, LeaseHolder.this_process())
    try:
        with costs_little(2**20):
            lease.claim(1, print)
            server.client.set(names.TERM, lease.term + 1)
            server.client.set(names.SCHEDULER, HUGE)
            eventually(lambda: not is_ours(lease))
    finally:
        lease.close()


def is_ours(lease: SchedulerLease) -> bool:
    try:
        lease.check_known()
    except SchedulerSuperseded:
        return False
    return True


def test_requests_and_output_continue_after_huge_entries(server, tmp_path: Path):
    server.client.xadd(names.REQUESTS, {"body": HUGE})
    with served(server.url, server.client, tmp_path) as _, FarmClient(server.url) as asker:
        assert asker.farm().store
    news: list[str] = []
    signing = SchedulerSigning()
    reader = OutputReader(server.url, news.append, signing.output, signing.rejected.add)
    server.client.xadd(names.output(EVENTS), {names.CHUNK: HUGE})
    (tmp_path / "train_t1").mkdir()
    reader.follow({"one": (tmp_path, EVENTS)})
    reader.start()
    try:
        eventually(lambda: not server.client.exists(names.output(EVENTS)))
        chunk = OutputChunk("t1", 1, "train_t1", "stdout", 0, b"hello\n")
        server.client.xadd(names.output(EVENTS), {names.CHUNK: b"\0" + encode(chunk)})
        eventually((tmp_path / "train_t1" / "stdout").exists)
    finally:
        reader.close()
    assert signing.rejected.counts() == (("output", "oversized", 1),)
    assert len(HUGE) > STRING_BYTES
