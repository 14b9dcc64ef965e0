"""Several experiments on the same nodes: the events of each, and the nodes' assignments."""

from __future__ import annotations

import pytest
from msgspec.structs import replace

from tests.unit.scheduler.transport.nodes.test_node_registry import (
    FINISHED,
    JOINED,
    batch,
    register,
    registry_of,
)
from tests.unit.scheduler.transport.nodes.test_node_registry_lost_nodes import LOST
from tests.unit.scheduler.transport.test_desired_state import START
from tunemq_scheduler.transport.desired_state import DesiredState
from tunemq_scheduler.transport.event_batches import events_of
from tunemq_scheduler.transport.experiment_channel import ExperimentChannel
from tunemq_scheduler.transport.nodes.node_registry import NOBODYS, NodeRegistry
from tunemq_shared.broker import redis_keys
from tunemq_shared.protocol import messages as m
from tunemq_shared.protocol.result_conditions import TO_THE_END

ONE, TWO = "tunemq:events:one", "tunemq:events:two"


@pytest.fixture
def registry() -> NodeRegistry:
    """One node on which each of two experiments has its own trial."""
    registry = registry_of(1, ONE, TWO)
    register(registry)
    registry.read_leases(0.0, [b"1:0:0"])
    for key, channel in registry.channels.items():
        assert channel.take() == [JOINED]
        channel.cursors["inc1"].orders.put(order_of(key))
    return registry


def trial_of(key: str) -> str:
    return key.rpartition(":")[2]


def order_of(key: str) -> m.TrialOrder:
    return m.TrialOrder(trial_of(key), 1, TO_THE_END, start=START)


def desired_state(registry: NodeRegistry) -> DesiredState:
    return registry.nodes["inc1"].desired_state


def test_f22_experiment_is_told_that_a_lost_node_ran_trials_of_others(
    registry: NodeRegistry,
) -> None:
    registry.lose("inc1", "it is silent")
    for channel in registry.channels.values():
        assert channel.take() == [m.NodeLost("inc1", "it is silent", is_shared=True)]


def test_f22_experiment_is_told_that_a_lost_node_ran_only_its_own_trials(
    registry: NodeRegistry,
) -> None:
    two = registry.channels[TWO]
    two.cursors["inc1"].orders.release("two", 1)
    registry.lose("inc1", "it is silent")
    assert registry.channels[ONE].take() == [m.NodeLost("inc1", "it is silent")]
    assert two.take() == [m.NodeLost("inc1", "it is silent", is_shared=True)]


def test_f22_node_of_an_experiment_whose_process_is_away_counts_as_shared(
    registry: NodeRegistry,
) -> None:
    registry.leave(registry.channels[TWO])
    registry.lose("inc1", "it is silent")
    assert registry.channels[ONE].take() == [m.NodeLost("inc1", "it is silent", is_shared=True)]


def listed(registry: NodeRegistry) -> tuple[list[str], list[str]]:
    """Return the trials in the next assignment, and the experiments that it leaves untouched."""
    assignment = desired_state(registry).next_assignment()
    return [order.trial for order in assignment.orders], list(assignment.untouched)


def again(registry: NodeRegistry, key: str) -> None:
    """Let an experiment repeat all its orders for the node."""
    channel = registry.channels[key]
    orders = channel.cursors["inc1"].orders
    orders.put(order_of(key))
    channel.settle(channel.num_events)


def silent(registry: NodeRegistry) -> None:
    now = 1.0
    while registry.nodes["inc1"].is_heard:
        registry.read_leases(now, [b"1:0:0"])
        now += 1.0
    assert now < 60.0


def test_assignment_has_the_orders_of_all_experiments(registry):
    assert listed(registry) == (["one", "two"], [])


def test_events_go_to_the_experiment_of_their_stream(registry):
    one, two = registry.channels.values()
    assert registry.read_batch(two, b"5-1", batch(FINISHED)) == ("inc1", 1)

    assert events_of(two.take()) == [m.BatchRead("inc1", 1, 1, "5-1"), FINISHED]
    assert one.take() == []


def test_events_announce_an_expected_node_to_all_first():
    registry = registry_of(1, ONE, TWO)
    one, two = registry.channels.values()
    registry.expect(two, JOINED, 0)
    register(registry)
    registry.read_batch(two, b"5-1", batch(FINISHED))

    assert one.take() == [JOINED]
    assert events_of(two.take()) == [m.BatchRead("inc1", 1, 1, "5-1"), FINISHED]


