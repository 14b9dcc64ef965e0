"""Several experiments on the same nodes: what each is told, and what nodes are told of each."""

from __future__ import annotations

import pytest
from msgspec.structs import replace

from tests.unit.scheduler.transport.nodes.test_roster import (
    FINISHED,
    JOINED,
    batch,
    introduce,
    roster_of,
)
from tests.unit.scheduler.transport.nodes.test_roster_away import LOST
from tests.unit.scheduler.transport.test_mailbox import START
from tunemq_scheduler.transport.desired_state import DesiredState
from tunemq_scheduler.transport.experiment_channel import ExperimentChannel
from tunemq_scheduler.transport.node_batches import events_of
from tunemq_scheduler.transport.nodes.node_registry import NodeRegistry
from tunemq_shared.broker import redis_keys
from tunemq_shared.protocol import messages as m
from tunemq_shared.protocol.conditions import TO_THE_END

ONE, TWO = "tunemq:events:one", "tunemq:events:two"


@pytest.fixture
def roster() -> NodeRegistry:
    """One node, on which each of two experiments has a trial of its own name."""
    roster = roster_of(1, ONE, TWO)
    introduce(roster)
    roster.read_leases(0.0, [b"1:0:0"])
    for key, tenant in roster.tenants.items():
        assert tenant.take() == [JOINED]
        tenant.stakes["inc1"].orders.put(order_of(key))
    return roster


def trial_of(key: str) -> str:
    return key.rpartition(":")[2]


def order_of(key: str) -> m.TrialOrder:
    return m.TrialOrder(trial_of(key), 1, TO_THE_END, start=START)


def mailbox(roster: NodeRegistry) -> DesiredState:
    return roster.nodes["inc1"].mailbox


def test_f22_experiment_is_told_that_a_lost_node_ran_trials_of_others(roster: NodeRegistry) -> None:
    roster.lose("inc1", "it is silent")
    for tenant in roster.tenants.values():
        assert tenant.take() == [m.NodeLost("inc1", "it is silent", is_shared=True)]


def test_f22_experiment_is_told_that_a_lost_node_ran_only_its_own_trials(
    roster: NodeRegistry,
) -> None:
    two = roster.tenants[TWO]
    two.stakes["inc1"].orders.release("two", 1)
    roster.lose("inc1", "it is silent")
    assert roster.tenants[ONE].take() == [m.NodeLost("inc1", "it is silent")]
    assert two.take() == [m.NodeLost("inc1", "it is silent", is_shared=True)]


def test_f22_node_of_an_experiment_whose_process_is_away_counts_as_shared(
    roster: NodeRegistry,
) -> None:
    roster.leave(roster.tenants[TWO])
    roster.lose("inc1", "it is silent")
    assert roster.tenants[ONE].take() == [m.NodeLost("inc1", "it is silent", is_shared=True)]


def listed(roster: NodeRegistry) -> tuple[list[str], list[str]]:
    """The trials in the next assignment, and the experiments of which it says nothing."""
    assignment = mailbox(roster).next_assignment()
    return [order.trial for order in assignment.orders], list(assignment.untouched)


def again(roster: NodeRegistry, key: str) -> None:
    """An experiment says all that it wants of the node, which it had before."""
    tenant = roster.tenants[key]
    orders = tenant.stakes["inc1"].orders
    orders.put(order_of(key))
    tenant.settle(tenant.stated)


def silent(roster: NodeRegistry) -> None:
    now = 1.0
    while roster.nodes["inc1"].is_heard:
        roster.read_leases(now, [b"1:0:0"])
        now += 1.0
    assert now < 60.0


def test_an_assignment_has_the_orders_of_all(roster):
    assert listed(roster) == (["one", "two"], [])


