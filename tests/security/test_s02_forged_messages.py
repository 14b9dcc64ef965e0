"""S02: forged and altered messages between scheduler and nodes are refused, counted and told."""

from __future__ import annotations

import base64
import os
from collections.abc import Iterator
from pathlib import Path

import msgspec
import pytest

from tests.integration.farm_support import RedisServer, order
from tests.integration.node_fixtures import server
from tests.security.signed_wire import KEY, SignedWire, SignedWorker, worker
from tests.support.farms.farm_processes import Command
from tests.support.keys import of_scheduler
from tests.support.waiting import eventually
from tunemq_scheduler.transport import node_transport
from tunemq_scheduler.transport.nodes import lease_watch
from tunemq_shared.broker import redis_keys as names
from tunemq_shared.health.node_metrics import NodeMetrics
from tunemq_shared.protocol import messages as m
from tunemq_shared.signing.live_keys import LiveKeys

__all__ = ["server", "worker"]

pytestmark = [pytest.mark.integration, pytest.mark.security]


@pytest.fixture
def wire(server: RedisServer, tmp_path: Path, monkeypatch) -> Iterator[SignedWire]:
    """Looks often, so that tests need not last for seconds."""
    monkeypatch.setattr(node_transport, "_LOOK_EVERY_S", 0.05)
    wire = SignedWire(server, tmp_path)
    yield wire
    wire.close()


@pytest.fixture
def short_leases(monkeypatch) -> None:
    monkeypatch.setattr(lease_watch, "LEASE_TTL_S", 0.5)


def result(step: int) -> m.ResultReported:
    return m.ResultReported("t1", 1, step, {"loss": 0.5}, 1.0, 0.1, 0.1, 0.1, step)


def touch(config):
    Path(config["path"]).touch()


def without_end(config):
    import time

    from tunemq_shared.trial.session import report

    while True:
        report({"loss": 0.5})
        time.sleep(0.05)


def lose_stream(scheduler):
    """Redis loses what was said, and a generation begins: at once, so that nothing comes between.

    What a node said between the two would stand in the new stream before all that it says again.
    """
    with scheduler.client.pipeline() as at_once:
        at_once.delete(scheduler.key)
        at_once.xgroup_create(scheduler.key, "made", mkstream=True)
        at_once.xgroup_destroy(scheduler.key, "made")
        at_once.set(names.GENERATION, "the next generation")
        at_once.execute()


# --- a worker and who says that he is its scheduler -----------------------------------------------


def test_s02_a_worker_obeys_nobody_without_its_farms_key(worker, tmp_path):
    incarnation = worker.introduced()

    def start(name):
        path = str(tmp_path / name)
        return order("t", worker.scheduler.start(touch, {"path": path}))

    def mailed(body, *about, keys=worker.scheduler.keys):
        return base64.b64encode(keys.orders.close(body, *about)).decode()

    forged = start("forged")
    body = m.encode(m.Assignment(m.PROTOCOL_VERSION, incarnation, 1, 99, (forged,)))
    me = incarnation.encode()
    altered = bytearray(base64.b64decode(mailed(body, b"mail", me)))
    altered[-1] ^= 1
    worker.keyless.assign(incarnation, forged, version=90)
    worker.stranger.assign(incarnation, forged, version=91)
    for mail in (
        base64.b64encode(altered).decode(),
        mailed(body, b"mail", b"another"),
        mailed(body, b"reply", me),
        base64.b64encode(body).decode(),
        "no base64!",
    ):
        worker.scheduler.post(incarnation, mail)
    worker.scheduler.assign(incarnation, start("honest"))

    eventually((tmp_path / "honest").exists, within=60, message=lambda: worker.said)
    worker.refused(
        mail__unsigned=1, mail__unknown_key=1, mail__altered=3, mail__unreadable=2
    )  # fmt: skip
    assert not (tmp_path / "forged").exists()
    worker.says("is not signed: it is refused")  # behind what Redis is told
    assert worker.said.count("is not signed: it is refused") == 1


def test_s02_signed_order_of_a_wrong_type_fails_its_trial_within_seconds(worker, tmp_path):
    scheduler, incarnation = worker.scheduler, worker.introduced()
    start = scheduler.start(touch, {"path": str(tmp_path / "wrong")})
    wrong = msgspec.structs.replace(start, trial_number="five")
    honest = scheduler.start(touch, {"path": str(tmp_path / "honest")}, trial_number=1)
    scheduler.assign(incarnation, order("wrong", wrong), order("honest", honest))
    eventually((tmp_path / "honest").exists, within=60, message=lambda: worker.said)
    eventually(lambda: scheduler.said(m.TrialFailed), within=30, message=lambda: worker.said)
    (failed,) = scheduler.said(m.TrialFailed)
    assert failed.trial == "wrong"
    assert "cannot read the order for it: Expected `int`, got `str`" in failed.error
    worker.refused(mail__unreadable=1)


