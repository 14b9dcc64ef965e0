"""How the node registry handles gaps between batches."""

from __future__ import annotations

import sys

import cloudpickle
import pytest

from tunemq_scheduler.transport.event_batches import events_of
from tunemq_scheduler.transport.experiment_channel import ExperimentChannel
from tunemq_scheduler.transport.nodes.node_registry import NodeRegistry
from tunemq_shared.broker import redis_keys
from tunemq_shared.protocol import messages as m
from tunemq_shared.protocol.registration import BatchHeader, NodeRegistration

KEY = redis_keys.events("exp")


@pytest.fixture
def registry() -> NodeRegistry:
    """A registry that has read the first three events of its only node."""
    registry = NodeRegistry(term=1)
    registry.channels[KEY] = ExperimentChannel(KEY)
    python = ".".join(map(str, sys.version_info[:3]))
    about = ("n", "inc", "host", "127.0.0.1", 1, {"cpu": 1.0}, python, cloudpickle.__version__)
    registry.read_registration(b"1-0", m.encode(NodeRegistration(m.PROTOCOL_VERSION, *about)))
    registry.read_leases(0.0, [b"1:0:0"])
    read(registry, 1, 3)
    return registry


def read(registry: NodeRegistry, first: int, last: int) -> list[tuple[int, int]]:
    """Read a batch and return the batches that the runner receives."""
    header = BatchHeader(m.PROTOCOL_VERSION, "inc", first, (1, 0))
    events = [m.TrialFinished("t", 1)] * (last - first + 1)
    channel = registry.channels[KEY]
    registry.read_batch(
        channel, b"5-0", {redis_keys.HEADER: m.encode(header), redis_keys.EVENTS: m.encode(events)}
    )
    told = [
        read_event
        for read_event in events_of(channel.take())
        if isinstance(read_event, m.BatchRead)
    ]
    return [(read_event.first, read_event.last) for read_event in told]


def test_consecutive_events_are_reported(registry):
    assert read(registry, 4, 5) == [(4, 5)]
    assert read(registry, 2, 6) == [(2, 6)], "they may come again; the runner knows which are new"
    assert not registry.gaps


def test_events_after_a_gap_are_reported_only_when_all_were_sent_again(registry):
    assert read(registry, 5, 6) == []
    assert registry.gaps == [KEY]
    assert read(registry, 7, 7) == []
    registry.begin_anew()
    assert read(registry, 1, 7) == [(1, 7)]
    assert not registry.gaps


def test_node_that_leaves_out_events_repeatedly_is_dead(registry):
    for _ in range(5):
        assert read(registry, 5, 6) == []
        assert registry.gaps == [KEY]
        registry.begin_anew()
    header = BatchHeader(m.PROTOCOL_VERSION, "inc", 5, (1, 0))
    fields = {
        redis_keys.HEADER: m.encode(header),
        redis_keys.EVENTS: m.encode([m.TrialFinished("t", 1)]),
    }
    assert registry.read_batch(registry.channels[KEY], b"5-0", fields) == ("", 0)
    (lost,) = registry.channels[KEY].take()
    assert isinstance(lost, m.NodeLost)
    assert lost.is_dead
    assert not registry.gaps
    assert not registry.nodes
    assert read(registry, 1, 6) == []


def test_gap_of_a_search_that_can_restart_costs_no_node(registry):
    registry.channels[KEY].can_restart = True
    for _ in range(5):
        assert read(registry, 5, 6) == []
        registry.begin_anew()
    assert registry.channels[KEY].incomplete_node == ""
    assert read(registry, 5, 6) == []
    assert registry.channels[KEY].incomplete_node == "n"
    assert registry.nodes.keys() == {"inc"}
    assert not registry.gaps


def test_gap_before_the_first_event_is_detected(registry):
    registry.channels[KEY] = ExperimentChannel(KEY)
    registry.announce(registry.channels[KEY])
    assert read(registry, 2, 3) == []
    assert registry.gaps == [KEY]


def test_commands_about_entries_of_a_removed_stream_are_dropped(registry):
    registry.commands = [
        ("XTRIM", "s", "MINID", "5-1"),
        ("XDEL", redis_keys.NODES, "1-0"),
        ("DEL", "q"),
    ]
    registry.begin_anew()
    kinds = [command[0] for command in registry.commands]
    assert "DEL" in kinds
    assert not {"XTRIM", "XDEL"} & set(kinds)