def test_events_are_told_to_the_experiment_whose_stream_they_were_in(roster):
    one, two = roster.tenants.values()
    assert roster.read_batch(two, b"5-1", batch(FINISHED)) == ("inc1", 1)

    assert events_of(two.take()) == [m.BatchRead("inc1", 1, 1, "5-1"), FINISHED]
    assert one.take() == []


def test_events_bring_an_expected_node_to_all_and_come_behind_that():
    roster = roster_of(1, ONE, TWO)
    one, two = roster.tenants.values()
    roster.expect(two, JOINED, 0)
    roster.read_batch(two, b"5-1", batch(FINISHED))

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
    tenant = ExperimentChannel(ONE)
    tenant.was_read(newest, "nobody", 1)
    assert tenant.trim() == ("XTRIM", ONE, "MINID", behind)


def test_events_that_are_missing_in_one_stream_are_not_missed_in_another(roster):
    one, two = roster.tenants.values()
    for tenant in (one, two):
        roster.read_batch(tenant, b"5-1", batch(FINISHED))
    roster.read_batch(two, b"5-2", batch(FINISHED, first=3))
    roster.read_batch(one, b"5-2", batch(FINISHED, first=2))

    assert roster.gaps == [TWO]
    assert events_of(one.take())[-2:] == [m.BatchRead("inc1", 2, 2, "5-2"), FINISHED]


def test_who_comes_later_is_told_of_the_nodes_that_are_there(roster):
    introduce(roster, "inc2", node="silent")
    late = roster.tenants["late"] = ExperimentChannel("late")
    roster.announce(late)

    assert late.take() == [JOINED]
    assert not mailbox(roster).next_assignment().untouched


def test_a_node_that_is_back_is_told_of_each_when_that_one_has_said_what_it_wants(roster):
    silent(roster)
    roster.read_leases(60.0, [b"2:1:1"])
    for tenant in roster.tenants.values():
        assert tenant.take() == [replace(LOST, is_shared=True), m.NodeReturned("inc1")]
    assert not roster.nodes["inc1"].takes_orders, "nobody has said anything"

    again(roster, TWO)
    assert roster.nodes["inc1"].takes_orders
    assert listed(roster) == (["two"], [ONE])
    again(roster, ONE)
    assert mailbox(roster).is_changed
    assert listed(roster) == (["one", "two"], [])


def test_one_that_has_not_handled_that_a_node_is_back_has_not_said_what_it_wants(roster):
    silent(roster)
    roster.read_leases(60.0, [b"2:1:1"])
    one = roster.tenants[ONE]
    before = one.given
    one.take()
    again(roster, TWO)
    one.settle(before)
    one.settle(before + 1)
    assert listed(roster) == (["two"], [ONE]), "it has handled the loss, not the return"

    one.settle(before + 2)
    assert listed(roster) == (["two"], []), "nothing is what it wants"


def test_who_comes_while_a_node_is_away_is_told_that_it_joins(roster):
    silent(roster)
    late = roster.tenants["late"] = ExperimentChannel("late")
    roster.announce(late)
    assert late.take() == []
    roster.read_leases(60.0, [b"2:1:1"])

    assert late.take() == [JOINED]
    assert listed(roster) == ([], [ONE, TWO]), "it wants nothing, the others may"


def test_when_one_is_over_nodes_keep_what_they_host_of_the_others(roster):
    mailbox(roster).confirm(1, mailbox(roster).next_assignment().version)
    roster.commands.clear()
    assert roster.over(roster.tenants[ONE]) == ["inc1"]

    replies = [command for command in roster.commands if command[0] == "HSET"]
    told = (
        "HSET",
        redis_keys.reply("inc1"),
        redis_keys.journalled(ONE),
        str(redis_keys.EVERYTHING),
    )
    assert replies == [told]
    (order,) = mailbox(roster).next_assignment().orders
    assert (order.trial, order.start) == ("two", None), "it hosts that already"


