"""S03: replaying an honest message has no effect."""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.integration.farm_support import RedisServer, order
from tests.integration.node_fixtures import server
from tests.security.signed_farm import KEY, SignedTransport, SignedWorker
from tests.support.waiting import eventually
from tunemq_scheduler.transport import lease_challenge, node_transport
from tunemq_scheduler.transport.nodes import lease_watch
from tunemq_shared.broker import redis_keys as names
from tunemq_shared.protocol import messages as m

__all__ = ["server"]

pytestmark = [pytest.mark.integration, pytest.mark.security]


@pytest.fixture
def transport(server: RedisServer, tmp_path: Path, monkeypatch) -> Iterator[SignedTransport]:
    monkeypatch.setattr(node_transport, "_POLL_INTERVAL_S", 0.05)
    transport = SignedTransport(server, tmp_path)
    yield transport
    transport.close()


def count_starts(config):
    from tunemq_shared.trial.session import report

    with open(config["path"], "a", encoding="utf-8") as file:
        file.write("started\n")
    report({"loss": 0.5})


def test_s03_replayed_messages_and_messages_of_an_old_term_start_nothing(server, tmp_path):
    worker = SignedWorker(server, tmp_path)
    try:
        scheduler, instance_id = worker.scheduler, worker.registered()
        path, queue = tmp_path / "starts", names.queue(instance_id)
        start = scheduler.start(count_starts, {"path": str(path)})

        def assign(term, version, *orders):
            said = m.Assignment(m.PROTOCOL_VERSION, instance_id, term, version, orders)
            scheduler.send_assignment(instance_id, said)

        # The attacker may read everything: it reads the queue before the worker does.
        assign(1, 1, order("t", start))
        eventually(lambda: scheduler.said(m.SlotFreed), within=60, message=lambda: worker.said)
        assign(1, 2)
        eventually(lambda: scheduler.lease(instance_id)[1:] == [1, 2])
        assign(1, 1, order("t", start))
        assign(1, 2, order("t", start, attempt=2))
        worker.rejected(command__repeated=2)
        assign(2, 1)
        eventually(lambda: scheduler.lease(instance_id)[1:] == [2, 1])
        assign(1, 3, order("t", start, attempt=3))
        worker.rejected(command__old_term=1)
        assert not scheduler.client.exists(queue)
        assert path.read_text() == "started\n"
    finally:
        worker.kill()


def test_s03_replayed_events_are_counted_and_do_not_overtake_new_ones(transport, server):
    node = transport.node("inc1")
    node.send_registration()
    transport.until(lambda: transport.said(m.NodeJoined))
    node.send(KEY, m.TrialStarted("t1", 1, 2, "host", "127.0.0.1", 1.0))
    recorded = server.client.xrange(KEY)[-1][1]
    node.send(KEY, m.TrialFinished("t1", 1))
    transport.until(lambda: transport.said(m.TrialFinished))
    for _ in range(3):
        server.client.xadd(KEY, recorded)
    node.send(KEY, m.SlotFreed("t1", 1))
    transport.until(lambda: transport.said(m.SlotFreed))

    # Batches carry their numbers, so the receiver drops those that it has.
    numbers = [(batch.first, batch.last) for batch in transport.said(m.BatchRead)]
    assert numbers == [(1, 1), (2, 2), *[(1, 1)] * 3, (3, 3)]
    assert transport.counted() == {("events", "repeated"): 3}
    assert not [line for line in transport.notices if "rejected" in line]


def test_s03_replayed_messages_revive_no_dead_node_and_end_no_living_one(transport, server):
    first, second = transport.node("inc1"), transport.node("inc2")
    first.send_registration(began=100.0)
    registration = server.client.xrange(names.NODES)[-1][1]
    transport.until(lambda: transport.said(m.NodeJoined))
    first.send(KEY, m.TrialFinished("t1", 1))
    events = server.client.xrange(KEY)[-1][1]
    second.send_registration(began=200.0)
    transport.until(lambda: transport.said(m.NodeLost))

    server.client.xadd(names.NODES, registration)
    server.client.xadd(KEY, events)
    transport.until(lambda: transport.counted().get(("registration", "dead_node")))
    transport.until(lambda: transport.counted().get(("events", "dead_node")))
    # A scheduler that begins knows nothing of the dead.
    server.client.delete(names.lease("inc1"), KEY)
    transport.restart()
    server.client.xadd(names.NODES, registration)
    second.renew()
    transport.until(lambda: transport.said(m.NodeJoined))
    transport.a_while(second.renew)
    assert [joined.instance_id for joined in transport.said(m.NodeJoined)] == ["inc2"]
    assert not transport.said(m.NodeLost)


def test_s03_replayed_registration_and_batch_of_a_dead_node_end_no_search(transport, server):
    node = transport.node("inc1")
    node.send_registration()
    registration = server.client.xrange(names.NODES)[-1][1]
    transport.until(lambda: transport.said(m.NodeJoined))
    for _ in range(3):
        node.send(KEY, m.TrialStarted("t1", 1, 2, "host", "127.0.0.1", 1.0))
    later = server.client.xrange(KEY)[-1][1]
    node.send_deregistration()
    transport.until(lambda: transport.said(m.NodeLost))
    server.client.delete(names.lease("inc1"), KEY)
    transport.restart()

    server.client.xadd(names.NODES, registration)
    server.client.xadd(KEY, later)
    transport.until(lambda: transport.counted().get(("events", "repeated")))
    other = transport.node("inc2", name="other")
    other.send_registration()
    transport.until(lambda: transport.said(m.NodeJoined))
    assert [joined.instance_id for joined in transport.said(m.NodeJoined)] == ["inc2"]
    assert not transport.said(m.BatchRead)


