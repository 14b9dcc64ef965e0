"""S03: what was once said honestly is of no use to who says it again."""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.integration.farm_support import RedisServer, order
from tests.integration.node_fixtures import server
from tests.security.signed_wire import KEY, SignedWire, SignedWorker
from tests.support.waiting import eventually
from tunemq_scheduler.transport import lease_challenge, node_transport
from tunemq_scheduler.transport.nodes import lease_watch
from tunemq_shared.broker import redis_keys as names
from tunemq_shared.protocol import messages as m

__all__ = ["server"]

pytestmark = [pytest.mark.integration, pytest.mark.security]


@pytest.fixture
def wire(server: RedisServer, tmp_path: Path, monkeypatch) -> Iterator[SignedWire]:
    monkeypatch.setattr(node_transport, "_LOOK_EVERY_S", 0.05)
    wire = SignedWire(server, tmp_path)
    yield wire
    wire.close()


def count_starts(config):
    from tunemq_shared.trial.session import report

    with open(config["path"], "a", encoding="utf-8") as file:
        file.write("started\n")
    report({"loss": 0.5})


def test_s03_old_mail_and_mail_of_an_old_term_start_nothing_again(server, tmp_path):
    worker = SignedWorker(server, tmp_path)
    try:
        scheduler, incarnation = worker.scheduler, worker.introduced()
        path, queue = tmp_path / "starts", names.queue(incarnation)
        start = scheduler.start(count_starts, {"path": str(path)})

        def assign(term, version, *orders):
            said = m.Assignment(m.PROTOCOL_VERSION, incarnation, term, version, orders)
            scheduler.mail(incarnation, said)

        # What somebody reads who may read everything: here, before the worker does.
        assign(1, 1, order("t", start))
        eventually(lambda: scheduler.said(m.SlotFreed), within=60, message=lambda: worker.said)
        assign(1, 2)
        eventually(lambda: scheduler.lease(incarnation)[1:] == [1, 2])
        assign(1, 1, order("t", start))
        assign(1, 2, order("t", start, epoch=2))
        worker.refused(mail__repeated=2)
        assign(2, 1)
        eventually(lambda: scheduler.lease(incarnation)[1:] == [2, 1])
        assign(1, 3, order("t", start, epoch=3))
        worker.refused(mail__old_term=1)
        assert not scheduler.client.exists(queue)
        assert path.read_text() == "started\n"
    finally:
        worker.kill()


def test_s03_events_that_are_said_again_are_counted_and_come_before_nothing_new(wire, server):
    node = wire.node("inc1")
    node.say_hello()
    wire.until(lambda: wire.said(m.NodeJoined))
    node.send(KEY, m.TrialStarted("t1", 1, 2, "host", "127.0.0.1", 1.0))
    recorded = server.client.xrange(KEY)[-1][1]
    node.send(KEY, m.TrialFinished("t1", 1))
    wire.until(lambda: wire.said(m.TrialFinished))
    for _ in range(3):
        server.client.xadd(KEY, recorded)
    node.send(KEY, m.SlotFreed("t1", 1))
    wire.until(lambda: wire.said(m.SlotFreed))

    # They carry their numbers: whoever records them drops what it has.
    numbers = [(batch.first, batch.last) for batch in wire.said(m.BatchRead)]
    assert numbers == [(1, 1), (2, 2), *[(1, 1)] * 3, (3, 3)]
    assert wire.counted() == {("events", "repeated"): 3}
    assert not [line for line in wire.news if "refused" in line]


def test_s03_nobody_brings_a_dead_node_back_or_a_living_one_down(wire, server):
    first, second = wire.node("inc1"), wire.node("inc2")
    first.say_hello(began=100.0)
    hello = server.client.xrange(names.NODES)[-1][1]
    wire.until(lambda: wire.said(m.NodeJoined))
    first.send(KEY, m.TrialFinished("t1", 1))
    events = server.client.xrange(KEY)[-1][1]
    second.say_hello(began=200.0)
    wire.until(lambda: wire.said(m.NodeLost))

    server.client.xadd(names.NODES, hello)
    server.client.xadd(KEY, events)
    wire.until(lambda: wire.counted().get(("hello", "dead_node")))
    wire.until(lambda: wire.counted().get(("events", "dead_node")))
    # A scheduler that begins knows nothing of the dead.
    server.client.delete(names.lease("inc1"), KEY)
    wire.restart()
    server.client.xadd(names.NODES, hello)
    second.renew()
    wire.until(lambda: wire.said(m.NodeJoined))
    wire.a_while(second.renew)
    assert [joined.incarnation for joined in wire.said(m.NodeJoined)] == ["inc2"]
    assert not wire.said(m.NodeLost)