@pytest.mark.parametrize(
    ("newest", "behind"),
    [
        (b"5-1", "5-2"),
        (b"5-18446744073709551615", "6-0"),
    ],
)
def test_entries_are_trimmed_up_to_any_that_was_journalled(newest, behind):
    channel = ExperimentChannel(ONE)
    channel.was_read(newest, "unknown", 1)
    assert channel.trim() == ("XTRIM", ONE, "MINID", behind)


def test_events_missing_in_one_stream_are_not_missed_in_another(registry):
    one, two = registry.channels.values()
    for channel in (one, two):
        registry.read_batch(channel, b"5-1", batch(FINISHED))
    registry.read_batch(two, b"5-2", batch(FINISHED, first=3))
    registry.read_batch(one, b"5-2", batch(FINISHED, first=2))

    assert registry.gaps == [TWO]
    assert events_of(one.take())[-2:] == [m.BatchRead("inc1", 2, 2, "5-2"), FINISHED]


def test_later_experiment_is_told_of_existing_nodes(registry):
    register(registry, "inc2", node="silent")
    late = registry.channels["late"] = ExperimentChannel("late")
    registry.announce(late)

    assert late.take() == [JOINED]
    assert not desired_state(registry).next_assignment().untouched


def test_returned_node_gets_orders_of_each_experiment_that_has_stated_them(registry):
    silent(registry)
    registry.read_leases(60.0, [b"2:1:1"])
    for channel in registry.channels.values():
        assert channel.take() == [replace(LOST, is_shared=True), m.NodeReturned("inc1")]
    assert not registry.nodes["inc1"].takes_orders, "no experiment has stated its orders"

    again(registry, TWO)
    assert registry.nodes["inc1"].takes_orders
    assert listed(registry) == (["two"], [ONE])
    again(registry, ONE)
    assert desired_state(registry).is_changed
    assert listed(registry) == (["one", "two"], [])


def test_experiment_that_has_not_handled_a_returned_node_has_stated_no_orders(registry):
    silent(registry)
    registry.read_leases(60.0, [b"2:1:1"])
    one = registry.channels[ONE]
    before = one.given
    one.take()
    again(registry, TWO)
    one.settle(before)
    one.settle(before + 1)
    assert listed(registry) == (["two"], [ONE]), "it has handled the loss, not the return"

    one.settle(before + 2)
    assert listed(registry) == (["two"], []), "it wants no trials"


def test_experiment_that_joins_while_a_node_is_away_is_told_that_it_joins(registry):
    silent(registry)
    late = registry.channels["late"] = ExperimentChannel("late")
    registry.announce(late)
    assert late.take() == []
    registry.read_leases(60.0, [b"2:1:1"])

    assert late.take() == [JOINED]
    assert listed(registry) == ([], [ONE, TWO]), "it wants no trials, the others may"


def test_ended_experiment_leaves_trials_of_others_on_nodes(registry):
    desired_state(registry).confirm(1, desired_state(registry).next_assignment().version)
    registry.commands.clear()
    assert registry.over(registry.channels[ONE]) == ["inc1"]

    replies = [command for command in registry.commands if command[0] == "HSET"]
    told = (
        "HSET",
        redis_keys.reply("inc1"),
        redis_keys.acknowledged_up_to(ONE),
        str(redis_keys.EVERYTHING),
    )
    assert replies == [told]
    (order,) = desired_state(registry).next_assignment().orders
    assert (order.trial, order.start) == ("two", None), "the node runs that already"


def test_ended_experiment_that_never_used_a_node_sends_it_nothing(registry):
    unused = registry.channels["unused"] = ExperimentChannel("unused")
    registry.announce(unused)
    desired_state(registry).next_assignment()

    assert registry.over(unused) == []
    assert not desired_state(registry).is_changed


def test_trials_of_an_absent_experiment_are_left_alone_on_all_nodes(registry):
    registry.leave(registry.channels[ONE])
    assert listed(registry) == (["two"], [ONE])
    register(registry, "inc2", node="another")
    registry.read_leases(1.0, [b"2:1:1", b"1:1:1"])
    assert registry.nodes["inc2"].desired_state.next_assignment().untouched == (ONE,)

    one = registry.channels[ONE] = ExperimentChannel(ONE)
    registry.expect(one, JOINED, 7)
    registry.announce(one)
    assert [read_event.instance_id for read_event in one.take()] == ["inc2"], "it knows the other"
    again(registry, ONE)
    assert listed(registry) == (["one", "two"], [])
    assert registry.nodes["inc2"].desired_state.next_assignment().untouched == ()