def test_s03_replayed_leases_keep_no_dead_node_alive(transport, server, monkeypatch):
    monkeypatch.setattr(lease_watch, "LEASE_TTL_S", 0.5)
    node = transport.node("inc1")
    node.send_registration()
    transport.until(lambda: transport.said(m.NodeJoined))
    key, recorded = names.lease("inc1"), []
    for _ in range(5):
        node.renew()
        recorded.append(server.client.get(key))
        transport.a_while() if len(recorded) == 1 else transport.turn()

    transport.until(lambda: not transport.said(m.NodeLost) or transport.said(m.NodeReturned))
    node.renew()
    # Until the last one was looked at, one that is played might be newer than all before.
    transport.until(lambda: transport.transport._signing._leases["inc1"].renewals == node._renewals)
    played = itertools.cycle(recorded)

    lost_before = len(transport.said(m.NodeLost))

    def is_lost():
        server.client.set(key, next(played))
        return len(transport.said(m.NodeLost)) > lost_before

    transport.until(is_lost)
    # How many were looked at before depends on how fast this machine is.
    returned = len(transport.said(m.NodeReturned))
    transport.until(lambda: (is_lost(), transport.counted().get(("lease", "repeated"), 0) > 1)[1])
    assert len(transport.said(m.NodeReturned)) == returned


def recorded_leases(transport, node, count=40):
    """Leases that a node wrote, and that this scheduler has not looked at but for the last one."""
    recorded = []
    for _ in range(count):
        node.renew()
        recorded.append(transport.server.client.get(names.lease(node.instance_id)))
    transport.turn()
    return recorded


def test_scheduler_restarted_while_old_leases_are_played_takes_no_dead_node_for_alive(
    transport, server, monkeypatch
):
    monkeypatch.setattr(lease_watch, "LEASE_TTL_S", 0.5)
    expected, forgotten = transport.node("inc1"), transport.node("inc2", name="other")
    for node in (expected, forgotten):
        node.send_registration()
    transport.until(lambda: len(transport.said(m.NodeJoined)) == 2)
    known = [fact for fact in transport.said(m.NodeJoined) if fact.instance_id == "inc1"]
    forgotten.send(KEY, m.TrialFinished("t1", 1))
    first_batch = server.client.xrange(KEY)[-1][1]
    played = [
        (names.lease(node.instance_id), itertools.cycle(recorded_leases(transport, node)))
        for node in (expected, forgotten)
    ]
    server.client.delete(KEY)

    # Both are dead from now on. The journal knows the first, the nodes' stream the second.
    transport.restart()
    transport.client.reattach(known, [], {})
    server.client.xadd(KEY, first_batch)

    def play():
        for key, leases in played:
            server.client.set(key, next(leases))
        return (
            transport.said(m.NodeLost) and transport.counted().get(("lease", "unanswered"), 0) > 1
        )

    transport.until(play)
    transport.a_while(play)
    assert [lost.instance_id for lost in transport.said(m.NodeLost)] == ["inc1"]
    assert not transport.said(m.NodeReturned)
    assert not transport.said(m.NodeJoined)
    assert not transport.said(m.TrialFinished)


def has_nodes(transport):
    return any(
        node.is_joined and node.is_heard for node in transport.transport._registry.nodes.values()
    )


def test_scheduler_restarted_hears_live_nodes_with_their_next_lease(transport, server):
    node = transport.node("inc1")
    node.send_registration()
    transport.until(lambda: transport.said(m.NodeJoined))
    known = transport.said(m.NodeJoined)
    transport.restart()
    transport.client.reattach(known, [], {})
    transport.turn()
    assert not has_nodes(transport)
    node.renew()
    transport.until(lambda: has_nodes(transport))
    assert not transport.said(m.NodeLost)
    assert transport.counted() == {}


def test_leases_held_back_and_played_later_keep_no_dead_node_alive(transport, server, monkeypatch):
    monkeypatch.setattr(lease_watch, "LEASE_TTL_S", 0.5)
    monkeypatch.setattr(lease_challenge, "_REPLACED_EVERY_S", 0.5)
    node = transport.node("inc1")
    node.send_registration()
    transport.until(lambda: transport.said(m.NodeJoined))
    key = names.lease("inc1")
    before = server.client.get(key)
    held_back = []
    for _ in range(1000):
        node.renew()
        held_back.append(server.client.get(key))
    server.client.set(key, before)
    played = iter(held_back)

    # They count while they answer the challenge of now, or the one before it.
    def is_lost_for_good():
        server.client.set(key, next(played))
        is_old = transport.counted().get(("lease", "unanswered"), 0) > 0
        return is_old and not has_nodes(transport)

    transport.until(is_lost_for_good)
    # How often it came back before depends on how fast this machine is.
    returned = len(transport.said(m.NodeReturned))
    transport.a_while(lambda: server.client.set(key, next(played)))
    assert len(transport.said(m.NodeReturned)) == returned
    assert not has_nodes(transport)