def test_s02_a_worker_believes_no_forged_reply(worker):
    scheduler, incarnation = worker.scheduler, worker.introduced()
    scheduler.assign(incarnation, order("t", scheduler.start(without_end)))
    eventually(lambda: scheduler.said(m.ResultReported), within=60, message=lambda: worker.said)
    journalled, reply = names.journalled(scheduler.key), names.reply(incarnation)
    for field in ("f", "r", journalled):
        worker.stranger.reply(incarnation, field, str(names.EVERYTHING))
    worker.refused(reply__unknown_key=3)
    for field in ("f", "r", journalled):
        worker.keyless.reply(incarnation, field, str(names.EVERYTHING))
    scheduler.client.hset(reply, "v", "9" * 5_000)
    worker.refused(reply__unsigned=3, reply__unreadable=1)

    # What was forged to be journalled is sent again, since it is not.
    before = len(scheduler.events())
    lose_stream(scheduler)
    eventually(lambda: len(scheduler.events()) > before, within=60, message=lambda: worker.said)
    assert worker.process.poll() is None
    scheduler.reply(incarnation, "f", "it is over")
    worker.says("The farm went on without this node (it is over).", within=60)


def test_s02_a_worker_without_keys_and_a_scheduler_with_keys_say_so(server, tmp_path):
    worker = SignedWorker(server, tmp_path, has_keys=False)
    wire = SignedWire(server, tmp_path / "scheduler")
    try:
        wire.until(lambda: wire.counted().get(("hello", "unsigned")))
        wire.until(lambda: wire.server.client.xlen(names.NODES) == 0)
        assert wire.facts == []
        (line,) = [line for line in wire.news if "introduction" in line]
        assert "tunemq worker --keys worker.toml" in line
        server.client.set(names.SCHEDULER, "1:token:1:{}")
        server.client.set(names.SIGNS, wire.wire._seals.signer)
        worker.says("this worker has no keys", within=60)
    finally:
        wire.close()
        worker.kill()


# --- a scheduler and who say that they are its nodes ----------------------------------------------


def test_s02_only_nodes_with_the_farms_keys_join(wire, server):
    keyless, stranger = wire.node("inc1", LiveKeys.none()), wire.stranger("inc2")
    node = wire.node("inc3")
    for one in (keyless, stranger, node):
        one.say_hello()
    hello = server.client.xrange(names.NODES)[-1][1][names.HELLO]
    for data in (bytes(hello[:-1]) + b"x", b"", b"nonsense", b"\x9b" + os.urandom(500)):
        server.client.xadd(names.NODES, {names.HELLO: data})
    server.client.xadd(names.NODES, {"nothing": "of ours"})
    last = wire.node("inc4", name="another")
    last.say_hello()

    wire.until(lambda: len(wire.said(m.NodeJoined)) == 2)
    assert [joined.incarnation for joined in wire.said(m.NodeJoined)] == ["inc3", "inc4"]
    counted = wire.counted()
    assert counted["hello", "unsigned"] == counted["hello", "unknown_key"] == 1
    assert sum(times for (kind, _), times in counted.items() if kind == "hello") == 7
    wire.until(lambda: server.client.xlen(names.NODES) == 2)


def test_s02_forged_and_altered_events_are_no_facts_and_hold_up_no_honest_ones(wire, server):
    node = wire.node("inc1")
    node.say_hello()
    wire.until(lambda: wire.said(m.NodeJoined))
    assert node.send(KEY, result(1))
    honest = server.client.xrange(KEY)[-1][1]
    forged = wire.stranger("inc1"), wire.node("inc1", LiveKeys.none())
    for one in forged:
        one.send(KEY, m.TrialFailed("t1", 1, "user", "forged", "", 1.0), first=2)
    server.client.xadd(KEY, {**honest, names.EVENTS: m.encode([m.TrialFinished("t1", 1)])})
    server.client.xadd(KEY, {**honest, names.HEADER: bytes(200)})
    server.client.xadd(KEY, {"nothing": "of ours"})
    # For another experiment.
    server.client.xgroup_create(names.events("two"), "maker", mkstream=True)
    node.send(names.events("two"), result(2), first=2)
    server.client.xadd(KEY, server.client.xrange(names.events("two"))[-1][1])
    assert node.send(KEY, result(2), first=2)

    wire.until(lambda: len(wire.said(m.ResultReported)) >= 2)
    assert [one.step for one in wire.said(m.ResultReported)] == [1, 2]
    assert not wire.said(m.TrialFailed)
    assert not wire.said(m.TrialFinished)
    counted = wire.counted()
    assert counted == {
        ("events", "unknown_key"): 1,
        ("events", "unsigned"): 2,
        ("events", "altered"): 2,
        ("events", "unreadable"): 1,
    }
    assert not wire.said(m.NodeLost), "a node was lost for what it did not say"
    wire.client.release({"inc1": node.last})
    wire.until(lambda: server.client.xlen(KEY) == 0)
    assert node.journalled() == node.last


