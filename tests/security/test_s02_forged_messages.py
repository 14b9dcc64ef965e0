"""S02: scheduler and nodes reject, count and report forged and altered messages."""

from __future__ import annotations

import base64
import os
from collections.abc import Iterator
from pathlib import Path

import msgspec
import pytest

from tests.integration.farm_support import RedisServer, order
from tests.integration.node_fixtures import server
from tests.security.signed_farm import KEY, SignedTransport, SignedWorker, worker
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
def transport(server: RedisServer, tmp_path: Path, monkeypatch) -> Iterator[SignedTransport]:
    """Looks often, so that tests need not last for seconds."""
    monkeypatch.setattr(node_transport, "_POLL_INTERVAL_S", 0.05)
    transport = SignedTransport(server, tmp_path)
    yield transport
    transport.close()


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
    """Delete the stream and begin a new generation in one transaction.

    Otherwise a node's event between the two would be in the new stream before its repeated events.
    """
    with scheduler.client.pipeline() as at_once:
        at_once.delete(scheduler.key)
        at_once.xgroup_create(scheduler.key, "made", mkstream=True)
        at_once.xgroup_destroy(scheduler.key, "made")
        at_once.set(names.GENERATION, "the next generation")
        at_once.execute()


# --- a worker and a forged scheduler --------------------------------------------------------------


def test_s02_worker_obeys_only_messages_signed_by_its_farm(worker, tmp_path):
    instance_id = worker.registered()

    def start(name):
        path = str(tmp_path / name)
        return order("t", worker.scheduler.start(touch, {"path": path}))

    def sent_commands(body, *about, keys=worker.scheduler.keys):
        return base64.b64encode(keys.orders.close(body, *about)).decode()

    forged = start("forged")
    body = m.encode(m.Assignment(m.PROTOCOL_VERSION, instance_id, 1, 99, (forged,)))
    me = instance_id.encode()
    altered = bytearray(base64.b64decode(sent_commands(body, b"command", me)))
    altered[-1] ^= 1
    worker.keyless.assign(instance_id, forged, version=90)
    worker.stranger.assign(instance_id, forged, version=91)
    for send_assignment in (
        base64.b64encode(altered).decode(),
        sent_commands(body, b"command", b"another"),
        sent_commands(body, b"reply", me),
        base64.b64encode(body).decode(),
        "no base64!",
    ):
        worker.scheduler.post(instance_id, send_assignment)
    worker.scheduler.assign(instance_id, start("honest"))

    eventually((tmp_path / "honest").exists, within=60, message=lambda: worker.said)
    worker.rejected(
        command__unsigned=1, command__unknown_key=1, command__altered=3, command__unreadable=2
    )  # fmt: skip
    assert not (tmp_path / "forged").exists()
    worker.says("is not signed: it is refused")  # after the message to Redis
    assert worker.said.count("is not signed: it is refused") == 1


def test_s02_signed_order_of_a_wrong_type_fails_its_trial_within_seconds(worker, tmp_path):
    scheduler, instance_id = worker.scheduler, worker.registered()
    start = scheduler.start(touch, {"path": str(tmp_path / "wrong")})
    wrong = msgspec.structs.replace(start, trial_number="five")
    honest = scheduler.start(touch, {"path": str(tmp_path / "honest")}, trial_number=1)
    scheduler.assign(instance_id, order("wrong", wrong), order("honest", honest))
    eventually((tmp_path / "honest").exists, within=60, message=lambda: worker.said)
    eventually(lambda: scheduler.said(m.TrialFailed), within=30, message=lambda: worker.said)
    (failed,) = scheduler.said(m.TrialFailed)
    assert failed.trial == "wrong"
    assert "cannot read the order for it: Expected `int`, got `str`" in failed.error
    worker.rejected(command__unreadable=1)