def test_absent_experiment_without_known_nodes_has_to_state_its_orders(registry):
    registry.leave(registry.channels[ONE])
    one = registry.channels[ONE] = ExperimentChannel(ONE)
    registry.announce(one)
    assert one.take() == [JOINED]
    assert listed(registry) == (["two"], [ONE])

    one.settle(1)
    assert listed(registry) == (["two"], [])


def test_scheduler_that_begins_with_absent_experiments_leaves_their_trials_alone():
    registry = NodeRegistry(5, [ONE, TWO])
    register(registry)
    registry.read_leases(0.0, [b"9:4:17"])
    assert not registry.nodes["inc1"].takes_orders, "no experiment is left to state orders"

    two = registry.channels[TWO] = ExperimentChannel(TWO)
    registry.expect(two, JOINED, 3)
    again(registry, TWO)
    assignment = desired_state(registry).next_assignment()
    assert (assignment.term, assignment.untouched) == (5, (ONE,))
    registry.channels[ONE] = ExperimentChannel(ONE)
    registry.over(registry.channels[ONE])
    assert listed(registry) == (["two"], []), "it had ended already"


@pytest.mark.parametrize("takes_it_for", ["alive", "away"])
@pytest.mark.parametrize("it_is", ["there", "away", "dead", "unknown"])
def test_experiment_that_knows_a_node_is_told_its_changes_meanwhile(registry, takes_it_for, it_is):
    registry.leave(registry.channels[ONE])
    if it_is == "away":
        silent(registry)
    elif it_is == "dead":
        registry.lose("inc1", "gone", is_dead=True)
    elif it_is == "unknown":
        registry = NodeRegistry(2, [ONE])
    one = registry.channels[ONE] = ExperimentChannel(ONE)
    registry.expect(one, JOINED, 3, away_since=None if takes_it_for == "alive" else 0.0)
    told = {
        ("alive", "away"): [m.NodeLost("inc1", "it is not heard", is_shared=True)],
        ("away", "there"): [m.NodeReturned("inc1")],
    }
    dead = [m.NodeLost("inc1", "gone", is_dead=True, is_shared=True)]

    assert one.take() == (dead if it_is == "dead" else told.get((takes_it_for, it_is), []))


def test_experiment_that_took_an_unheard_node_for_lost_is_told_of_its_return():
    registry = NodeRegistry(2, [ONE, TWO])
    one, two = (registry.channels.setdefault(key, ExperimentChannel(key)) for key in (ONE, TWO))
    registry.expect(one, JOINED, 3)
    again(registry, ONE)
    registry.expect(two, JOINED, 3, away_since=0.0)
    registry.read_leases(1.0, [b"9:1:17"])

    assert one.take() == []
    assert two.take() == [m.NodeReturned("inc1")]
    assert listed(registry) == (["one"], [TWO])


@pytest.mark.parametrize("end", ["over", "leave"])
def test_s15_nodes_that_only_an_ended_search_named_are_forgotten(registry, end):
    one, two = registry.channels[ONE], registry.channels[TWO]
    for name in ("invented", "known to two"):
        about = replace(JOINED, instance_id=name)
        registry.expect(one, about, 0)
    registry.expect(two, about, 0)
    registry.expect(one, replace(JOINED, instance_id="lost"), 0, away_since=0.0)
    assert len(registry.lease_keys()) == 4
    getattr(registry, end)(one)
    assert sorted(registry.nodes) == ["inc1", "known to two"]
    registry.read_leases(0.0, [None, None])


def test_s15_rejected_entries_take_no_memory_and_are_removed_in_one_command():
    channel = ExperimentChannel(ONE)
    channel.was_read(b"1-0", "inc1", 3)
    for number in range(1000):
        channel.was_read(b"2-%d" % number, *NOBODYS)
    assert len(channel._unacknowledged) == 2
    assert channel.trim() == ("XTRIM", ONE, "MINID", "2-1000")
    assert channel.trim() is None


def test_s02_search_cannot_describe_a_node_to_others():
    registry = registry_of(2, ONE, TWO)
    one, two = registry.channels.values()
    forged = replace(JOINED, node="other", resources={"cpu": float("nan"), "gpu": 1000.0})
    registry.expect(one, forged, 0)
    registry.read_leases(1.0, [b"1:0:0"])
    registry.read_leases(2.0, [b"2:0:0"])
    assert registry.nodes["inc1"].is_heard
    assert (one.take(), two.take()) == ([], [])
    register(registry)
    assert (one.take(), two.take()) == ([], [JOINED])