def test_s03_a_dead_nodes_hello_and_one_later_batch_end_no_search(wire, server):
    node = wire.node("inc1")
    node.say_hello()
    hello = server.client.xrange(names.NODES)[-1][1]
    wire.until(lambda: wire.said(m.NodeJoined))
    for _ in range(3):
        node.send(KEY, m.TrialStarted("t1", 1, 2, "host", "127.0.0.1", 1.0))
    later = server.client.xrange(KEY)[-1][1]
    node.say_goodbye()
    wire.until(lambda: wire.said(m.NodeLost))
    server.client.delete(names.lease("inc1"), KEY)
    wire.restart()

    server.client.xadd(names.NODES, hello)
    server.client.xadd(KEY, later)
    wire.until(lambda: wire.counted().get(("events", "repeated")))
    other = wire.node("inc2", name="other")
    other.say_hello()
    wire.until(lambda: wire.said(m.NodeJoined))
    assert [joined.incarnation for joined in wire.said(m.NodeJoined)] == ["inc2"]
    assert not wire.said(m.BatchRead)


def test_s03_old_leases_keep_no_dead_node_alive(wire, server, monkeypatch):
    monkeypatch.setattr(lease_watch, "LEASE_TTL_S", 0.5)
    node = wire.node("inc1")
    node.say_hello()
    wire.until(lambda: wire.said(m.NodeJoined))
    key, recorded = names.lease("inc1"), []
    for _ in range(5):
        node.renew()
        recorded.append(server.client.get(key))
        wire.a_while() if len(recorded) == 1 else wire.turn()

    wire.until(lambda: not wire.said(m.NodeLost) or wire.said(m.NodeReturned))
    node.renew()
    # Until the last one was looked at, one that is played might be newer than all before.
    wire.until(lambda: wire.wire._seals._leases["inc1"].renewals == node._renewals)
    played = itertools.cycle(recorded)

    lost_before = len(wire.said(m.NodeLost))

    def is_lost():
        server.client.set(key, next(played))
        return len(wire.said(m.NodeLost)) > lost_before

    wire.until(is_lost)
    # How many were looked at before depends on how fast this machine is.
    returned = len(wire.said(m.NodeReturned))
    wire.until(lambda: (is_lost(), wire.counted().get(("lease", "repeated"), 0) > 1)[1])
    assert len(wire.said(m.NodeReturned)) == returned


def recorded_leases(wire, node, count=40):
    """Leases that a node wrote, and that this scheduler has not looked at but for the last one."""
    recorded = []
    for _ in range(count):
        node.renew()
        recorded.append(wire.server.client.get(names.lease(node.incarnation)))
    wire.turn()
    return recorded


def test_scheduler_restarted_while_old_leases_are_played_takes_no_dead_node_for_alive(
    wire, server, monkeypatch
):
    monkeypatch.setattr(lease_watch, "LEASE_TTL_S", 0.5)
    expected, forgotten = wire.node("inc1"), wire.node("inc2", name="other")
    for node in (expected, forgotten):
        node.say_hello()
    wire.until(lambda: len(wire.said(m.NodeJoined)) == 2)
    known = [fact for fact in wire.said(m.NodeJoined) if fact.incarnation == "inc1"]
    forgotten.send(KEY, m.TrialFinished("t1", 1))
    first_batch = server.client.xrange(KEY)[-1][1]
    played = [
        (names.lease(node.incarnation), itertools.cycle(recorded_leases(wire, node)))
        for node in (expected, forgotten)
    ]
    server.client.delete(KEY)

    # Both are dead from now on. The journal knows the first, the nodes' stream the second.
    wire.restart()
    wire.client.reattach(known, [], {})
    server.client.xadd(KEY, first_batch)

    def play():
        for key, leases in played:
            server.client.set(key, next(leases))
        return wire.said(m.NodeLost) and wire.counted().get(("lease", "unanswered"), 0) > 1

    wire.until(play)
    wire.a_while(play)
    assert [lost.incarnation for lost in wire.said(m.NodeLost)] == ["inc1"]
    assert not wire.said(m.NodeReturned)
    assert not wire.said(m.NodeJoined)
    assert not wire.said(m.TrialFinished)


def has_nodes(wire):
    return any(node.is_joined and node.is_heard for node in wire.wire._roster.nodes.values())


def test_scheduler_restarted_hears_live_nodes_with_their_next_lease(wire, server):
    node = wire.node("inc1")
    node.say_hello()
    wire.until(lambda: wire.said(m.NodeJoined))
    known = wire.said(m.NodeJoined)
    wire.restart()
    wire.client.reattach(known, [], {})
    wire.turn()
    assert not has_nodes(wire)
    node.renew()
    wire.until(lambda: has_nodes(wire))
    assert not wire.said(m.NodeLost)
    assert wire.counted() == {}


def test_leases_held_back_and_played_later_keep_no_dead_node_alive(wire, server, monkeypatch):
    monkeypatch.setattr(lease_watch, "LEASE_TTL_S", 0.5)
    monkeypatch.setattr(lease_challenge, "_REPLACED_EVERY_S", 0.5)
    node = wire.node("inc1")
    node.say_hello()
    wire.until(lambda: wire.said(m.NodeJoined))
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
        is_old = wire.counted().get(("lease", "unanswered"), 0) > 0
        return is_old and not has_nodes(wire)

    wire.until(is_lost_for_good)
    # How often it came back before depends on how fast this machine is.
    returned = len(wire.said(m.NodeReturned))
    wire.a_while(lambda: server.client.set(key, next(played)))
    assert len(wire.said(m.NodeReturned)) == returned
    assert not has_nodes(wire)
