"""Nodes that are lost and return, deregister, or were there before this scheduler."""

from __future__ import annotations

import msgspec
import pytest

from tests.unit.scheduler.transport.nodes.test_node_registry import (
    FINISHED,
    JOINED,
    KEY,
    REGISTRATION,
    batch,
    joined_registry,
    mine,
    register,
    registry_of,
)
from tunemq_scheduler.transport.event_batches import events_of
from tunemq_scheduler.transport.nodes.node_registry import NodeRegistry
from tunemq_shared.broker import redis_keys
from tunemq_shared.protocol import messages as m

LOST = m.NodeLost("inc1", "its lease was not renewed for 6 s")


def silent(registry: NodeRegistry, *leases: bytes | None, start: float = 1.0) -> float:
    """Read unchanging leases until a node is lost, and return that time."""
    now = start
    while not any(isinstance(read_event, m.NodeLost) for read_event in mine(registry).read_events):
        registry.read_leases(now, list(leases))
        now += 1.0
        assert now < start + 60.0, "no node is lost"
    return now


def away_registry() -> tuple[NodeRegistry, float]:
    registry = joined_registry()
    now = silent(registry, b"1:0:0")
    assert mine(registry).read_events == [LOST]
    mine(registry).take()
    return registry, now


def settle(registry: NodeRegistry) -> None:
    mine(registry).settle(mine(registry).given)


def test_silent_node_is_lost_and_neither_fenced_nor_forgotten():
    registry = joined_registry()
    registry.commands.clear()
    silent(registry, b"1:0:0")
    silent_again = [registry.read_leases(60.0 + n, [b"1:0:0"]) for n in range(9)]

    assert silent_again
    assert mine(registry).read_events == [LOST], "reported once"
    assert registry.commands == [("DEL", redis_keys.queue("inc1"))], (
        "old orders would restart ended trials"
    )
    assert not registry.nodes["inc1"].takes_orders


def test_renewed_lease_brings_a_node_back():
    registry, now = away_registry()
    registry.read_leases(now, [b"2:0:0"])

    assert mine(registry).read_events == [m.NodeReturned("inc1")]
    assert "is back after" in registry.notices[-1]
    mine(registry).take()
    assert silent(registry, b"2:0:0", start=now + 1) > now + redis_keys.LEASE_TTL_S, (
        "a full lease again"
    )


def test_unread_events_bring_a_node_back_before_they_are_reported():
    registry, _ = away_registry()

    assert registry.read_batch(mine(registry), b"9-1", batch(FINISHED)) == ("inc1", 1)
    assert events_of(mine(registry).read_events) == [
        m.NodeReturned("inc1"),
        m.BatchRead("inc1", 1, 1, "9-1"),
        FINISHED,
    ]


def test_journalled_events_bring_no_node_back():
    registry, _ = away_registry()
    mine(registry).cursors["inc1"].acknowledged_up_to = 4

    assert registry.read_batch(mine(registry), b"9-1", batch(FINISHED, first=4)) == ("inc1", 4)
    assert mine(registry).read_events == []


def test_node_that_is_back_gets_no_orders_before_the_runner_has_stated_them():
    registry, now = away_registry()
    node = registry.nodes["inc1"]
    version = node.desired_state.version
    registry.read_leases(now, [b"2:0:0"])
    settle(registry)
    assert not node.takes_orders, "the runner was not told yet"

    mine(registry).take()
    settle(registry)
    assert node.takes_orders
    assert node.desired_state.is_changed
    assert node.desired_state.next_assignment().version > version


def test_node_lost_again_while_it_waits_for_orders_is_lost():
    registry, now = away_registry()
    registry.read_leases(now, [b"2:0:0"])
    mine(registry).take()
    silent(registry, b"2:0:0", start=now + 1)

    assert mine(registry).read_events == [LOST]
    assert not registry.nodes["inc1"].takes_orders


def test_new_instance_of_a_node_that_is_away_makes_the_old_one_dead():
    registry, _ = away_registry()
    assert register(registry, "inc2") == ["inc1"]
    registry.lose("inc1", redis_keys.STARTED_AGAIN, is_dead=True)

    assert mine(registry).read_events == [
        m.NodeLost("inc1", redis_keys.STARTED_AGAIN, is_dead=True)
    ]
    assert list(registry.nodes) == ["inc2"]