def test_when_one_is_over_that_never_used_a_node_the_node_hears_nothing(roster):
    unused = roster.tenants["unused"] = ExperimentChannel("unused")
    roster.announce(unused)
    mailbox(roster).next_assignment()

    assert roster.over(unused) == []
    assert not mailbox(roster).is_changed


def test_while_one_is_absent_its_hosts_are_left_as_they_are_on_all_nodes_old_and_new(roster):
    roster.leave(roster.tenants[ONE])
    assert listed(roster) == (["two"], [ONE])
    introduce(roster, "inc2", node="another")
    roster.read_leases(1.0, [b"2:1:1", b"1:1:1"])
    assert roster.nodes["inc2"].mailbox.next_assignment().untouched == (ONE,)

    one = roster.tenants[ONE] = ExperimentChannel(ONE)
    roster.expect(one, JOINED, 7)
    roster.announce(one)
    assert [fact.incarnation for fact in one.take()] == ["inc2"], "the other it knows"
    again(roster, ONE)
    assert listed(roster) == (["one", "two"], [])
    assert roster.nodes["inc2"].mailbox.next_assignment().untouched == ()


def test_one_that_was_absent_and_knows_no_node_has_to_say_what_it_wants_like_any(roster):
    roster.leave(roster.tenants[ONE])
    one = roster.tenants[ONE] = ExperimentChannel(ONE)
    roster.announce(one)
    assert one.take() == [JOINED]
    assert listed(roster) == (["two"], [ONE])

    one.settle(1)
    assert listed(roster) == (["two"], [])


def test_a_scheduler_that_begins_with_absent_experiments_touches_nothing_of_theirs():
    roster = NodeRegistry(5, [ONE, TWO])
    introduce(roster)
    roster.read_leases(0.0, [b"9:4:17"])
    assert not roster.nodes["inc1"].takes_orders, "there is nobody to say anything"

    two = roster.tenants[TWO] = ExperimentChannel(TWO)
    roster.expect(two, JOINED, 3)
    again(roster, TWO)
    assignment = mailbox(roster).next_assignment()
    assert (assignment.term, assignment.untouched) == (5, (ONE,))
    roster.tenants[ONE] = ExperimentChannel(ONE)
    roster.over(roster.tenants[ONE])
    assert listed(roster) == (["two"], []), "it was over already"


@pytest.mark.parametrize("takes_it_for", ["alive", "away"])
@pytest.mark.parametrize("it_is", ["there", "away", "dead", "unknown"])
def test_who_knows_a_node_is_told_what_became_of_it_meanwhile(roster, takes_it_for, it_is):
    roster.leave(roster.tenants[ONE])
    if it_is == "away":
        silent(roster)
    elif it_is == "dead":
        roster.lose("inc1", "gone", is_dead=True)
    elif it_is == "unknown":
        roster = NodeRegistry(2, [ONE])
    one = roster.tenants[ONE] = ExperimentChannel(ONE)
    roster.expect(one, JOINED, 3, away_since=None if takes_it_for == "alive" else 0.0)
    told = {
        ("alive", "away"): [m.NodeLost("inc1", "it is not heard", is_shared=True)],
        ("away", "there"): [m.NodeReturned("inc1")],
    }
    dead = [m.NodeLost("inc1", "gone", is_dead=True, is_shared=True)]

    assert one.take() == (dead if it_is == "dead" else told.get((takes_it_for, it_is), []))


def test_one_that_takes_a_node_for_lost_that_only_was_not_heard_yet_is_told_when_it_is():
    roster = NodeRegistry(2, [ONE, TWO])
    one, two = (roster.tenants.setdefault(key, ExperimentChannel(key)) for key in (ONE, TWO))
    roster.expect(one, JOINED, 3)
    again(roster, ONE)
    roster.expect(two, JOINED, 3, away_since=0.0)
    roster.read_leases(1.0, [b"9:1:17"])

    assert one.take() == []
    assert two.take() == [m.NodeReturned("inc1")]
    assert listed(roster) == (["one"], [TWO])