def test_s02_nobody_takes_leave_for_a_node(wire):
    node = wire.node("inc1")
    node.say_hello()
    wire.until(lambda: wire.said(m.NodeJoined))
    for one in (wire.stranger("inc1"), wire.node("inc1", LiveKeys.none())):
        one.say_goodbye()
    wire.until(lambda: len([kind for kind, _ in wire.counted() if kind == "goodbye"]) == 2)
    wire.a_while(node.renew)
    assert not wire.said(m.NodeLost)
    node.say_goodbye()
    wire.until(lambda: wire.said(m.NodeLost))
    assert wire.said(m.NodeLost)[0].is_dead


def test_s02_a_forged_lease_keeps_no_dead_node_alive_and_confirms_no_order(wire, short_leases):
    node = wire.node("inc1")
    node.say_hello()
    wire.until(lambda: wire.said(m.NodeJoined))
    forgers = wire.stranger("inc1"), wire.node("inc1", LiveKeys.none())
    for one in forgers:
        one.taken = (wire.term, 10**6)

    def is_lost():
        for one in forgers:
            one.renew()
            wire.turn()
        return wire.said(m.NodeLost)

    def reasons():
        return {reason for kind, reason in wire.counted() if kind == "lease"}

    wire.until(is_lost)
    # How many leases were looked at before, of which forger, depends on how fast this machine is.
    for one, reason in zip(forgers, ("unknown_key", "unsigned"), strict=True):
        wire.until(lambda: (one.renew(), reason in reasons())[1])  # noqa: B023
    assert reasons() == {"unsigned", "unknown_key"}
    assert not wire.said(m.NodeReturned)
    assert wire.wire._roster.nodes["inc1"].mailbox.version < 10**6


def test_s02_nobody_says_how_a_node_is_but_the_node(wire, server):
    node = wire.node("inc1")
    node.say_hello()
    wire.until(lambda: wire.said(m.NodeJoined))
    wire.wire._wants_vitals = True
    key = names.vitals("inc1")
    stranger = of_scheduler(wire.strangers).events
    forged = m.encode(NodeMetrics("forged"))
    for value in (forged, b"\0" + forged, stranger.close(forged, b"vitals", b"inc1")):
        server.client.set(key, value)
        before = sum(wire.counted().values())
        # It is looked at once a second, and only while the node lives.
        wire.until(lambda: (node.renew(), sum(wire.counted().values()) > before)[1])  # noqa: B023
        assert wire.wire.vitals("inc1") == NodeMetrics()
    honest = node.keys.events.close(m.encode(NodeMetrics("1.0")), b"vitals", b"inc1")
    server.client.set(key, honest)
    wire.until(lambda: (node.renew(), wire.wire.vitals("inc1").version == "1.0")[1])


def test_s02_a_flood_of_forged_messages_is_a_few_lines(wire, server):
    node = wire.node("inc1")
    node.say_hello()
    wire.until(lambda: wire.said(m.NodeJoined))
    stranger = wire.stranger("inc1")
    for number in range(500):
        stranger.send(KEY, result(number + 1), first=number + 1)
        server.client.xadd(names.NODES, {names.HELLO: b"\1" + os.urandom(100)})
    node.send(KEY, result(1))
    wire.until(lambda: wire.said(m.ResultReported))
    wire.until(lambda: server.client.xlen(names.NODES) == 1)
    counted = wire.counted()
    assert counted["events", "unknown_key"] == 500
    assert counted["hello", "unknown_key"] == 500
    assert len([line for line in wire.news if "events" in line]) == 1
    assert len([line for line in wire.news if "introduction" in line]) <= 5


def test_s02_key_files_that_others_may_read_start_no_worker(server, tmp_path):
    path = tmp_path / "worker.toml"
    path.write_text("[orders]\n")
    path.chmod(0o644)
    refused = Command(
        *("worker", "--redis", server.url, "--workdir", str(tmp_path / "work")),
        *("--keys", str(path)),
        log=tmp_path / "log",
    )
    assert refused.ends() == 64
    assert "chmod 600" in refused.said
