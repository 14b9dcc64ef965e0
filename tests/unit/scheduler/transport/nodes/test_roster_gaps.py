"""What a roster makes of batches between which others are missing."""

from __future__ import annotations

import sys

import cloudpickle
import pytest

from tunemq_scheduler.transport.experiment_channel import ExperimentChannel
from tunemq_scheduler.transport.node_batches import events_of
from tunemq_scheduler.transport.nodes.node_registry import NodeRegistry
from tunemq_shared.broker import redis_keys
from tunemq_shared.protocol import messages as m
from tunemq_shared.protocol.registration import BatchHeader, NodeRegistration

KEY = redis_keys.events("exp")


@pytest.fixture
def roster() -> NodeRegistry:
    """One that has read the first three events of its only node."""
    roster = NodeRegistry(term=1)
    roster.tenants[KEY] = ExperimentChannel(KEY)
    python = ".".join(map(str, sys.version_info[:3]))
    about = ("n", "inc", "host", "127.0.0.1", 1, {"cpu": 1.0}, python, cloudpickle.__version__)
    roster.read_hello(b"1-0", m.encode(NodeRegistration(m.PROTOCOL_VERSION, *about)))
    roster.read_leases(0.0, [b"1:0:0"])
    read(roster, 1, 3)
    return roster


def read(roster: NodeRegistry, first: int, last: int) -> list[tuple[int, int]]:
    """Read a batch; which batches the runner is told of."""
    header = BatchHeader(m.PROTOCOL_VERSION, "inc", first, (1, 0))
    events = [m.TrialFinished("t", 1)] * (last - first + 1)
    tenant = roster.tenants[KEY]
    roster.read_batch(
        tenant, b"5-0", {redis_keys.HEADER: m.encode(header), redis_keys.EVENTS: m.encode(events)}
    )
    told = [fact for fact in events_of(tenant.take()) if isinstance(fact, m.BatchRead)]
    return [(fact.first, fact.last) for fact in told]


def test_events_that_follow_each_other_are_told(roster):
    assert read(roster, 4, 5) == [(4, 5)]
    assert read(roster, 2, 6) == [(2, 6)], "they may come again; the runner knows which are new"
    assert not roster.gaps


def test_what_comes_behind_a_gap_is_not_told_before_all_was_sent_again(roster):
    assert read(roster, 5, 6) == []
    assert roster.gaps == [KEY]
    assert read(roster, 7, 7) == []
    roster.begin_anew()
    assert read(roster, 1, 7) == [(1, 7)]
    assert not roster.gaps


def test_a_node_that_leaves_out_events_however_often_it_sends_all_again_is_dead(roster):
    for _ in range(5):
        assert read(roster, 5, 6) == []
        assert roster.gaps == [KEY]
        roster.begin_anew()
    header = BatchHeader(m.PROTOCOL_VERSION, "inc", 5, (1, 0))
    fields = {
        redis_keys.HEADER: m.encode(header),
        redis_keys.EVENTS: m.encode([m.TrialFinished("t", 1)]),
    }
    assert roster.read_batch(roster.tenants[KEY], b"5-0", fields) == ("", 0)
    (lost,) = roster.tenants[KEY].take()
    assert isinstance(lost, m.NodeLost)
    assert lost.is_dead
    assert not roster.gaps
    assert not roster.nodes
    assert read(roster, 1, 6) == []


def test_a_gap_before_the_first_event_is_one(roster):
    roster.tenants[KEY] = ExperimentChannel(KEY)
    roster.announce(roster.tenants[KEY])
    assert read(roster, 2, 3) == []
    assert roster.gaps == [KEY]


def test_commands_about_entries_of_a_stream_that_is_gone_are_dropped(roster):
    roster.commands = [
        ("XTRIM", "s", "MINID", "5-1"),
        ("XDEL", redis_keys.NODES, "1-0"),
        ("DEL", "q"),
    ]
    roster.begin_anew()
    kinds = [command[0] for command in roster.commands]
    assert "DEL" in kinds
    assert not {"XTRIM", "XDEL"} & set(kinds)