def test_old_registration_that_is_read_late_replaces_no_node():
    registry = registry_of(2)
    registry.expect(mine(registry), msgspec.structs.replace(JOINED, instance_id="inc2"), 0)

    assert register(registry, "inc1") == []
    assert register(registry, "inc2") == ["inc1"]


def test_node_that_is_away_for_a_day_is_dead():
    registry, now = away_registry()
    registry.read_leases(now + 86_000.0, [b"1:0:0"])
    assert mine(registry).read_events == []
    registry.read_leases(now + 86_500.0, [b"1:0:0"])

    (lost,) = mine(registry).read_events
    assert isinstance(lost, m.NodeLost)
    assert lost.is_dead
    assert not registry.nodes


def test_node_that_never_lived_and_is_silent_joins_at_its_first_sign_of_life():
    registry = registry_of()
    register(registry)
    for now in range(10):
        registry.read_leases(float(now), [None])
    assert mine(registry).read_events == []

    registry.read_leases(10.0, [b"1:0:0"])
    assert mine(registry).read_events == [JOINED]


def test_deregistration_names_its_node_and_is_removed():
    registry = joined_registry()
    registry.commands.clear()

    assert registry.read_deregistration(b"7-0", b"inc1") == "inc1"
    assert registry.commands == [("XDEL", redis_keys.NODES, b"7-0")]


@pytest.mark.parametrize("sign_of_life", ["lease", "batch"])
def test_node_of_an_earlier_scheduler_continues_and_gets_orders_of_the_new_term(sign_of_life):
    registry = registry_of(5)
    registry.expect(mine(registry), JOINED, 3)
    settle(registry)
    assert registry.read_batch(mine(registry), b"1-1", batch(FINISHED, first=3)) == ("inc1", 3)
    assert not registry.nodes["inc1"].takes_orders, "journalled events show no life"
    registry.read_registration(b"1-0", m.encode(REGISTRATION))
    if sign_of_life == "lease":
        registry.read_leases(0.0, [b"9:4:17"])
        assert mine(registry).read_events == []
    else:
        registry.read_batch(mine(registry), b"1-2", batch(FINISHED, first=4))
        assert [type(read_event) for read_event in events_of(mine(registry).read_events)] == [
            m.BatchRead,
            m.TrialFinished,
        ]

    assert registry.nodes["inc1"].takes_orders
    assignment = registry.nodes["inc1"].desired_state.next_assignment()
    assert (assignment.term, assignment.version) > (4, 17)


def test_silent_node_of_an_earlier_scheduler_is_lost():
    registry = registry_of(5)
    registry.expect(mine(registry), JOINED, 3)
    silent(registry, None)

    assert mine(registry).read_events == [LOST]
    mine(registry).take()
    registry.read_leases(60.0, [b"1:0:0"])
    assert mine(registry).read_events == [m.NodeReturned("inc1")]


def test_node_that_was_away_before_may_return():
    registry = registry_of(5)
    up_s = 1_000_000.0  # the monotonic clock of a machine that has been up for long
    registry.expect(mine(registry), JOINED, 3, away_since=up_s)
    for passed in range(20):
        registry.read_leases(up_s + passed, [None])
    assert mine(registry).read_events == [], "the runner knows that it is lost"

    registry.read_leases(up_s + 20.0, [b"1:0:0"])
    assert mine(registry).read_events == [m.NodeReturned("inc1")]
    assert "is back after 20 s" in registry.notices[-1]


def test_node_of_an_earlier_scheduler_is_told_up_to_which_event_that_one_journalled():
    registry = registry_of(5)
    registry.expect(mine(registry), JOINED, 3)
    registry.start_anew()
    released = ("HSET", redis_keys.reply("inc1"), redis_keys.acknowledged_up_to(KEY), "3")
    assert released not in registry.commands, "the owner of the journal releases them"

    registry.acknowledged_up_to(mine(registry), {"inc1": 3})
    registry.acknowledged_up_to(mine(registry), {"inc1": 3})
    assert registry.commands.count(released) == 1