def test_s02_worker_rejects_forged_replies(worker):
    scheduler, instance_id = worker.scheduler, worker.registered()
    scheduler.assign(instance_id, order("t", scheduler.start(without_end)))
    eventually(lambda: scheduler.said(m.ResultReported), within=60, message=lambda: worker.said)
    acknowledged_up_to, reply = names.acknowledged_up_to(scheduler.key), names.reply(instance_id)
    for field in ("f", "r", acknowledged_up_to):
        worker.stranger.reply(instance_id, field, str(names.EVERYTHING))
    worker.rejected(reply__unknown_key=3)
    for field in ("f", "r", acknowledged_up_to):
        worker.keyless.reply(instance_id, field, str(names.EVERYTHING))
    scheduler.client.hset(reply, "v", "9" * 5_000)
    worker.rejected(reply__unsigned=3, reply__unreadable=1)

    # The forged acknowledgement named unjournalled events; the node sends them again.
    before = len(scheduler.events())
    lose_stream(scheduler)
    eventually(lambda: len(scheduler.events()) > before, within=60, message=lambda: worker.said)
    assert worker.process.poll() is None
    scheduler.reply(instance_id, "f", "it has ended")
    worker.says("The farm continued without this node (it has ended).", within=60)


def test_s02_a_worker_without_keys_and_a_scheduler_with_keys_say_so(server, tmp_path):
    worker = SignedWorker(server, tmp_path, has_keys=False)
    transport = SignedTransport(server, tmp_path / "scheduler")
    try:
        transport.until(lambda: transport.counted().get(("registration", "unsigned")))
        transport.until(lambda: transport.server.client.xlen(names.NODES) == 0)
        assert transport.read_events == []
        (line,) = [line for line in transport.notices if "registration" in line]
        assert "tunemq worker --keys worker.toml" in line
        server.client.set(names.SCHEDULER, "1:token:1:{}")
        server.client.set(names.SIGNS, transport.transport._signing.signer)
        worker.says("this worker has no keys", within=60)
    finally:
        transport.close()
        worker.kill()


# --- a scheduler and forged nodes -----------------------------------------------------------------


def test_s02_only_nodes_with_the_farms_keys_join(transport, server):
    keyless, stranger = transport.node("inc1", LiveKeys.none()), transport.stranger("inc2")
    node = transport.node("inc3")
    for one in (keyless, stranger, node):
        one.send_registration()
    registration = server.client.xrange(names.NODES)[-1][1][names.REGISTRATION]
    for data in (bytes(registration[:-1]) + b"x", b"", b"nonsense", b"\x9b" + os.urandom(500)):
        server.client.xadd(names.NODES, {names.REGISTRATION: data})
    server.client.xadd(names.NODES, {"nothing": "of ours"})
    last = transport.node("inc4", name="another")
    last.send_registration()

    transport.until(lambda: len(transport.said(m.NodeJoined)) == 2)
    assert [joined.instance_id for joined in transport.said(m.NodeJoined)] == ["inc3", "inc4"]
    counted = transport.counted()
    assert counted["registration", "unsigned"] == counted["registration", "unknown_key"] == 1
    assert sum(times for (kind, _), times in counted.items() if kind == "registration") == 7
    transport.until(lambda: server.client.xlen(names.NODES) == 2)


def test_s02_forged_and_altered_events_are_rejected_and_delay_no_honest_ones(transport, server):
    node = transport.node("inc1")
    node.send_registration()
    transport.until(lambda: transport.said(m.NodeJoined))
    assert node.send(KEY, result(1))
    honest = server.client.xrange(KEY)[-1][1]
    forged = transport.stranger("inc1"), transport.node("inc1", LiveKeys.none())
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

    transport.until(lambda: len(transport.said(m.ResultReported)) >= 2)
    assert [one.step for one in transport.said(m.ResultReported)] == [1, 2]
    assert not transport.said(m.TrialFailed)
    assert not transport.said(m.TrialFinished)
    counted = transport.counted()
    assert counted == {
        ("events", "unknown_key"): 1,
        ("events", "unsigned"): 2,
        ("events", "altered"): 2,
        ("events", "unreadable"): 1,
    }
    assert not transport.said(m.NodeLost), "a node was lost for what it did not say"
    transport.client.acknowledge({"inc1": node.last})
    transport.until(lambda: server.client.xlen(KEY) == 0)
    assert node.acknowledged_up_to() == node.last


