"""S15: an entry with the greatest id, after which Redis appends none, blocks no process for long.

Nodes repeat the events that a scheduler with other keys discarded.
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest
from redis.exceptions import ResponseError

from tests.integration.farm_support import RedisServer
from tests.integration.node_fixtures import server
from tests.security.signed_farm import KEY, SignedTransport
from tests.support.farms.farm_api_server import served
from tests.support.keys import key_folder, of_scheduler, of_submitter
from tests.support.waiting import eventually
from tunemq_scheduler.api.farm_client import FarmClient
from tunemq_scheduler.security.signing_downgrade import refuse_unsigned
from tunemq_scheduler.transport import node_transport
from tunemq_scheduler.transport.node_transport import NodeTransport
from tunemq_shared.base.errors import ConfigError
from tunemq_shared.broker import redis_keys as names
from tunemq_shared.protocol import messages as m
from tunemq_shared.signing.live_keys import LiveKeys

__all__ = ["server"]

pytestmark = [pytest.mark.integration, pytest.mark.security]

_GREATEST = 2**64 - 1
_LAST = f"{_GREATEST}-{_GREATEST}"


@pytest.fixture
def transport(server: RedisServer, tmp_path: Path, monkeypatch) -> Iterator[SignedTransport]:
    monkeypatch.setattr(node_transport, "_POLL_INTERVAL_S", 0.05)
    transport = SignedTransport(server, tmp_path)
    yield transport
    transport.close()


@pytest.mark.parametrize(("key", "kind"), [(names.NODES, "registration"), (KEY, "events")])
def test_s15_exhausted_stream_is_replaced(transport, server, key, kind):
    generation = server.client.get(names.GENERATION)
    server.client.xadd(key, {"x": "y"}, id=_LAST)
    with pytest.raises(ResponseError, match=r"exhausted|equal or smaller"):
        server.client.xadd(key, {"x": "y"})
    transport.until(lambda: transport.counted().get((kind, "early")))
    transport.until(lambda: server.client.get(names.GENERATION) not in {None, generation})
    assert [line for line in transport.notices if key in line]

    node = transport.node("inc1")
    node.send_registration()
    node.send(KEY, m.TrialFinished("t1", 1))
    transport.until(lambda: transport.said(m.TrialFinished))


def test_s15_requests_are_taken_again_after_the_greatest_id(server, tmp_path):
    keys = key_folder(tmp_path / "keys", "ada")
    server.client.xadd(names.REQUESTS, {"x": "y"}, id=_LAST)
    with (
        served(server.url, server.client, tmp_path / "results", keys=of_scheduler(keys)),
        FarmClient(server.url, owner="ada", keys=of_submitter(keys, "ada")) as ada,
    ):
        eventually(lambda: not server.client.exists(names.REQUESTS))
        assert ada.farm().store


def test_nodes_rejected_by_a_scheduler_without_keys_come_back(transport, server):
    node = transport.node("inc1")
    before = server.client.get(names.GENERATION)
    transport.transport.close(now=True)
    server.client.set(names.SIGNS, "abcdef01")  # as a farm's scheduler does
    keyless = NodeTransport(server.url, term=2)
    keyless.open()
    try:
        without = server.client.get(names.GENERATION)
        assert without != before, "nodes say again what another threw away"
        node.send_registration()
        while not keyless.rejections.counts():
            keyless.poll(0.02)
        keyless.flush()
    finally:
        keyless.close(now=True)
    eventually(lambda: not server.client.xlen(names.NODES))  # gone before Redis answers
    transport.term = 2
    transport.start()
    assert server.client.get(names.GENERATION) not in {None, before, without}


def test_events_of_ended_nodes_survive_a_change_of_keys(transport, server):
    node = transport.node("inc1")
    node.send_registration()
    node.send(KEY, m.TrialFinished("t1", 1))
    transport.until(lambda: transport.said(m.TrialFinished))
    transport.stranger("inc9").send_registration()
    transport.until(lambda: transport.counted().get(("registration", "unknown_key")))
    generation = server.client.get(names.GENERATION)
    transport.folder.rotate()
    transport.until(lambda: server.client.get(names.GENERATION) not in {None, generation})
    assert server.client.xlen(KEY) == 1


def test_a_farm_that_signs_is_not_served_without_keys(server, transport, tmp_path):
    transport.client.leave()
    told: list[str] = []
    server.client.set(names.SIGNS, "abcdef01")
    with pytest.raises(ConfigError, match=r"this farm signs .*abcdef01.* give --keys FILE"):
        refuse_unsigned(server.url, LiveKeys.none(), is_insecure=False, tell=told.append)
    assert told == []
    refuse_unsigned(server.url, LiveKeys.none(), is_insecure=True, tell=told.append)
    (line,) = told
    assert "this farm signs" in line
    refuse_unsigned(server.url, of_scheduler(transport.folder), is_insecure=False, tell=told.append)
    server.client.delete(names.SIGNS)
    refuse_unsigned(server.url, LiveKeys.none(), is_insecure=False, tell=told.append)
    assert len(told) == 1
