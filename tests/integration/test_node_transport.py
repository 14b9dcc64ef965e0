"""Several experiments at once on one transport, with a real Redis and a real node."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator
from contextlib import closing
from pathlib import Path
from signal import SIGCONT, SIGSTOP

import pytest

from tests.integration.fake_node import FakeNode
from tests.integration.farm_support import Node, RedisServer, Scheduler, is_alive
from tests.integration.node_fixtures import server
from tests.integration.test_node_streams import without_end
from tests.support.waiting import eventually
from tunemq_scheduler.transport import node_transport
from tunemq_scheduler.transport.event_batches import events_of
from tunemq_scheduler.transport.experiment_transport import TransportClient
from tunemq_scheduler.transport.node_transport import NodeTransport
from tunemq_scheduler.transport.nodes import lease_watch
from tunemq_shared.base.errors import BugError
from tunemq_shared.broker import redis_keys as names
from tunemq_shared.protocol import messages as m
from tunemq_shared.protocol.result_conditions import TO_THE_END

__all__ = ["server"]

pytestmark = pytest.mark.integration


class Experiment:
    """A transport client with one trial, and the events that it received."""

    def __init__(self, transport: NodeTransport, name: str, scheduler: Scheduler) -> None:
        self.name, self.key = name, scheduler.key
        self.how = scheduler.start(without_end)
        self.read_events: list[m.Event] = []
        self.acknowledged: dict[str, int] = {}
        self.begin_on(transport)

    def begin_on(self, transport: NodeTransport) -> None:
        self.client: TransportClient = transport.add(self.key)

    def turn(self) -> None:
        for read_event in events_of(self.client.take()):
            self.read_events.append(read_event)
            if isinstance(read_event, m.BatchRead):
                self.acknowledged[read_event.instance_id] = read_event.last
            if isinstance(read_event, m.NodeReturned):
                self.start(read_event.instance_id)
        self.client.settle()
        self.client.acknowledge(self.acknowledged)

    def told(self, *kinds: type[m.Event]) -> list[m.Event]:
        return [read_event for read_event in self.read_events if isinstance(read_event, kinds)]

    @property
    def changes(self) -> list[type[m.Event]]:
        """Return the kinds of node events that it received."""
        return [
            type(read_event) for read_event in self.told(m.NodeJoined, m.NodeLost, m.NodeReturned)
        ]

    @property
    def results(self) -> int:
        return len(self.told(m.ResultReported))

    @property
    def pids(self) -> list[int]:
        return [read_event.pid for read_event in self.told(m.TrialStarted)]

    def start(self, instance_id: str) -> None:
        """Order the node to run its trial; a trial that runs already is not started again."""
        order = m.TrialOrder(self.name, 1, TO_THE_END, start=self.how)
        self.client.orders(instance_id).put(order)


def turn(transport: NodeTransport, *experiments: Experiment) -> None:
    transport.poll(0.02)
    for one in experiments:
        one.turn()
    transport.send()


def turn_until(
    condition: Callable[[], object],
    transport: NodeTransport,
    *experiments: Experiment,
    message: object = "",
) -> None:
    eventually(lambda: (turn(transport, *experiments), condition())[1], message=message)


def continues(one: Experiment, transport: NodeTransport, *others: Experiment) -> None:
    """Wait until the trial reports again, in the process in which it began."""
    before, changes, (pid,) = one.results, one.changes, set(one.pids)
    turn_until(lambda: one.results > before + 10, transport, one, *others)
    assert is_alive(pid)
    assert one.changes == changes


@pytest.fixture(autouse=True)
def quick_polls(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(node_transport, "_POLL_INTERVAL_S", 0.1)


@pytest.fixture
def schedulers(server: RedisServer, tmp_path: Path) -> list[Scheduler]:
    made: list[Scheduler] = []
    for name in ("one", "two"):
        (tmp_path / name).mkdir()
        made.append(Scheduler(server, tmp_path / name, name))
    return made


@pytest.fixture
def node(server: RedisServer, schedulers: list[Scheduler], tmp_path: Path) -> Iterator[Node]:
    node = Node(server, schedulers[0], tmp_path / "node")
    yield node
    node.end()


@pytest.fixture
def transport(server: RedisServer) -> Iterator[NodeTransport]:
    with closing(NodeTransport(server.url, term=1)) as transport:
        transport.open()
        yield transport


@pytest.fixture
def both(transport: NodeTransport, node: Node, schedulers: list[Scheduler]) -> list[Experiment]:
    """Two experiments whose trials run on the node."""
    both = [
        Experiment(transport, name, scheduler)
        for name, scheduler in zip(("one", "two"), schedulers, strict=True)
    ]
    turn_until(lambda: all(one.told(m.NodeJoined) for one in both), transport, *both)
    for one in both:
        one.start(node.instance_id)
    turn_until(lambda: all(one.results for one in both), transport, *both, message=node.log)
    return both


def test_experiment_that_deregisters_does_not_disturb_the_other(both, transport, node, server):
    one, two = both
    (pid,) = one.pids
    one.client.close()
    continues(two, transport)

    turn_until(lambda: not is_alive(pid), transport, two)
    assert server.client.ttl(one.key) > 0
    assert server.client.ttl(two.key) == -1
    reply = names.reply(node.instance_id)
    field = names.acknowledged_up_to(one.key)
    turn_until(lambda: not server.client.hexists(reply, field), transport, two, message=node.log)
    assert server.client.hexists(reply, names.acknowledged_up_to(two.key))


def test_late_experiment_finds_the_node_and_running_trials_continue(
    both, transport, node, schedulers, server, tmp_path
):
    late = Experiment(transport, "late", Scheduler(server, tmp_path, "late"))
    turn_until(lambda: late.told(m.NodeJoined), transport, late, *both)
    assert late.told(m.NodeJoined) == both[0].told(m.NodeJoined)
    late.start(node.instance_id)
    turn_until(lambda: late.results, transport, late, *both, message=node.log)
    for one in both:
        continues(one, transport, late)
    assert {read_event.trial for read_event in late.told(m.ResultReported)} == {"late"}


def test_returned_node_keeps_trials_of_experiments_not_heard_from_yet(
    both, transport, node, monkeypatch
):
    monkeypatch.setattr(lease_watch, "LEASE_TTL_S", 2.5)
    one, two = both
    node.process.send_signal(SIGSTOP)
    turn_until(lambda: one.told(m.NodeLost) and two.told(m.NodeLost), transport, one, two)
    monkeypatch.setattr(lease_watch, "LEASE_TTL_S", 60.0)  # another loss does not count
    node.process.send_signal(SIGCONT)
    # From now on the first client takes no turn, so it does not read that the node is back.
    turn_until(lambda: two.told(m.NodeReturned), transport, two)
    continues(two, transport)
    desired_state = transport._registry.nodes[node.instance_id].desired_state
    turn_until(lambda: desired_state.is_confirmed, transport, two)
    assert is_alive(one.pids[0])

    turn(transport, one)
    assert one.changes == [m.NodeJoined, m.NodeLost, m.NodeReturned]
    for each in (one, two):
        continues(each, transport, one, two)


def test_trials_of_an_absent_experiment_continue_until_it_is_back(both, transport, node):
    one, two = both
    one.client.leave()
    two.client.orders(node.instance_id).put(m.TrialOrder("two", 1, TO_THE_END, stop=True))
    turn_until(lambda: two.told(m.SlotFreed), transport, two)
    assert is_alive(one.pids[0])

    one.begin_on(transport)
    joined = one.told(m.NodeJoined)
    one.client.reattach(joined, [], one.acknowledged)
    one.start(node.instance_id)
    continues(one, transport, two)
    assert [read_event.first for read_event in one.told(m.BatchRead)][:1] == [1]


def test_next_scheduler_keeps_trials_of_experiments_not_registered_yet(
    both, transport, node, server
):
    one, two = both
    for each in both:
        each.client.leave()
    transport.close()
    with closing(NodeTransport(server.url, term=2, absent=[one.key, two.key])) as successor:
        successor.open()
        two.begin_on(successor)
        two.client.reattach(two.told(m.NodeJoined), [], two.acknowledged)
        two.start(node.instance_id)
        continues(two, successor)
        desired_state = successor._registry.nodes[node.instance_id].desired_state
        turn_until(lambda: desired_state.version and desired_state.is_confirmed, successor, two)
        assert is_alive(one.pids[0])

        one.begin_on(successor)
        one.client.close()
        turn_until(lambda: not is_alive(one.pids[0]), successor, two)
        continues(two, successor)


def test_node_that_is_to_retire_deregisters(both, transport, node):
    assert transport.trial_count(node.instance_id) == 2
    transport.retire(node.instance_id, "the machine is needed")
    turn_until(
        lambda: all(one.told(m.NodeLost) for one in both), transport, *both, message=node.log
    )

    assert all(read_event.is_dead for one in both for read_event in one.told(m.NodeLost))
    assert node.process.wait(60) == 0
    assert "the machine is needed" in node.log()
    assert transport.trial_count(node.instance_id) == 0


def test_last_events_of_a_node_are_read_after_its_deregistration(server):
    with closing(FakeNode(server.url, "inc1")) as node:
        with closing(NodeTransport(server.url, term=1)) as transport:
            client = transport.add("one")
            transport.open()
            node.send_registration()
            eventually(lambda: (transport.poll(0.02), client.read_events)[1])
            joined = events_of(client.take())
            client.leave()
        node.send("one", m.TrialFinished("t", 1))
        server.client.delete(names.lease("inc1"))
        node.send_deregistration()
        with closing(NodeTransport(server.url, term=2, absent=["one"])) as transport:
            transport.open()
            eventually(lambda: (transport.poll(0.02), server.client.xlen(names.NODES) == 1)[1])
            client = transport.add("one")
            client.reattach(joined, [], {})
            told: list[m.Event] = []
            while not isinstance(told[-1] if told else None, m.NodeLost):
                transport.poll(10.0)
                told += events_of(client.take())
            client.close()
    assert [type(read_event) for read_event in told] == [m.BatchRead, m.TrialFinished, m.NodeLost]
    assert told[-1].is_dead


def test_stream_of_a_full_experiment_is_not_read_and_blocks_no_other(transport, server):
    full, other = transport.add("full"), transport.add("other")
    with closing(FakeNode(server.url, "inc1")) as node:
        node.send_registration()
        eventually(lambda: (transport.poll(0.02), full.read_events and other.read_events)[1])
        full.hold(is_full=True)
        other.take()
        for number in range(1, 101):
            node.send("full", m.TrialFinished("t", 1), first=number)
            node.send("other", m.TrialFinished("t", 1), first=number)
            eventually(lambda: (transport.poll(10.0), other.take())[1])
        batches = [
            read_event
            for read_event in events_of(full.take())
            if isinstance(read_event, m.BatchRead)
        ]
        assert len(batches) <= 2, "only the batches already requested arrive"

        full.hold(is_full=False)
        until = {len(batches)}
        while 100 not in until:
            transport.poll(10.0)
            until |= {
                read_event.last
                for read_event in events_of(full.take())
                if isinstance(read_event, m.BatchRead)
            }
        assert until >= set(range(len(batches) + 1, 101))


def test_deregistration_during_a_redis_outage_is_sent_later(both, transport, node, server):
    one, two = both
    (pid,) = one.pids
    server.kill()
    turn_until(lambda: transport.is_away, transport, two)
    one.client.close()
    server.start()
    turn_until(lambda: not is_alive(pid), transport, two, message=node.log)
    continues(two, transport)
    assert not server.client.exists(one.key)


def test_experiment_is_added_to_a_transport_only_once(server):
    with closing(NodeTransport(server.url, term=1)) as transport:
        client = transport.add("one")
        with pytest.raises(BugError, match="one is registered already"):
            transport.add("one")
        client.leave()
        transport.add("one").close()


def test_descriptor_of_the_caller_ends_a_poll_too(transport):
    reader, writer = os.pipe()
    assert transport.poll(0.0, also=[reader]) == set()
    os.write(writer, b"!")
    assert transport.poll(60.0, also=[reader]) == {reader}
    transport.wake()
    assert transport.poll(60.0) == set()
    for descriptor in (reader, writer):
        os.close(descriptor)