def test_s02_forged_deregistration_of_a_node_is_rejected(transport):
    node = transport.node("inc1")
    node.send_registration()
    transport.until(lambda: transport.said(m.NodeJoined))
    for one in (transport.stranger("inc1"), transport.node("inc1", LiveKeys.none())):
        one.send_deregistration()
    transport.until(
        lambda: len([kind for kind, _ in transport.counted() if kind == "deregistration"]) == 2
    )
    transport.a_while(node.renew)
    assert not transport.said(m.NodeLost)
    node.send_deregistration()
    transport.until(lambda: transport.said(m.NodeLost))
    assert transport.said(m.NodeLost)[0].is_dead


def test_s02_a_forged_lease_keeps_no_dead_node_alive_and_confirms_no_order(transport, short_leases):
    node = transport.node("inc1")
    node.send_registration()
    transport.until(lambda: transport.said(m.NodeJoined))
    forgers = transport.stranger("inc1"), transport.node("inc1", LiveKeys.none())
    for one in forgers:
        one.confirmed = (transport.term, 10**6)

    def is_lost():
        for one in forgers:
            one.renew()
            transport.turn()
        return transport.said(m.NodeLost)

    def reasons():
        return {reason for kind, reason in transport.counted() if kind == "lease"}

    transport.until(is_lost)
    # How many leases were looked at before, of which forger, depends on how fast this machine is.
    for one, reason in zip(forgers, ("unknown_key", "unsigned"), strict=True):
        transport.until(lambda: (one.renew(), reason in reasons())[1])  # noqa: B023
    assert reasons() == {"unsigned", "unknown_key"}
    assert not transport.said(m.NodeReturned)
    assert transport.transport._registry.nodes["inc1"].desired_state.version < 10**6


def test_s02_forged_node_metrics_are_rejected(transport, server):
    node = transport.node("inc1")
    node.send_registration()
    transport.until(lambda: transport.said(m.NodeJoined))
    key = names.node_metrics("inc1")
    stranger = of_scheduler(transport.strangers).events
    forged = m.encode(NodeMetrics("forged"))
    for value in (forged, b"\0" + forged, stranger.close(forged, b"node_metrics", b"inc1")):
        server.client.set(key, value)
        before = sum(transport.counted().values())
        # It is looked at once a second, and only while the node lives.
        transport.until(lambda: (node.renew(), sum(transport.counted().values()) > before)[1])  # noqa: B023
        assert transport.transport.node_metrics("inc1") == NodeMetrics()
    honest = node.keys.events.close(m.encode(NodeMetrics("1.0")), b"node_metrics", b"inc1")
    server.client.set(key, honest)
    transport.until(
        lambda: (node.renew(), transport.transport.node_metrics("inc1").version == "1.0")[1]
    )


def test_s02_flood_of_forged_messages_is_logged_in_a_few_lines(transport, server):
    node = transport.node("inc1")
    node.send_registration()
    transport.until(lambda: transport.said(m.NodeJoined))
    stranger = transport.stranger("inc1")
    for number in range(500):
        stranger.send(KEY, result(number + 1), first=number + 1)
        server.client.xadd(names.NODES, {names.REGISTRATION: b"\1" + os.urandom(100)})
    node.send(KEY, result(1))
    transport.until(lambda: transport.said(m.ResultReported))
    transport.until(lambda: server.client.xlen(names.NODES) == 1)
    counted = transport.counted()
    assert counted["events", "unknown_key"] == 500
    assert counted["registration", "unknown_key"] == 500
    assert len([line for line in transport.notices if "events" in line]) == 1
    assert len([line for line in transport.notices if "registration" in line]) <= 5


def test_s02_key_files_that_others_may_read_start_no_worker(server, tmp_path):
    path = tmp_path / "worker.toml"
    path.write_text("[orders]\n")
    path.chmod(0o644)
    rejected = Command(
        *("worker", "--redis", server.url, "--workdir", str(tmp_path / "work")),
        *("--keys", str(path)),
        log=tmp_path / "log",
    )
    assert rejected.ends() == 64
    assert "chmod 600" in rejected.said
